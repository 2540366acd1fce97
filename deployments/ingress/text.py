"""The model's tokenizer and chat template, read from its folder.

A tokenizer.json (a "fast" tokenizer) is required: it is read by the `tokenizers` library alone,
which keeps torch and transformers out of the ingress process.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Encoding, Tokenizer

from deployments.ingress.chat import ChatTemplate
from deployments.ingress.detokenize import TextStream
from deployments.ingress.errors import invalid

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
                  "mask_token")  # fmt: skip


class Slice(NamedTuple):
    """One token of a text with its character offsets."""

    id: int
    text: str
    start: int
    stop: int


class Text:
    """Turns text into tokens and back, and messages into prompts."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None = None, threads: int = 2
    ) -> None:
        """`threads` encode beside the event loop; the library releases the GIL meanwhile."""
        # A saved tokenizer may carry training's truncation and padding.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")
        added = tokenizer.get_added_tokens_decoder()
        self._added = {id: token.content for id, token in added.items()}
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self._bytes_of = _TokenBytes(tokenizer, self._added)

    @classmethod
    def load(cls, folder: str) -> "Text":
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja."""
        root = Path(folder)
        path = root / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: a fast tokenizer is required; save one with "
                "AutoTokenizer.from_pretrained(model).save_pretrained(folder)"
            )
        return cls(Tokenizer.from_file(str(path)), _read_template(root))

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens are those that the tokenizer itself adds."""
        return await _loop().run_in_executor(self._pool, self._encode, text, add_special_tokens)

    async def slices(self, text: str, add_special_tokens: bool = True) -> list[Slice]:
        """Tokens of a text with the pieces of it that they stand for."""
        return await _loop().run_in_executor(self._pool, self._slices, text, add_special_tokens)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> tuple[str, list[int]]:
        """The rendered prompt and its ids; the template has written all special tokens."""
        template = self._template
        if template is None:
            raise invalid("this model has no chat template; use /v1/completions", "messages")

        def work() -> tuple[str, list[int]]:
            prompt = template.render(messages, variables)
            return prompt, self._encode(prompt, False)

        return await _loop().run_in_executor(self._pool, work)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens: special tokens skipped, no clean-up."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def stream(self, silent: frozenset[int] = frozenset()) -> TextStream:
        """An incremental decoder for one sequence; `silent` ids have no text."""
        return TextStream(self.decode, silent | self.special_ids if silent else self.special_ids)

    def token_bytes(self, id: int) -> bytes:
        """The bytes that one token stands for."""
        return self._bytes_of(id)

    def token_text(self, id: int) -> str:
        """The text of one token by itself, special tokens spelled out."""
        return self._bytes_of(id).decode("utf-8", "replace")

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._encoding(text, add_special_tokens).ids

    def _encoding(self, text: str, add_special_tokens: bool) -> Encoding:
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as fault:  # half of a surrogate pair
            raise invalid("the text is not valid Unicode") from fault

    def _slices(self, text: str, add_special_tokens: bool) -> list[Slice]:
        encoding = self._encoding(text, add_special_tokens)
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        return [Slice(id, text[start:stop], start, stop) for id, (start, stop) in pairs]


class _TokenBytes:
    """What bytes a token stands for, whichever way its vocabulary spells bytes.

    Byte-level vocabularies spell each byte as one printable character (GPT-2's table);
    sentencepiece ones write a space as U+2581 and raw bytes as <0x00>.
    """

    def __init__(self, tokenizer: Tokenizer, added: Mapping[int, str]) -> None:
        kinds = _kinds(json.loads(tokenizer.to_str()).get("decoder"))
        self._tokenizer = tokenizer
        self._added = added
        self._byte_level = _byte_table() if "ByteLevel" in kinds else None
        self._byte_fallback = "ByteFallback" in kinds
        self._known: dict[int, bytes] = {}

    def __call__(self, id: int) -> bytes:
        known = self._known.get(id)
        if known is None:
            known = self._known[id] = self._spell(id)
        return known

    def _spell(self, id: int) -> bytes:
        if id in self._added:
            return self._added[id].encode()
        token = self._tokenizer.id_to_token(id)
        if token is None:  # vocabularies are padded beyond the tokenizer's last id
            return b""
        if self._byte_level is not None:
            return b"".join(self._byte_level.get(char, char.encode()) for char in token)
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x"):
            return bytes.fromhex(token[3:5])
        return token.replace("\u2581", " ").encode()


def _byte_table() -> dict[str, bytes]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): bytes([byte]) for byte in printable}
    return table | {chr(0x100 + place): bytes([byte]) for place, byte in enumerate(others)}


def _kinds(decoder: Any) -> set[str]:
    """The kinds of a serialised decoder and of the decoders within it."""
    if not decoder:
        return set()
    parts = (_kinds(part) for part in decoder.get("decoders", ()))
    return {decoder["type"]}.union(*parts)


def _read_template(root: Path) -> ChatTemplate | None:
    """The folder's chat template: its own file first, else the tokenizer's config."""
    path = root / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    file = root / "chat_template.jinja"
    source = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    return ChatTemplate(source, _special_tokens(config)) if source else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by role; a config has each as a string or as an object with `content`."""
    found = {name: config[name] for name in _SPECIAL_NAMES if config.get(name)}
    return {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in found.items()
    }


def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()

"""The model's tokenizer and chat template, read from its folder.

A tokenizer.json (a "fast" tokenizer) is required: it is read by the `tokenizers` library alone,
which keeps torch and transformers out of the ingress process.
"""

import asyncio
import json
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Encoding, Tokenizer

from configs.templates import TemplateSource, read_template
from deployments.ingress.chat import ChatTemplate
from deployments.ingress.detokenize import TextStream
from deployments.ingress.errors import invalid
from deployments.ingress.galactica import ENDS, Unmarked, cuts_sequences, mark

_SHORT_CHARACTERS = 1000
"""A tokenizer takes about 0.1 ms for so many."""

_LONG_CHARACTERS = 100_000
"""A tokenizer takes about 50 ms for so many; longer texts wait for each other alone."""


class Slice(NamedTuple):
    """One token of a text with its character offsets."""

    id: int
    text: str
    start: int
    stop: int


class Text:
    """Turns text into tokens and back; `compiled` are the model's chat templates by their text."""

    def __init__(
        self, tokenizer: Tokenizer, templates: TemplateSource | None = None, threads: int = 2
    ) -> None:
        """`threads` encode beside the event loop, and one more what is very long."""
        # A saved tokenizer may carry training's truncation and padding.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.templates = templates or TemplateSource()
        tokens = self.templates.special_tokens
        texts = self.templates.by_name.values()
        self.compiled = {source: ChatTemplate(source, tokens) for source in texts}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")
        self._slow_pool = ThreadPoolExecutor(1, thread_name_prefix="long-texts")
        added = tokenizer.get_added_tokens_decoder()
        self._added = {id: token.content for id, token in added.items()}
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self._marks = cuts_sequences(tokenizer)
        self._quiet = self.special_ids
        if self._marks:
            self._quiet = frozenset(id for id in self.special_ids if self._added[id] in ENDS)
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
        return cls(Tokenizer.from_file(str(path)), read_template(root))

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens are those that the tokenizer itself adds.

        A short one is done on the spot: it takes less time than handing it to a thread.
        """
        if len(text) <= _SHORT_CHARACTERS:
            return self._encode(text, add_special_tokens)
        pool = self._pool_for(text)
        return await _loop().run_in_executor(pool, self._encode, text, add_special_tokens)

    async def slices(self, text: str, add_special_tokens: bool = True) -> list[Slice]:
        """Tokens of a text with the pieces of it that they stand for."""
        pool = self._pool_for(text)
        return await _loop().run_in_executor(pool, self._slices, text, add_special_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens: special tokens skipped (but Galactica's words), no clean-up."""
        if self._marks:
            return self._decode_all([id for id in ids if id not in self._quiet])
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def stream(
        self, silent: frozenset[int] = frozenset(), spoken: frozenset[int] = frozenset()
    ) -> TextStream:
        """An incremental decoder for one sequence.

        `silent` ids have no text; `spoken` ones have, though their tokens are special.
        """
        quiet = silent | self._quiet if silent else self._quiet
        if not spoken:
            return TextStream(self.decode, quiet)
        return TextStream(self._decode_all, quiet - spoken)

    def added(self, words: Container[str]) -> dict[str, int]:
        """Those of the words that are tokens of their own, special ones or not."""
        return {word: id for id, word in self._added.items() if word in words}

    def token_bytes(self, id: int) -> bytes:
        """The bytes that one token stands for."""
        return self._bytes_of(id)

    def token_text(self, id: int) -> str:
        """The text of one token by itself, special tokens spelled out."""
        return self._bytes_of(id).decode("utf-8", "replace")

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False)
        self._slow_pool.shutdown(wait=False)

    def _pool_for(self, text: str) -> ThreadPoolExecutor:
        return self._slow_pool if len(text) > _LONG_CHARACTERS else self._pool

    def _decode_all(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._encoding(self._tokenizer.encode_batch_fast, text, add_special_tokens).ids

    def _encoding(
        self, encode: Callable[..., list[Encoding]], text: str, add_special_tokens: bool
    ) -> Encoding:
        """Encode one text as a batch: of all ways to do it these alone release the GIL."""
        try:
            text = mark(text) if self._marks else text
            [encoding] = encode([text], add_special_tokens=add_special_tokens)
            return encoding
        except (UnicodeEncodeError, TypeError) as fault:  # half of a surrogate pair
            raise invalid("the text is not valid Unicode") from fault

    def _slices(self, text: str, add_special_tokens: bool) -> list[Slice]:
        encoding = self._encoding(self._tokenizer.encode_batch, text, add_special_tokens)
        offsets = encoding.offsets
        if self._marks:
            plain = Unmarked(mark(text))
            offsets = [(plain.offset(start), plain.offset(stop)) for start, stop in offsets]
        pairs = zip(encoding.ids, offsets, strict=True)
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


def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()

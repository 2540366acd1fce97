"""The model's tokenizer and chat template, read from its folder.

transformers reads the folder's tokenizer (conversion.py, in another process). This module uses only
the `tokenizers` library, so torch and transformers stay out of the ingress process.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace
from tokenizers import Encoding, Tokenizer

from configs.wire.templates import TemplateSource, read_template
from deployments.ingress.http.errors import RequestError, invalid
from deployments.ingress.text.conversion import convert
from deployments.ingress.text.detokenize import TextStream
from deployments.ingress.text.extents import Extents
from deployments.ingress.text.galactica import ENDS, MarkedOffsets, cuts_sequences, mark
from deployments.ingress.text.threads import BoundedThreads
from deployments.ingress.text.token_decoder import TokenDecoder

_SHORT_CHARACTERS = 1000
"""Texts up to this length take about 0.1 ms, less than handing them to a thread."""

_LONG_CHARACTERS = 100_000
"""Texts up to this length take about 50 ms; longer ones have a thread of their own."""

_MAX_WAITING = 8 * 2**20
"""Characters that may wait for a pool of threads: about ten seconds of work."""

_ALL_IDS = 2**31

_START_PER_TOKEN = 8
"""The start of a long text that is encoded first: so many characters for each allowed token."""


class Slice(NamedTuple):
    """One token of a text with its character offsets."""

    id: int
    text: str
    start: int
    stop: int


class Limit(NamedTuple):
    """How many tokens a text may have.

    refusal: makes the error from the text's size, e.g. "9 characters".
    """

    tokens: int
    refusal: Callable[[str], RequestError]


class ModelTokenizer:
    """Encodes texts, and decodes tokens.

    templates: the model's chat templates. special_ids: ids of the special tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: TemplateSource | None = None,
        cleans_up: bool = False,
        refused_strings: Sequence[str] = (),
    ) -> None:
        """cleans_up, refused_strings: as in `conversion.Converted`."""
        # A saved tokenizer may carry training's truncation and padding.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.templates = templates or TemplateSource()
        self._cleans_up = cleans_up
        self._refused_strings = refused_strings
        self._threads = BoundedThreads("tokenizer", 2, _MAX_WAITING)
        self._long_thread = BoundedThreads("long-texts", 1, _MAX_WAITING)
        added = tokenizer.get_added_tokens_decoder()
        self._added = {id: token.content for id, token in added.items()}
        # By the marks of a format, of which there are few.
        self._within: dict[frozenset[str], dict[str, int]] = {}
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self._markers = cuts_sequences(tokenizer)
        self._hidden_ids = self.special_ids
        if self._markers:
            self._hidden_ids = frozenset(id for id in self.special_ids if self._added[id] in ENDS)
        self._decoder = TokenDecoder(tokenizer)
        self._extents = Extents(tokenizer)

    @classmethod
    def load(cls, folder: str, trust_remote_code: bool = False) -> "ModelTokenizer":
        """The folder's tokenizer, equal to AutoTokenizer's, and its chat templates.

        FileNotFoundError if there is no tokenizer, ValueError if it cannot be served.
        """
        root = Path(folder)
        converted = convert(root, trust_remote_code)
        # The tokenizer's own special tokens, not those in the files: classes have defaults.
        templates = replace(read_template(root), special_tokens=converted.special_tokens)
        return cls(
            converted.tokenizer(),
            templates,
            cleans_up=converted.cleans_up,
            refused_strings=converted.refused_strings,
        )

    async def encode(
        self, text: str, add_special_tokens: bool = True, limit: Limit | None = None
    ) -> list[int]:
        """Token ids of a text.

        add_special_tokens: also those that the tokenizer itself adds, e.g. a begin token.
        limit: texts over it are refused, without encoding them (whole) where that is possible.
        """
        if limit is not None:
            self.check_length(text, limit)
        if len(text) <= _SHORT_CHARACTERS:
            return self._encode(text, add_special_tokens)
        threads = self._threads_for(text)
        if threads is self._long_thread and limit is not None:
            await self._check_start(text, limit)
        return await threads.run(len(text), self._encode, text, add_special_tokens)

    @property
    def num_special_tokens(self) -> int:
        """How many special tokens the tokenizer itself adds to a text."""
        return int(self._tokenizer.num_special_tokens_to_add(False))

    async def encode_cut(
        self, text: str, add_special_tokens: bool, num_tokens: int, side: str
    ) -> list[int]:
        """At most num_tokens ids of a text, cut on this side ("left" or "right").

        The special tokens that the tokenizer adds stay, as in transformers' truncation.
        """
        threads = self._threads_for(text)
        return await threads.run(
            len(text), self._encode_cut, text, add_special_tokens, num_tokens, side
        )

    async def encode_pair(self, text: str, second: str) -> tuple[list[int], int]:
        """Token ids of two texts, joined as the tokenizer joins them, and where the second begins.

        The latter is 0 for tokenizers without token types.
        """
        length = len(text) + len(second)
        if length <= _SHORT_CHARACTERS:
            return self._encode_pair(text, second)
        threads = self._long_thread if length > _LONG_CHARACTERS else self._threads
        return await threads.run(length, self._encode_pair, text, second)

    def check_length(self, text: str, limit: Limit) -> None:
        """Refuse a text that is too long for so few tokens, without encoding it."""
        if len(text) > self._extents.most_characters(limit.tokens):
            raise limit.refusal(f"{len(text)} characters")

    async def slices(self, text: str, add_special_tokens: bool = True) -> list[Slice]:
        """Tokens of a text with their pieces of it."""
        return await self._threads_for(text).run(len(text), self._slices, text, add_special_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special tokens (but with Galactica's visible ones)."""
        stream = self.stream()
        return stream.push(ids) + stream.flush()

    def stream(
        self,
        silent: frozenset[int] = frozenset(),
        visible: frozenset[int] = frozenset(),
        mute: bool = False,
    ) -> TextStream:
        """An incremental decoder for one sequence.

        silent: ids without text. visible: special tokens whose text is part of the answer.
        mute: no token has text.
        """
        if mute:
            return TextStream(self._decoder, range(_ALL_IDS))
        return TextStream(self._decoder, silent | (self._hidden_ids - visible), self._cleans_up)

    def hidden(
        self, stops: Sequence[str], silent: frozenset[int], visible: frozenset[int]
    ) -> dict[int, str]:
        """Contents of special tokens without text; {} if no stop string contains any of them.

        silent and visible: as for `stream`; silent tokens end the sequence anyway.
        """
        contents = {id: self._added[id] for id in self._hidden_ids - visible - silent}
        needed = any(each in stop for stop in stops for each in contents.values() if each)
        return contents if needed else {}

    def added_within(self, marks: frozenset[str]) -> dict[str, int]:
        """The ids of added tokens, special or not, that are one of these marks or part of one."""
        found = self._within.get(marks)
        if found is None:
            named = {text: id for id, text in self._added.items() if text}
            found = {text: id for text, id in named.items() if any(text in mark for mark in marks)}
            self._within[marks] = found
        return found

    def token_bytes(self, id: int) -> bytes:
        """The bytes of one token; a special token's content."""
        if id in self.special_ids:
            return self._added[id].encode()
        decoded = self._decoder.alone(id)
        return decoded if isinstance(decoded, bytes) else (decoded or "").encode()

    def token_text(self, id: int) -> str:
        """The text of one token; a special token's content."""
        return self.token_bytes(id).decode("utf-8", "replace")

    def close(self) -> None:
        """End the threads."""
        self._threads.close()
        self._long_thread.close()

    def _threads_for(self, text: str) -> BoundedThreads:
        return self._long_thread if len(text) > _LONG_CHARACTERS else self._threads

    async def _check_start(self, text: str, limit: Limit) -> None:
        """Refuse a very long text whose start has far too many tokens."""
        start = text[: max(_LONG_CHARACTERS, _START_PER_TOKEN * limit.tokens)]
        if len(start) > len(text) // 2:
            return
        ids = await self._long_thread.run(len(start), self._encode, start, False)
        # The rest of the text may join the last tokens of the start to fewer, longer ones.
        spare = limit.tokens // 8 + self._extents.longest + _SHORT_CHARACTERS
        if len(ids) > limit.tokens + spare:
            raise limit.refusal(f"more than {len(ids)} tokens")

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._encoding(self._tokenizer.encode_batch_fast, text, add_special_tokens).ids

    def _encode_cut(
        self, text: str, add_special_tokens: bool, num_tokens: int, side: str
    ) -> list[int]:
        added = self.num_special_tokens if add_special_tokens else 0
        encoding = self._encoding(self._tokenizer.encode_batch_fast, text, False)
        encoding.truncate(num_tokens - added, direction=side)
        return self._tokenizer.post_process(encoding, None, add_special_tokens).ids

    def _encode_pair(self, text: str, second: str) -> tuple[list[int], int]:
        if self._markers:
            raise invalid("this model's tokenizer does not join two texts")

        def encode(texts: Sequence[str], add_special_tokens: bool) -> list[Encoding]:
            pairs = [(text, second) for text in texts]
            return self._tokenizer.encode_batch(pairs, add_special_tokens=add_special_tokens)

        encoding = self._encoding(encode, text, True)
        types = encoding.type_ids
        return encoding.ids, types.index(1) if 1 in types else 0

    def _encoding(
        self, encode: Callable[..., list[Encoding]], text: str, add_special_tokens: bool
    ) -> Encoding:
        """Encode one text. As a batch of one: only the batch methods release the GIL."""
        refused = next((each for each in self._refused_strings if each in text), None)
        if refused is not None:
            raise invalid(f"prompts with {refused} are not served: write its tokens instead")
        try:
            text = mark(text) if self._markers else text
            [encoding] = encode([text], add_special_tokens=add_special_tokens)
            return encoding
        except (UnicodeEncodeError, TypeError) as fault:  # half of a surrogate pair
            raise invalid("the text is not valid Unicode") from fault

    def _slices(self, text: str, add_special_tokens: bool) -> list[Slice]:
        encoding = self._encoding(self._tokenizer.encode_batch, text, add_special_tokens)
        offsets = encoding.offsets
        if self._markers:
            plain = MarkedOffsets(mark(text))
            offsets = [(plain.offset(start), plain.offset(stop)) for start, stop in offsets]
        pairs = zip(encoding.ids, offsets, strict=True)
        return [Slice(id, text[start:stop], start, stop) for id, (start, stop) in pairs]

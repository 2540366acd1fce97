"""The model's tokenizer and chat template, read from its folder.

transformers says what the folder's tokenizer is (conversion.py); the `tokenizers` library alone
works here, which keeps torch and transformers out of the ingress process.
"""

from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Encoding, Tokenizer

from configs.wire.templates import TemplateSource, read_template
from deployments.ingress.http.errors import RequestError, invalid
from deployments.ingress.text.conversion import Converted, convert
from deployments.ingress.text.detokenize import TextStream
from deployments.ingress.text.extents import Extents
from deployments.ingress.text.galactica import ENDS, MarkedOffsets, cuts_sequences, mark
from deployments.ingress.text.lanes import Lane
from deployments.ingress.text.spelling import Spelling

_SHORT_CHARACTERS = 1000
"""A tokenizer takes about 0.1 ms for so many."""

_LONG_CHARACTERS = 100_000
"""A tokenizer takes about 50 ms for so many; longer texts wait for each other alone."""

_IN_LINE = 8 * 2**20
"""Characters that may wait for a thread: some ten seconds of its work."""

_BEGINNING = 8
"""Characters of a long text that are read first, for each token that it may have."""


class Slice(NamedTuple):
    """One token of a text with its character offsets."""

    id: int
    text: str
    start: int
    stop: int


class Limit(NamedTuple):
    """How many tokens a text may have; refusal: the error about one of e.g. "9 characters"."""

    tokens: int
    refusal: Callable[[str], RequestError]


class ModelTokenizer:
    """Turns text into tokens and back."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: TemplateSource | None = None,
        threads: int = 2,
        tidies: bool = False,
        apart: Sequence[str] = (),
    ) -> None:
        """`threads` encode beside the event loop, and one more what is very long.

        tidies and apart: as in `conversion.Converted`.
        """
        # A saved tokenizer may carry training's truncation and padding.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.templates = templates or TemplateSource()
        self._tidies = tidies
        self._apart = apart
        self._lane = Lane("tokenizer", threads, _IN_LINE)
        self._long_lane = Lane("long-texts", 1, _IN_LINE)
        added = tokenizer.get_added_tokens_decoder()
        self._added = {id: token.content for id, token in added.items()}
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self._markers = cuts_sequences(tokenizer)
        self._hidden_ids = self.special_ids
        if self._markers:
            self._hidden_ids = frozenset(id for id in self.special_ids if self._added[id] in ENDS)
        self._spelling = Spelling(tokenizer)
        self._extents = Extents(tokenizer)

    @classmethod
    def load(cls, folder: str, trust_remote_code: bool = False) -> "ModelTokenizer":
        """The folder's tokenizer, as AutoTokenizer has it, and its chat templates.

        FileNotFoundError where there is no tokenizer, ValueError for one that is not served.
        """
        root = Path(folder)
        converted = convert(root, trust_remote_code)
        templates = _templates(root, converted)
        tokenizer = converted.tokenizer()
        return cls(tokenizer, templates, tidies=converted.tidies, apart=converted.apart)

    async def encode(
        self, text: str, add_special_tokens: bool = True, limit: Limit | None = None
    ) -> list[int]:
        """Token ids of a text; special tokens are those that the tokenizer itself adds.

        A short one is done on the spot: it takes less time than handing it to a thread. What
        cannot have as few tokens as the limit says is refused unread; of what is very long the
        beginning is read first.
        """
        if limit is not None:
            self.check_length(text, limit)
        if len(text) <= _SHORT_CHARACTERS:
            return self._encode(text, add_special_tokens)
        lane = self._lane_for(text)
        if lane is self._long_lane and limit is not None:
            await self._read_beginning(text, limit)
        return await lane.run(len(text), self._encode, text, add_special_tokens)

    def check_length(self, text: str, limit: Limit) -> None:
        """Refuse, unread, a text that cannot have as few tokens."""
        if len(text) > self._extents.most_characters(limit.tokens):
            raise limit.refusal(f"{len(text)} characters")

    async def slices(self, text: str, add_special_tokens: bool = True) -> list[Slice]:
        """Tokens of a text with the pieces of it that they stand for."""
        return await self._lane_for(text).run(len(text), self._slices, text, add_special_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens: special tokens skipped (but Galactica's words)."""
        stream = self.stream()
        return stream.push(ids) + stream.flush()

    def stream(
        self, silent: frozenset[int] = frozenset(), visible: frozenset[int] = frozenset()
    ) -> TextStream:
        """An incremental decoder for one sequence.

        `silent` ids have no text; `visible` ones have, though their tokens are special.
        """
        return TextStream(self._spelling, silent | (self._hidden_ids - visible), self._tidies)

    def hidden(
        self, stops: Sequence[str], silent: frozenset[int], visible: frozenset[int]
    ) -> dict[int, str]:
        """Contents of the special tokens that have no text, if a stop string holds one of them.

        silent and visible as in `stream`; silent ones end the sequence anyway.
        """
        words = {id: self._added[id] for id in self._hidden_ids - visible - silent}
        held = any(word in stop for stop in stops for word in words.values() if word)
        return words if held else {}

    def added(self, words: Container[str]) -> dict[str, int]:
        """Those of the words that are tokens of their own, special ones or not."""
        return {word: id for id, word in self._added.items() if word in words}

    def token_bytes(self, id: int) -> bytes:
        """The bytes that one token stands for, special ones as they are written."""
        if id in self.special_ids:
            return self._added[id].encode()
        spelled = self._spelling.alone(id)
        return spelled if isinstance(spelled, bytes) else (spelled or "").encode()

    def token_text(self, id: int) -> str:
        """The text of one token by itself, special tokens spelled out."""
        return self.token_bytes(id).decode("utf-8", "replace")

    def close(self) -> None:
        """End the threads."""
        self._lane.close()
        self._long_lane.close()

    def _lane_for(self, text: str) -> Lane:
        return self._long_lane if len(text) > _LONG_CHARACTERS else self._lane

    async def _read_beginning(self, text: str, limit: Limit) -> None:
        """Refuse a text whose beginning alone has far too many tokens.

        What follows changes how the last ones are cut: the very last may turn out to be the pieces
        of one long token. So some more must be too many.
        """
        beginning = text[: max(_LONG_CHARACTERS, _BEGINNING * limit.tokens)]
        if len(beginning) > len(text) // 2:
            return
        ids = await self._long_lane.run(len(beginning), self._encode, beginning, False)
        spare = limit.tokens // 8 + self._extents.longest + _SHORT_CHARACTERS
        if len(ids) > limit.tokens + spare:
            raise limit.refusal(f"more than {len(ids)} tokens")

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._encoding(self._tokenizer.encode_batch_fast, text, add_special_tokens).ids

    def _encoding(
        self, encode: Callable[..., list[Encoding]], text: str, add_special_tokens: bool
    ) -> Encoding:
        """Encode one text as a batch: of all ways to do it these alone release the GIL."""
        apart = next((word for word in self._apart if word in text), None)
        if apart is not None:
            raise invalid(f"prompts with {apart} are not served: write the tokens that it means")
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


def _templates(root: Path, converted: Converted) -> TemplateSource:
    """The folder's chat templates, with the tokenizer's own special tokens."""
    found = read_template(root)
    return TemplateSource(found.text, converted.special_tokens, found.others)

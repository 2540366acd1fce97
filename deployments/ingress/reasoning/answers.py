"""Reads answers: reasoning, text and calls of functions, for every dialect."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from deployments.ingress.reasoning.formats import ReasoningFormat, Start
from deployments.ingress.reasoning.harmony import HarmonyReader
from deployments.ingress.reasoning.splitter import AnswerPart, ReasoningDelta, Splitter
from deployments.ingress.text.detokenizer_state import EndCheck, TextPiece
from deployments.ingress.tools.parsers import CallReader, CallStart, TextDelta
from deployments.ingress.tools.tooling import ToolFormat


@dataclass(frozen=True)
class AnswerFormat:
    """What the answers of one request consist of.

    tooling: None if no function may be called.
    reasoning: None if answers are not split.
    start: where an answer begins.
    shows_reasoning: whether readers return the reasoning; if not, they only count it.
    """

    tooling: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    start: Start = Start.EITHER
    shows_reasoning: bool = True

    @property
    def plain(self) -> bool:
        """Whether answers are text and nothing else."""
        return self.tooling is None and self.reasoning is None

    @property
    def ends_with_call(self) -> bool:
        """Whether an answer ends with its first call, and no grammar ends it there."""
        toolbox = self.tooling.toolbox if self.tooling is not None else None
        return toolbox is not None and not (toolbox.parallel or toolbox.forced)

    def end_check(self) -> EndCheck:
        """A check that finds the token with which the first call of one answer is complete."""
        reader = self.reader()

        def is_complete(piece: TextPiece) -> bool:
            reader.push([piece])
            return reader.ended

        return is_complete

    def call_id(self, call: CallStart, prefix: str = "call_") -> str:
        """The id of a call of an answer."""
        assert self.tooling is not None, "a call without tools"
        return self.tooling.call_id(call, prefix)

    def reader(self) -> "AnswerReader":
        """A reader for one answer."""
        calls = self.tooling.reader() if self.tooling is not None else None
        channels = self.tooling is not None and self.tooling.format.channels
        if channels or (self.reasoning is not None and self.reasoning.channels):
            return self._channel_reader(None if channels else calls)
        splitter = Splitter(self.reasoning, self.start) if self.reasoning is not None else None
        return AnswerReader(splitter, calls, self.shows_reasoning)

    def _channel_reader(self, calls: CallReader | None) -> "AnswerReader":
        """A reader of channels; calls: reads those in the text, if they are not messages."""
        toolbox = self.tooling.toolbox if self.tooling is not None and calls is None else None
        names = [function.name for function in toolbox.callable] if toolbox is not None else []
        parallel, joins = toolbox is None or toolbox.parallel, self.reasoning is None
        reader = HarmonyReader(names, parallel, self.start, joins)
        return AnswerReader(reader, calls, self.shows_reasoning)


class AnswerReader:
    """Reads one answer; `push` its text as it comes, then `end`.

    reasoning_tokens: tokens up to the end of the reasoning, its marks included.
    undecided_tokens: the last tokens, if they may begin reasoning.
    """

    def __init__(
        self,
        splitter: Splitter | HarmonyReader | None,
        calls: CallReader | None,
        shows_reasoning: bool = True,
    ) -> None:
        self._splitter = splitter
        self._calls = calls
        self._shows_reasoning = shows_reasoning
        self.reasoning_tokens = 0
        self.undecided_tokens = 0

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        own = self._splitter.num_calls if self._splitter is not None else 0
        return own + (self._calls.num_calls if self._calls is not None else 0)

    @property
    def ended(self) -> bool:
        """Whether the only call that is wanted is complete."""
        return any(one is not None and one.ended for one in (self._splitter, self._calls))

    @property
    def cut_off(self) -> bool:
        """Whether the answer ended within a call."""
        return any(one is not None and one.cut_off for one in (self._splitter, self._calls))

    def push(self, pieces: Sequence[TextPiece], rest: str = "") -> list[AnswerPart]:
        """Add the text of tokens, and text after them; returns the parts that are certain now.

        With a splitter each token must be a piece, as they are counted.
        """
        splitter = self._splitter
        if splitter is None:
            return self._read([TextDelta("".join([piece.text for piece in pieces]) + rest)])
        parts: list[AnswerPart] = []
        for piece in pieces:
            before = splitter.reasoning
            parts += splitter.push(piece.text)
            self.undecided_tokens += 1
            if before or splitter.reasoning:
                self.reasoning_tokens += self.undecided_tokens
            elif splitter.undecided:
                continue
            self.undecided_tokens = 0
        return self._read(parts + splitter.push(rest))

    def end(self) -> list[AnswerPart]:
        """The remaining parts. No text may follow."""
        parts = self._read(self._splitter.end()) if self._splitter is not None else []
        return parts + (self._calls.end() if self._calls is not None else [])

    def _read(self, parts: Iterable[AnswerPart]) -> list[AnswerPart]:
        """The parts with the calls found in their text."""
        found: list[AnswerPart] = []
        for part in parts:
            if isinstance(part, TextDelta) and self._calls is not None:
                found += self._calls.push(part.text)
            elif self._shows_reasoning or not isinstance(part, ReasoningDelta):
                found.append(part)
        return [part for part in found if not isinstance(part, TextDelta) or part.text]


@dataclass
class ReadCall:
    """A call in an answer; arguments: JSON text."""

    name: str
    arguments: str = ""


@dataclass
class Answer:
    """The reasoning, the text and the calls of an answer."""

    text: str = ""
    reasoning: str = ""
    calls: list[ReadCall] = field(default_factory=list)

    def add(self, parts: Iterable[AnswerPart]) -> None:
        """Add parts of a reader."""
        for part in parts:
            if isinstance(part, TextDelta):
                self.text += part.text
            elif isinstance(part, ReasoningDelta):
                self.reasoning += part.text
            elif isinstance(part, CallStart):
                self.calls.append(ReadCall(part.name))
            else:
                self.calls[-1].arguments += part.text


def read_whole(reader: AnswerReader, text: str, pieces: Sequence[TextPiece] = ()) -> Answer:
    """Read a whole answer; pieces: its tokens, which are counted."""
    rest = text.removeprefix("".join([piece.text for piece in pieces]))
    answer = Answer()
    answer.add(reader.push(pieces, rest) + reader.end())
    return answer

"""Splits an answer into reasoning and text as it comes.

The result does not depend on how the answer is cut into pieces, and takes time linear in it.
"""

from collections.abc import Callable
from typing import NamedTuple

from deployments.ingress.reasoning.formats import ReasoningFormat, Start
from deployments.ingress.text.stops import begun_length
from deployments.ingress.tools.parsers import Part, TextDelta


class ReasoningDelta(NamedTuple):
    """More of the model's reasoning."""

    text: str


AnswerPart = Part | ReasoningDelta


class Splitter:
    """Splits one answer at its marks; blanks around the reasoning are dropped.

    Only an answer that begins with the opening mark, or whose prompt ended with it, has reasoning.
    """

    num_calls = 0
    ended = cut_off = False

    def __init__(self, format: ReasoningFormat, start: Start) -> None:
        self._format = format
        self._open = start is Start.REASONING
        self._state: Callable[[], bool] = self._text if start is Start.TEXT else self._start
        self._buffer = ""  # Text that may belong to a mark.
        self._blanks: list[str] = []  # Blanks before what comes next.
        self._begun = False  # The reasoning has more than blanks.
        self._parts: list[AnswerPart] = []

    @property
    def reasoning(self) -> bool:
        """Whether the answer is in its reasoning."""
        return self._state == self._reasoning or (self._open and self._state == self._start)

    @property
    def undecided(self) -> bool:
        """Whether the text so far may begin the opening mark of reasoning."""
        return self._state == self._start

    def push(self, text: str) -> list[AnswerPart]:
        """Add text; returns the parts that are certain now."""
        self._buffer += text
        while self._buffer and self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    def end(self) -> list[AnswerPart]:
        """The remaining parts. No text may follow."""
        if self.reasoning:
            self._add_reasoning(self._buffer)
        elif self._state == self._start:
            self._add_text("".join(self._blanks) + self._buffer)
        self._buffer = ""
        parts, self._parts = self._parts, []
        return parts

    # Each state consumes what it can from the buffer. True: the next state may continue.

    def _start(self) -> bool:
        """State: nothing but blanks so far."""
        self._skip_blanks()
        begin = self._format.begin
        if self._buffer.startswith(begin):
            # A model may repeat the mark with which its prompt ended.
            self._buffer = self._buffer[len(begin) :]
            self._enter(self._reasoning)
        elif begin.startswith(self._buffer):
            return False
        elif self._open:
            self._enter(self._reasoning)
        else:
            self._buffer = "".join(self._blanks) + self._buffer
            self._enter(self._text)
        return True

    def _reasoning(self) -> bool:
        end = self._format.end
        at = self._buffer.find(end)
        cut = at if at >= 0 else len(self._buffer) - begun_length(self._buffer, end)
        self._add_reasoning(self._buffer[:cut])
        if at < 0:
            self._buffer = self._buffer[cut:]
            return False
        self._buffer = self._buffer[at + len(end) :]
        self._enter(self._after)
        return True

    def _after(self) -> bool:
        """State: blanks after the reasoning."""
        self._skip_blanks()
        if self._buffer:
            self._enter(self._text)
        return bool(self._buffer)

    def _text(self) -> bool:
        self._add_text(self._buffer)
        self._buffer = ""
        return False

    def _enter(self, state: Callable[[], bool]) -> None:
        self._state = state
        self._blanks = []
        self._begun = False

    def _skip_blanks(self) -> None:
        """Move the blanks at the start out of the buffer, so that they are read once."""
        begun = self._buffer.lstrip()
        self._blanks.append(self._buffer[: len(self._buffer) - len(begun)])
        self._buffer = begun

    def _add_reasoning(self, text: str) -> None:
        """Add all but the blanks at the start, and those at the end until more follows."""
        shown = text.rstrip()
        if shown:
            before = "".join(self._blanks)
            self._parts.append(ReasoningDelta(before + shown if self._begun else shown.lstrip()))
            self._begun, self._blanks = True, []
        self._blanks.append(text[len(shown) :])

    def _add_text(self, text: str) -> None:
        if text:
            self._parts.append(TextDelta(text))

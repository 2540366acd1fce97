"""Reads gpt-oss's answers: messages in channels, each with a header (OpenAI's harmony format).

`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…`. The header
of a call has its function: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>`.
"""

import re
from collections.abc import Callable, Sequence

from deployments.ingress.reasoning.formats import Start
from deployments.ingress.reasoning.splitter import AnswerPart, ReasoningDelta
from deployments.ingress.text.stops import begun_length
from deployments.ingress.tools.parsers import ArgumentsDelta, CallStart, TextDelta

_MESSAGE = "<|message|>"
# What ends a message; a model may begin the next one without the first of them.
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_CALL = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")
# A longer text without the end of a header is no header.
_MAX_HEADER = 1024


class HarmonyReader:
    """Reads one answer: analysis is reasoning, messages to functions are calls, others are text.

    cut_off: whether it ended within the message of a call; so do calls that a stop token ends.
    """

    def __init__(
        self, names: Sequence[str], parallel: bool, start: Start, joins_reasoning: bool = False
    ) -> None:
        """names: of the functions; a call of another one stays text.

        joins_reasoning: whether the reasoning is text like any other.
        """
        self._names = frozenset(names)
        self._parallel = parallel
        self._joins_reasoning = joins_reasoning
        self._state: Callable[[], bool] = self._header
        self._add: Callable[[str], None] = self._add_text
        if start is not Start.EITHER:
            self._state = self._body
            self._add = self._add_reasoning if start is Start.REASONING else self._add_text
        self._buffer = ""
        self._parts: list[AnswerPart] = []
        self.num_calls = 0
        self.cut_off = False

    @property
    def ended(self) -> bool:
        """Whether the only call that is wanted is complete."""
        return self.num_calls > 0 and not self._parallel and self._state == self._header

    @property
    def reasoning(self) -> bool:
        """Whether the answer is in its reasoning."""
        is_analysis = self._state == self._body and self._add == self._add_reasoning
        return is_analysis and not self._joins_reasoning

    @property
    def undecided(self) -> bool:
        """Whether the text so far may begin the header of reasoning."""
        return self._state == self._header

    def push(self, text: str) -> list[AnswerPart]:
        """Add text; returns the parts that are certain now."""
        self._buffer += text
        while self._buffer and self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    def end(self) -> list[AnswerPart]:
        """The remaining parts. No text may follow."""
        self.cut_off = self._state == self._body and self._add == self._add_arguments
        # A header that is cut off has no text for the client.
        if self._state == self._body or not self._buffer.lstrip().startswith("<|"):
            self._add(self._buffer)
        self._buffer = ""
        parts, self._parts = self._parts, []
        return parts

    # Each state consumes what it can from the buffer. True: the next state may continue.

    def _header(self) -> bool:
        """State: before the text of a message."""
        at = self._buffer.find(_MESSAGE, 0, _MAX_HEADER)
        if at < 0 or not self._may_be_header():
            if self._may_be_header() and len(self._buffer) < _MAX_HEADER:
                return False
            # A model that writes plain text; one character, so that a mark at its start ends.
            self._add_text(self._buffer[0])
            self._buffer, self._state = self._buffer[1:], self._body
            return True
        header, self._buffer = self._buffer[:at], self._buffer[at + len(_MESSAGE) :]
        self._add = self._writer(header)
        self._state = self._body
        return True

    def _may_be_header(self) -> bool:
        begun = self._buffer.lstrip()
        starts = ("<|start|>", "<|channel|>", "assistant", "to=")
        return any(begun.startswith(start) or start.startswith(begun) for start in starts)

    def _body(self) -> bool:
        found = [(self._buffer.find(end), end) for end in _ENDS]
        at, end = min([(at, end) for at, end in found if at >= 0], default=(-1, ""))
        if at < 0:
            cut = len(self._buffer) - max(begun_length(self._buffer, end) for end in _ENDS)
            self._add(self._buffer[:cut])
            self._buffer = self._buffer[cut:]
            return False
        self._add(self._buffer[:at])
        # The marks that begin a header belong to it.
        self._buffer = self._buffer[at if end in ("<|start|>", "<|channel|>") else at + len(end) :]
        self._add, self._state = self._add_text, self._header
        return True

    def _writer(self, header: str) -> Callable[[str], None]:
        """What adds the text of a message with this header."""
        if called := _CALL.search(header):
            if called[1] not in self._names:
                return self._add_text
            if self.num_calls and not self._parallel:
                return self._drop
            self._parts.append(CallStart(self.num_calls, called[1]))
            self.num_calls += 1
            return self._add_arguments
        return self._add_reasoning if _ANALYSIS.search(header) else self._add_text

    def _add_reasoning(self, text: str) -> None:
        if text:
            self._parts.append(TextDelta(text) if self._joins_reasoning else ReasoningDelta(text))

    def _add_arguments(self, text: str) -> None:
        if text:
            self._parts.append(ArgumentsDelta(self.num_calls - 1, text))

    def _add_text(self, text: str) -> None:
        if text:
            self._parts.append(TextDelta(text))

    def _drop(self, text: str) -> None:
        """A further call, where only one is wanted."""

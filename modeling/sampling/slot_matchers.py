"""SlotMatcher: one batch slot's matcher, and what it has not read yet of the slot's answer.

A row with a draft samples several tokens, which are the answer's up to the first that is not the
draft's. The host drops the others when it applies the step; here they are dropped in the same way.
"""

from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from configs.wire.plan import num_right
from modeling.transfer import HostCopy

if TYPE_CHECKING:
    from llguidance import LLMatcher


class StepSamples:
    """The tokens that one step sampled, while they are copied to the host."""

    def __init__(self, tokens: Tensor) -> None:
        self._copy = HostCopy([tokens])

    @cached_property
    def values(self) -> list[int]:
        """Wait for the tokens and return them."""
        [tokens] = self._copy.wait()
        values: list[int] = tokens.tolist()
        return values


class Masked(NamedTuple):
    """Which of a row's samples a matcher masks: one, and one behind each token of `drafts`.

    offset: the first of them, counted from the row's first sample.
    """

    offset: int
    drafts: tuple[int, ...]


class FreeText:
    """The part of an answer before its constraint begins: a model's reasoning.

    begin: the answer has such a part only if this is its first token; -1: in any case.
    end: the tokens that end it; others may come before the last of them.
    """

    def __init__(self, begin: int, end: tuple[int, ...]) -> None:
        self.begin = begin
        *self._header, self._last = end
        self._newest: list[int] = []
        self._ends = not self._header  # All that is missing is the last token.

    def rest(self, tokens: list[int]) -> list[int] | None:
        """Add tokens; returns those after this part, None while it lasts."""
        if self.begin >= 0 and tokens:
            if tokens[0] != self.begin:
                return tokens
            self.begin = -1
        for index, token in enumerate(tokens):
            if self._ends:
                if token == self._last:
                    return tokens[index + 1 :]
            else:
                self._newest = [*self._newest, token][-len(self._header) :]
                self._ends = self._newest == self._header
        return None

    def masked(self, drafts: tuple[int, ...]) -> tuple[range, list[Masked]]:
        """Return which samples of a row with this draft are free, and which a matcher masks."""
        # The first sample may begin this part, and is masked but for that.
        first = [Masked(0, ())] if self.begin >= 0 else []
        rest = copy(self).rest(list(drafts))
        if rest is None:
            return range(len(first), len(drafts) + 1), first
        offset = len(drafts) - len(rest)
        return range(len(first), offset), [*first, Masked(offset, tuple(rest))]


class AnswerRow(NamedTuple):
    """A row that samples.

    first: the index in the answer of its first sample; None: the next token, whichever that is.
    drafts: the tokens that it guesses from there on.
    """

    first: int | None = None
    drafts: tuple[int, ...] = ()


_NEXT = AnswerRow()


@dataclass
class SlotMatcher:
    """One batch slot's matcher, and the tokens that it has not consumed yet.

    number: the key under which the matcher was prepared.
    matcher: None if it was not prepared.
    known: tokens of the request when it joined.
    sampled: rows since: what their steps sampled, the index of their first token there, themselves.
    free: the part of the answer before the constraint; None once it has begun.
    row: the newest row.
    num_taken: tokens of the answer that `pending` has returned.
    """

    number: int
    matcher: "LLMatcher | None"
    known: list[int]
    sampled: list[tuple[StepSamples, int, AnswerRow]] = field(default_factory=list)
    free: FreeText | None = None
    row: AnswerRow = _NEXT
    num_taken: int = 0

    def sample(self, samples: StepSamples, index: int) -> None:
        """The newest row samples; `index` is that of its first token in the step's."""
        self.sampled.append((samples, index, self.row))

    def pending(self) -> list[int]:
        """Take the tokens that the matcher has not consumed; waits for copies from the device."""
        tokens = self.known
        for samples, index, row in self.sampled:
            if row.first in (None, self.num_taken + len(tokens)):  # Else it is void.
                own = samples.values[index : index + 1 + len(row.drafts)]
                tokens += own[: 1 + num_right(row.drafts, own)]
        self.known, self.sampled = [], []
        self.num_taken += len(tokens)
        return tokens

    @property
    def is_void(self) -> bool:
        """Whether the newest row is behind a wrong draft, after `pending`."""
        return self.row.first not in (None, self.num_taken)

"""Which requests get a draft in a step, and what becomes of drafts that the ranks checked.

A row with a draft may begin with a token that a plan in flight samples, as every row may; the
draft then guesses that token too. A row behind a draft that is still checked begins where that one
ends, if it will probably be right. Otherwise its request waits. Where a draft was wrong, rows in
flight behind it are void. Their keys and values, and those of wrong tokens, are overwritten by the
request's next row, and no block with them is in the prefix cache: that takes blocks of known
tokens alone.

Drafts are looked up in the text, or heads guess them on the ranks: a step then brings, with its
samples, guesses of what follows them. A row behind those is planned before they are known: it
*follows* the row in flight, and the ranks find its start and its draft themselves.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from configs.engine import DRAFT_LENGTHS, MOST_DRAFTED
from configs.wire.plan import StepRow, num_right
from scheduler.admission.limits import Limits
from scheduler.draft_costs import DraftCosts
from scheduler.drafts import Drafter
from scheduler.request import Request
from scheduler.step import StepBuilder

Drafts = dict[int, tuple[int, ...] | int | None]
"""By a request's serial number: its draft; or its row follows the one in flight, with so many of
its guesses at most; None: it has no row in this step."""

SURE = 0.9
"""The chance that a draft is wholly right, from which the next row does not wait for its check."""

HOLD = 5
"""If one of so many requests waits for the check of its draft, all do: a step takes as long for
some of them as for all, and the time between a check and the next step is shorter than a step."""

MARGIN = 1.1
"""Tokens a second with drafts must be so many times those without."""


class Drafting:
    """Decides step by step whether drafts pay, and how long they are."""

    def __init__(self, heads: int | None = None) -> None:
        """heads: how many tokens heads guess; None: drafts are looked up in the text."""
        self.costs = DraftCosts()
        self._heads = heads

    def plan(self, requests: Sequence[Request], step: StepBuilder, limits: Limits) -> Drafts:
        """Return the drafts behind the next tokens of running requests; most have none."""
        most = min(limits.max_draft_tokens, self._heads or limits.max_draft_tokens)
        if self._heads:
            drafts: Drafts = {each.serial: 0 for each in requests if self.may_follow(each)}
            ready = list(requests)
            if not requests:
                step.guesses = most
        else:
            waiting = [request for request in requests if _waits(request)]
            if len(waiting) * HOLD >= len(requests):
                return _none_of(requests)
            drafts = _none_of(waiting)
            ready = [request for request in requests if request.serial not in drafts]
        may = [request for request in ready if self._may_draft(request)]
        if len(requests) > limits.max_drafting or not may or self.costs.lacks_plain(len(ready)):
            return drafts
        # Texts are searched, and heads guess, only if that could pay.
        margin = MARGIN
        length = self._length(len(ready), [(each.drafter, most) for each in may], most, margin)
        step.guesses = length if self._heads else 0
        if not length:
            margin = 0.0
            # Guesses that are known are used: that says what they are worth.
            if not any(each.guesses for each in may):
                return drafts
        found = [(each, self._found(each, most)) for each in may]
        drafters = [(each.drafter, _size(draft)) for each, draft in found]
        length = self._length(len(ready), drafters, most, margin)
        step.draft_length, budget = length, min(step.budget - len(ready), MOST_DRAFTED)
        for request, draft in found:
            size = min(length, max(0, budget), _size(draft))
            if size:
                drafts[request.serial] = size if isinstance(draft, int) else draft[:size]
                budget -= size
        return drafts

    def may_follow(self, request: Request) -> bool:
        """Whether its next row begins wherever the draft in flight turns out to be right."""
        return self._heads is not None and bool(request.drafts)

    def _may_draft(self, request: Request) -> bool:
        """Whether a draft may follow its next token, and is worth a look."""
        unknown = request.pending - len(request.drafts)
        # Wrong drafts spend a matcher's limits too, and the request ends with its own matcher's.
        followed = not (request.sampling.constraint and request.own_matcher)
        request.drafter.expect_again(request.total)
        is_guessable = request.has_heads or self._heads is None
        return unknown <= 1 and followed and self._room(request) > 0 and is_guessable

    def _room(self, request: Request) -> int:
        """How long a draft may be, so that the answer does not get too long."""
        guessed = len(request.drafts) if self._heads else 0
        return request.max_total - request.total + guessed - 1

    def _found(self, request: Request, most: int) -> tuple[int, ...] | int:
        """The draft behind a request's next token, as long as the answer at most.

        A number: so many tokens are guessed by a step in flight.
        """
        length = min(most, self._room(request))
        if self._heads:
            in_flight = min(length, request.num_guessed)
            return in_flight if request.pending else request.guesses[:length]
        unknown = request.pending - len(request.drafts)
        return request.drafter.find(request.tokens, length + unknown, request.drafts)[unknown:]

    def _length(
        self, rows: int, drafters: Sequence[tuple[Drafter, int]], most: int, margin: float
    ) -> int:
        """The length that brings most tokens a second; 0 if none does.

        drafters: of some of the rows, with the tokens that each has found. margin: tokens a second
        must be so many times those without.
        """
        best, rate = 0, margin * rows / self.costs.of(rows, 0)
        for length in _lengths(most, len(drafters)):
            tokens = rows + sum(each.expected(min(length, found)) for each, found in drafters)
            if tokens / self.costs.of(rows, length) > rate:
                best, rate = length, tokens / self.costs.of(rows, length)
        if not best:
            for length in _lengths(most, len(drafters)):
                self.costs.forget(rows, length)
        return best


def _lengths(most: int, rows: int) -> list[int]:
    """The lengths that are tried, ascending; the ranks have captured steps for the first ones.

    rows: of which each may have a draft.
    """
    longer = (*DRAFT_LENGTHS, 16, 32, 64)
    found = [min(length, most) for before, length in pairwise((0, *longer)) if before < most]
    return [length for length in found if length * rows <= MOST_DRAFTED]


def _waits(request: Request) -> bool:
    """Whether its draft that is checked must be known before its next row."""
    guessed = len(request.drafts)
    unknown = request.pending - guessed
    return guessed > 0 and (unknown > 1 or request.drafter.chance**guessed < SURE)


def _size(draft: tuple[int, ...] | int) -> int:
    """Of a draft, or of one in flight."""
    return draft if isinstance(draft, int) else len(draft)


def _none_of(requests: Iterable[Request]) -> Drafts:
    """These have no row in the step."""
    return dict.fromkeys((request.serial for request in requests), None)


def take_guesses(step: StepBuilder, guesses: Sequence[Sequence[int]]) -> None:
    """Keep what heads guessed for the rows of a step that was applied."""
    for request, row, found in zip(step.requests, step.rows, guesses, strict=True):
        # A void row's guesses are of another text.
        if row.samples and row.start < request.computed:
            request.has_heads = bool(found)
            request.guesses = () if request.pending else tuple(found)


def right_samples(request: Request, row: StepRow, sampled: list[int]) -> list[int]:
    """The samples of a row up to the first that is not its draft's; the draft is checked now."""
    count = num_right(row.drafts, sampled)
    request.drafter.verified(len(row.drafts), count)
    if count < len(row.drafts):
        request.scheduled = row.start + row.length - len(row.drafts) + count
        request.pending, request.drafts = 0, ()
    elif not request.pending:
        request.drafts = ()
    return sampled[: count + 1]

"""StepBuilder: a plan while it is built, then what it named until its result is applied."""

import msgspec

from configs.wire.plan import (
    AdapterLoad,
    RequestJoin,
    StepPlan,
    StepResult,
    StepRow,
    settled,
)
from configs.wire.sampling import Pooling
from scheduler.adapters.resident import Resident
from scheduler.request import Request

MAX_STEP_LOADS = 4
"""Adapter loads that one plan begins: launching their copies delays the launch of the step."""


class StepBuilder:
    """The rows, joins, loads and drops of one step, and the requests and adapters behind them.

    budget: tokens that may still be added. tokens: those that were.
    draft_length: of drafts in this step, at most; 0 without any.
    guesses: as in `StepPlan`.
    generating: tokens of rows that get a running request's next token, drafts counted.
    planned: when it was planned, in seconds.
    number: the plan's step once it is built.
    requests: requests[i] is that of rows[i].
    following: the indices of rows that follow rows of the step before, until it is applied.
    waits: whether there were any: then the ranks wait for that step's tokens.
    dropped: the adapters that lose their host copies by the plan.
    """

    def __init__(self, budget: int, planned: float = 0.0) -> None:
        self.budget = budget
        self.planned = planned
        self.tokens = 0
        self.draft_length = 0
        self.guesses = 0
        self.generating = 0
        self.number = -1
        self.joins: list[RequestJoin] = []
        self.rows: list[StepRow] = []
        self.requests: list[Request] = []
        self.following: list[int] = []
        self.waits = False
        self.loads: list[AdapterLoad] = []
        self.dropped: list[Resident] = []

    @property
    def empty(self) -> bool:
        """Whether the ranks would have nothing to do."""
        return not (self.rows or self.loads or self.dropped)

    @property
    def may_load(self) -> bool:
        """Whether another adapter load may begin with this step."""
        return len(self.loads) < MAX_STEP_LOADS

    def add_row(
        self,
        request: Request,
        length: int,
        blocks: list[int],
        rope_set: int,
        drafts: tuple[int, ...] = (),
        keeps: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """Compute the next `length` positions of the request, after appending `blocks`.

        drafts: the tokens of the last of them, which are guesses. keeps: as `StepRow` has them.
        """
        start, pending = request.scheduled, request.pending + len(drafts)
        end, total = start + length, len(request.tokens) + pending
        assert start < end <= total, (request.id, start, length, total)
        # Only the row that reaches the end of all tokens has logits for a new one.
        samples = end == total and request.stopping.max_new_tokens > 0
        slot = request.batch_slot
        row = StepRow(slot, start, length, blocks, samples, rope_set, drafts, keeps=keeps)
        self.rows.append(row)
        self.requests.append(request)
        self.budget -= length
        self.tokens += length
        request.scheduled = end
        request.in_flight += 1
        request.drafts = drafts
        if samples:
            request.pending = pending + 1
            request.num_guessed, request.guesses = self.guesses, ()

    def add_following(
        self, request: Request, length: int, blocks: list[int], rope_set: int, most: int
    ) -> None:
        """Continue behind the request's row in flight, with up to `most` of its guesses.

        length: of the positions that the row may reach, behind the last known token's.
        """
        start = request.scheduled - len(request.drafts)
        slot = request.batch_slot
        self.rows.append(StepRow(slot, start, length, blocks, True, rope_set, follows=most))
        self.following.append(len(self.requests))
        self.waits = True
        self.requests.append(request)
        self.budget -= 1 + most
        self.tokens += 1 + most
        request.in_flight += 1

    def settle(self, before: "StepBuilder", result: StepResult) -> None:
        """The step before this one was applied: count what the rows behind its rows name."""
        if not self.following:
            return
        rows = settled(self.rows, before.rows, result.tokens, result.guesses)
        for index in self.following:
            request, row = self.requests[index], rows[index]
            fewer = self.rows[index].follows + 1 - row.length
            self.tokens -= fewer
            self.generating -= fewer
            if request.takes(row.start):
                assert (row.start, request.pending) == (request.scheduled, 0), request.id
                request.scheduled += row.length
                request.pending, request.drafts = row.num_samples, row.drafts
                request.num_guessed, request.guesses = self.guesses, ()
        self.rows, self.following = rows, []

    def add_join(self, request: Request, slot: int, state: int) -> None:
        """Send the request's tokens to its batch slot.

        slot: its adapter's, -1 without one. state: as `RequestJoin` has it.
        """
        assert request.pending == 0, f"{request.id} joins while a token of it is in flight"
        # A copy: the request's list grows while the plan is in flight.
        tokens, sampling = list(request.tokens), request.sampling
        if sampling.about_prompt and not request.awaits_report:
            # It was preempted after its prompt was reported: the ranks need not report it again.
            off = {"prompt_logprobs": -1, "pooling": Pooling.NONE}
            sampling = msgspec.structs.replace(sampling, **off)
        prompt_length = len(request.prompt)
        join = RequestJoin(
            request.batch_slot,
            tokens,
            prompt_length,
            slot,
            sampling,
            request.matcher,
            request.active_from,
            state,
        )
        self.joins.append(join)

    def add_load(self, resident: Resident) -> None:
        """Move an adapter from host memory to the slot and pages that it was given."""
        self.loads.append(AdapterLoad(resident.key, resident.slot, resident.pages))

    def build(self, epoch: int, number: int) -> StepPlan:
        """The plan to send, and the number under which its result is applied."""
        self.number = number
        drops = [resident.key for resident in self.dropped]
        return StepPlan(epoch, number, self.joins, self.rows, self.loads, drops, self.guesses)

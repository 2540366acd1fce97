"""Step: a plan in the making, and afterwards what it named until its result is applied."""

import msgspec

from configs.wire.plan import AdapterLoad, RequestJoin, StepPlan, StepRow
from configs.wire.sampling import Pooling
from scheduler.adapters.resident import Resident
from scheduler.request import Request

MAX_FILLS = 4
"""Fills that one plan begins: launching their copies must not hold up the launch of the step."""


class StepBuilder:
    """The rows, joins, fills and drops of one step, and whose they are.

    budget: tokens that may still be added; tokens: those that were. number: the plan's step once
    it is sealed. requests[i] is the one of rows[i]; dropped are the adapters of drops.
    """

    def __init__(self, budget: int) -> None:
        """Start empty."""
        self.budget = budget
        self.tokens = 0
        self.number = -1
        self.joins: list[RequestJoin] = []
        self.rows: list[StepRow] = []
        self.requests: list[Request] = []
        self.loads: list[AdapterLoad] = []
        self.dropped: list[Resident] = []

    @property
    def empty(self) -> bool:
        """Whether the ranks would have nothing to do."""
        return not (self.rows or self.loads or self.dropped)

    @property
    def may_load(self) -> bool:
        """Whether another fill may begin with this step."""
        return len(self.loads) < MAX_FILLS

    def add_row(self, request: Request, length: int, blocks: list[int], rope_set: int) -> None:
        """Let the request compute its next `length` positions, after appending `blocks`."""
        start, pending = request.scheduled, request.pending
        end, total = start + length, len(request.tokens) + pending
        assert start < end <= total, (request.id, start, length, total)
        samples = end == total and request.stopping.max_new_tokens > 0
        self.rows.append(StepRow(request.batch_slot, start, length, blocks, samples, rope_set))
        self.requests.append(request)
        self.budget -= length
        self.tokens += length
        request.scheduled = end
        request.in_flight += 1
        if samples:
            request.pending = pending + 1

    def add_join(self, request: Request, slot: int) -> None:
        """Bring the request's tokens to its place."""
        assert request.pending == 0, f"{request.id} joins while a token of it is in flight"
        tokens, sampling = list(request.tokens), request.sampling
        if sampling.about_prompt and not request.awaits_report:
            # It was preempted after its prompt: nobody needs to be told again.
            off = {"prompt_logprobs": -1, "pooling": Pooling.NONE}
            sampling = msgspec.structs.replace(sampling, **off)
        prompt_length = len(request.prompt)
        join = RequestJoin(
            request.batch_slot, tokens, prompt_length, slot, sampling, request.matcher
        )
        self.joins.append(join)

    def add_load(self, resident: Resident) -> None:
        """Move an adapter from host memory to the slot and pages that it was given."""
        self.loads.append(AdapterLoad(resident.key, resident.slot, resident.pages))

    def build(self, epoch: int, number: int) -> StepPlan:
        """The plan as it is sent."""
        self.number = number
        drops = [resident.key for resident in self.dropped]
        return StepPlan(epoch, number, self.joins, self.rows, self.loads, drops)

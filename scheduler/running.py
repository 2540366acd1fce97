"""RunningRequests: the requests on the ranks, their batch slots and KV blocks.

Blocks are allocated as tokens come. When none is left, the youngest request is preempted, never one
as old as the request that needs the block. What plans in flight name is freed only when the last of
them was applied, so the request that needs the block may have to pause until then.
"""

from collections.abc import Sequence

from configs.rope_sets import SHORT
from configs.wire.adapters import AdapterKey
from configs.wire.plan import Capacity, StepResult, StepRow
from configs.wire.sampling import FinishReason
from scheduler.admission.limits import Limits
from scheduler.kv.prefix_cache import CachedPrefix
from scheduler.kv.tables import KvTables
from scheduler.request import STEP_TOKENS, Request, Status
from scheduler.speculation import Drafting, Drafts, right_samples, take_guesses
from scheduler.step import StepBuilder
from scheduler.step_costs import StepCosts

SHORTEST_SLICE = 16
"""Tokens: fewer are not worth a preemption, after which about a block of them is recomputed."""


class RunningRequests:
    """Running requests by age, and those that plans in flight still name after they left.

    members: the running ones, oldest first.
    draining: by serial, ended or preempted requests that plans in flight still name.
    stalled: whether the last step left a request without a block.
    costs: what steps of these ranks take.
    reserved_blocks: blocks that known tokens of admitted requests will still take.
    """

    def __init__(
        self, capacity: Capacity, num_batch_slots: int, prefix_caching: bool, ahead: int = 0
    ) -> None:
        """ahead: positions that plans in flight and the next one name at most."""
        self.num_batch_slots = num_batch_slots
        self.num_blocks = capacity.num_blocks
        self.block_size = capacity.block_size
        self.members: list[Request] = []
        self.draining: dict[int, Request] = {}
        self.stalled = False
        self.reserved_blocks = 0
        self.num_preemptions = 0
        self.costs = StepCosts()
        self._freed: list[Request] = []
        self._free_batch_slots = list(range(num_batch_slots - 1, -1, -1))
        self._chunked = capacity.chunked
        self._drafts = capacity.drafts
        self._drafting = Drafting(capacity.draft_heads)
        self._rope = capacity.rope_sets
        self._kv = KvTables(capacity, prefix_caching and capacity.prefix_caching, ahead)
        self.prefix = self._kv.prefix
        self._pool = self._kv.pool

    @property
    def num_held(self) -> int:
        """How many requests hold a batch slot."""
        return len(self.members) + len(self.draining)

    @property
    def unfinished(self) -> list[Request]:
        """All requests that hold a batch slot and have not ended."""
        held = (*self.members, *self.draining.values())
        return [request for request in held if request.status is not Status.ENDED]

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds, with or without content that is kept."""
        return self._pool.available

    def advance(self, step: StepBuilder, limits: Limits) -> None:
        """Compute every running request's next token, then the next chunks of the longer ones."""
        self.stalled = False
        self.reserved_blocks = 0
        if self.prefix.states is not None:
            self.prefix.states.next_plan()
        self._preempt_outgrown()
        longer, own = [], []
        for request in self.members:
            ahead = len(request.tokens) + request.pending - request.scheduled
            if ahead > 1:
                longer.append(request)
            elif not request.exhausted or self._drafting.may_follow(request):
                own.append(request)
        drafts: Drafts = {}
        if (limits.max_draft_tokens > 0 and self._drafts) or any(each.drafts for each in own):
            drafts = self._drafting.plan(own, step, limits)
        for request in own:
            draft = drafts.get(request.serial, ())
            # A row above may have preempted it for its blocks.
            is_running = request.status is Status.RUNNING
            if not is_running or step.budget <= 0 or draft is None:
                continue
            if isinstance(draft, int):
                self._follow(request, draft, step)
            else:
                self._extend(request, 1 + len(draft), step, draft)
        # The rows so far generate: prompts must not stretch their step too much, nor the next one
        # of requests that wait for the check of their drafts.
        step.generating = step.tokens
        if own:
            step.budget = min(step.budget, self.costs.prompt_budget(limits, own))
        for request in longer:
            # A row above may have preempted it for its blocks.
            if request.status is Status.RUNNING:
                ahead = request.total - request.scheduled
                if step.budget > 0:
                    self._extend(request, min(ahead, step.budget), step)
                self.reserved_blocks += self._kv.to_grow(request)

    def in_budget(self, request: Request, step: StepBuilder) -> bool:
        """Whether a step has tokens left for a new request.

        A prompt that cannot be cut into chunks is computed in a step in which no other request
        joins, however long it is; otherwise one longer than the budget would never run.
        """
        if self._chunked or not step.joins:
            return step.budget > 0
        return len(request.tokens) <= step.budget

    def fits(self, request: Request) -> CachedPrefix | None:
        """The cached prefix that a new request would start with; None if it must wait.

        All its known tokens must fit beside `reserved_blocks` and some room to grow, or it would be
        preempted soon. Alone it always fits: its length was checked when it was added.
        """
        # The rope set is part of the prefix cache key, so it is decided before the match.
        if self._rope is not None:
            request.take_rope_set(self._rope.first(len(request.prompt), len(request.tokens)))
        cached = self.prefix.match(request)
        needed = self._kv.to_join(request, cached)
        # Beside them, a block to grow for every two running requests.
        room = self._pool.available - self.reserved_blocks - len(self.members) // 2
        # A single one grows as far as it frees blocks that it needs no more.
        return cached if needed <= room or not self.num_held else None

    def join(self, request: Request, cached: CachedPrefix, slot: int, step: StepBuilder) -> None:
        """Give a waiting request a batch slot and its first row, behind its cached blocks."""
        assert request.status is Status.WAITING, request.id
        request.found(cached.tokens)
        # Held before blocks are allocated, which could evict idle ones.
        self._kv.take(request, cached)
        request.status = Status.RUNNING
        request.batch_slot = self._free_batch_slots.pop()
        length = len(request.tokens) - request.scheduled
        if self._chunked:
            length = min(length, step.budget)
        length, rope_set = self._one_rope_set(request, length)
        end = self._kv.reach(request, request.scheduled + length)
        self._kv.extend(request, end)
        self.reserved_blocks += self._kv.to_grow(request)
        step.add_join(request, slot, cached.state)
        blocks = [block for table in request.tables for block in table]
        keeps = self.prefix.keep(request, end)
        step.add_row(request, end - request.scheduled, blocks, rope_set, keeps=keeps)
        self.prefix.register(request)
        # A preempted request comes back at its age: the youngest is the last one.
        index = len(self.members)
        while index > 0 and self.members[index - 1].serial > request.serial:
            index -= 1
        self.members.insert(index, request)

    def release(self, request: Request) -> None:
        """Free what the request holds, or drain it first if a plan in flight names it."""
        if request.serial in self.draining:  # Preempted before; it is freed with its last plan.
            return
        self.members.remove(request)
        if request.in_flight:
            self.draining[request.serial] = request
        else:
            self._free(request)

    @property
    def has_background(self) -> bool:
        """Whether a background request runs: then it is the youngest."""
        return bool(self.members) and self.members[-1].background

    def make_room(self, request: Request, num_waiting: int) -> None:
        """Preempt as many background requests as others wait, unless the next one is one too."""
        leaving = sum(each.background for each in self.draining.values())
        for _ in range(0 if request.background else num_waiting - leaving):
            if not self.has_background:
                return
            self.preempt(self.members[-1])

    def preempt_adapter(self, key: AdapterKey) -> None:
        """Preempt the requests of an adapter after its slice.

        Only where the prefix cache keeps what they have computed, and not if all end soon anyway.
        Where it did not, a request runs on until it has new tokens, which take as many steps as
        what the running ones lost. Else long prompts over more adapters than have room would be
        computed again and again.
        """
        if not self.prefix.enabled:
            return
        own = [request for request in self.members if request.adapter == key]
        fewest = sum(each.lost for each in self.members) // STEP_TOKENS
        if any(each.lost and len(each.tokens) <= each.joined_with + fewest for each in own):
            return
        if any(each.max_total - each.total > SHORTEST_SLICE for each in own):
            for request in own:
                self.preempt(request)

    def preempt(self, request: Request) -> None:
        """Take a running request off the ranks; `take_freed` returns it once it holds nothing."""
        self.num_preemptions += 1
        request.status = Status.LEAVING
        self.release(request)

    def finish_draining(self, request: Request) -> None:
        """The last plan that named a draining request was applied."""
        del self.draining[request.serial]
        self._free(request)

    def take_freed(self) -> list[Request]:
        """The requests that came to hold nothing on the ranks, each returned once."""
        freed, self._freed = self._freed, []
        return freed

    def learn(
        self, step: StepBuilder, result: StepResult, behind: Sequence[StepBuilder], now: float
    ) -> None:
        """Learn from a step that was applied at `now`, in seconds: what it took and guessed.

        behind: the steps in flight behind it; rows of the first one may follow its own.
        """
        self.costs.applied(step, now)
        self._drafting.costs.applied(step, now)
        if result.guesses is not None:
            take_guesses(step, result.guesses)
        if behind:
            behind[0].settle(step, result)

    def mark_computed(self, request: Request, end: int) -> None:
        """Positions below `end` were computed: blocks that no later one needs are freed."""
        is_full = end // self.block_size > request.computed // self.block_size
        request.computed = end
        if is_full:
            self._kv.computed(request)

    def accept(
        self, request: Request, row: StepRow, sampled: list[int]
    ) -> tuple[list[int], FinishReason | None]:
        """Append what a row sampled, as far as it is right and until the request's end.

        Returns the tokens that it brought, and why the request ends.
        """
        request.pending -= len(sampled)
        if not row.drafts:
            self.mark_computed(request, row.start + row.length)
            return sampled, request.accept(sampled[0])
        first, computed = request.num_generated, row.start + row.length - len(row.drafts)
        sampled = right_samples(request, row, sampled)
        for index, token in enumerate(sampled):
            self.mark_computed(request, computed + index)
            if index:
                request.skipped.append(first + index)
            if (reason := request.accept(token)) is not None:
                return sampled[: index + 1], reason
        return sampled, None

    def check(self) -> None:
        """Assert that no block or batch slot is lost or held twice, and lengths are in order."""
        held = [*self.members, *self.draining.values()]
        self._pool.check(table for request in held for table in self._kv.held(request))
        self.prefix.check()
        taken = [request.batch_slot for request in held]
        slots = sorted([*self._free_batch_slots, *taken])
        assert slots == list(range(self.num_batch_slots)), "batch slots"
        assert not self._freed, "freed requests were not taken"
        serials = [request.serial for request in self.members]
        assert serials == sorted(set(serials)), serials
        assert all(request.status is Status.RUNNING for request in self.members)
        assert all(request.in_flight > 0 for request in self.draining.values())
        for request in held:
            if request.status is not Status.ENDED:
                request.check(self.block_size)

    def _extend(
        self, request: Request, length: int, step: StepBuilder, drafts: tuple[int, ...] = ()
    ) -> None:
        """Add a row of up to `length` positions, as far as there are blocks for them.

        drafts: the last positions' tokens; a shorter row drops the last ones.
        """
        length, rope_set = self._one_rope_set(request, length)
        blocks: list[int] = []
        room = request.covered - request.scheduled
        if length > room:
            if room == 0 and not self._find_blocks(request):
                self.stalled = True
                return
            # As far as there are blocks: a shorter row is better than a preemption.
            end = request.scheduled + length
            if length > 1:
                end = self._kv.reach(request, end)
                length = end - request.scheduled
            blocks = self._kv.extend(request, end)
        keeps = self.prefix.keep(request, request.scheduled + length) if request.keeps else ()
        step.add_row(request, length, blocks, rope_set, drafts and drafts[: length - 1], keeps)
        if length > 1:  # A generated token's block is registered when that token is known.
            self.prefix.register(request)

    def _follow(self, request: Request, most: int, step: StepBuilder) -> None:
        """Add a row behind the request's row in flight, with up to `most` of its guesses.

        Wherever it may begin there are blocks for it, or it waits: no request is preempted for it.
        """
        first, last = request.scheduled - len(request.drafts), request.scheduled
        end = min(last + most + 2, request.max_total)
        rope_set = SHORT
        if self._rope is not None:
            end = min(end, first + self._rope.room(request.rope_set, first, end - first))
            rope_set = self._rope.at(request.rope_set, first)
        wanted = end
        if end > request.covered:
            end = self._kv.reach(request, end)
        if end <= last:
            self.stalled = wanted > last
            return
        blocks = self._kv.extend(request, end) if end > request.covered else []
        step.add_following(request, end - first, blocks, rope_set, most)

    def _one_rope_set(self, request: Request, length: int) -> tuple[int, int]:
        """How many of the next `length` positions use one rope set, and which."""
        if self._rope is None:
            return length, SHORT
        first, start = request.rope_set, request.scheduled
        return self._rope.room(first, start, length), self._rope.at(first, start)

    def _preempt_outgrown(self) -> None:
        """Preempt requests with keys that must be recomputed with the other rope set."""
        rope = self._rope
        if rope is None or not rope.recompute:
            return
        for request in tuple(self.members):
            if rope.outgrown(request.rope_set, request.scheduled) and not request.exhausted:
                self.preempt(request)

    def _find_blocks(self, request: Request) -> bool:
        """Make sure that one more token has room, preempting younger requests if need be."""
        if self._pool.available >= len(self._kv.groups):
            return True  # A token takes no more than a block of each group.
        needed = self._kv.lacking(request, request.scheduled + 1)
        while self._pool.available < needed:
            if self.draining:
                return False  # What they hold is freed within two steps.
            victim = self.members[-1]
            # Never an older one: otherwise two requests could preempt each other without end.
            if victim.serial <= request.serial:
                return False
            self.preempt(victim)
        return True

    def _free(self, request: Request) -> None:
        self._kv.free(request)
        self._free_batch_slots.append(request.batch_slot)
        request.batch_slot = -1
        self._freed.append(request)

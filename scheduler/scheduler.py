"""Scheduler: who computes what in the next step, with which blocks and which adapters.

It is synchronous and deterministic and does no input or output; time comes in as an argument.
`schedule` makes a plan, the ranks execute it, `apply` accounts for the result. Up to
`limits.steps_ahead` plans are in flight, so a plan may name a token that is not yet known; what
a plan in flight names is given to nobody else before it was applied.

Nobody starves, counted in steps. Let S be the most steps that an admitted request runs, and a
claim an adapter that is staged but finds no room on the device. The n-th oldest claim gets its
room within n * (patience_steps + S) steps: when the oldest has waited for its patience, the
residents in its way admit nobody, and what they run ends. Among queues with room, turns come
by deficit round-robin in tokens (queues.py), and a request in turn that lacks blocks or a
place keeps its turn until the running ones end. Among running requests the oldest is never
preempted and always advances.
"""

from collections import deque

from configs.adapters import AdapterKey
from configs.sampling import FinishReason
from scheduler.events import (
    AdapterEvent,
    AdapterFailed,
    AdapterFailure,
    AdapterPinned,
    AdapterStaged,
    Cancelled,
    Ended,
    Ending,
    Event,
    NewTokens,
    RequestId,
)
from scheduler.plan import Capacity, StepPlan, StepResult, TokenLogprobs
from scheduler.policy import InvalidRequest, Limits, Overloaded, Pace, refuse_impossible
from scheduler.queues import AdapterQueues
from scheduler.request import Request, Status
from scheduler.residency import Residency, Standing
from scheduler.resident import AdapterState
from scheduler.running import Running
from scheduler.snapshot import Snapshot
from scheduler.step import Step

MAX_CLAIMS_SEEN = 16
"""How many claims a step looks at, so that its cost does not grow with the adapters waiting."""


class Scheduler:
    """The driver's side of every step: requests, blocks, places, adapters."""

    def __init__(self, limits: Limits, capacity: Capacity, epoch: int = 0) -> None:
        """Serve the group of ranks that has this capacity; `epoch` is its number."""
        self._limits = limits
        self._capacity = capacity
        self._epoch = epoch
        self._num_places = limits.max_running
        self._num_steps = 0
        self._next_serial = 0
        self._flights: deque[Step] = deque()
        self._requests: dict[RequestId, Request] = {}
        self._queues = AdapterQueues(limits.quantum_tokens)
        self._residency = Residency(capacity)
        self._running = self._new_running()
        self._pace = Pace()
        self._step_tokens = 0
        self._num_preemptions = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_generated_tokens = 0

    @property
    def epoch(self) -> int:
        """The number of the group of ranks that plans are made for."""
        return self._epoch

    @property
    def has_work(self) -> bool:
        """Whether any request lives, any plan is in flight, or an adapter is to be moved."""
        return bool(self._requests or self._flights or self._residency.has_moves)

    def add(self, request: Request, now: float) -> None:
        """Queue a request; `now` in seconds.

        Raises InvalidRequest when it can never be served, Overloaded when too many wait.
        """
        if request.id in self._requests:
            raise InvalidRequest(f"a request with the id {request.id} is already being served")
        refuse_impossible(request, self._limits, self._capacity)
        idle = max(self._limits.max_running - self._running.num_held, 0)
        if len(self._queues) >= self._limits.max_queued + idle:
            retry_after_s = self._pace.retry_after_s(len(self._queues))
            raise Overloaded(len(self._queues), retry_after_s)
        request.serial = self._next_serial
        self._next_serial += 1
        self._requests[request.id] = request
        self._queues.append(request)
        self._enlist(request)

    def schedule(self, now: float) -> StepPlan:
        """Make the next plan; it is empty when there is nothing to do or enough is in flight.

        An empty plan must not be sent and is not applied.
        """
        step = Step(self._limits.max_step_tokens)
        if len(self._flights) < self._limits.steps_ahead:
            self._running.advance(step)
            if not self._running.stalled:
                self._admit(step, now)
            self._residency.fill_pins(step)
            step.dropped = self._residency.host.drops()
        if step.empty:
            return step.seal(self._epoch, -1)
        self._num_steps += 1
        self._step_tokens = self._limits.max_step_tokens - step.budget
        self._flights.append(step)
        return step.seal(self._epoch, self._num_steps)

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> list[Event]:
        """Account for the oldest plan in flight; a result of an older group changes nothing."""
        if plan.epoch != self._epoch or result.epoch != self._epoch:
            return []
        step = self._flights.popleft()
        assert step.number == plan.step == result.step, (step.number, plan.step, result.step)
        events: list[Event] = []
        index = 0
        for request, row in zip(step.requests, step.rows, strict=True):
            request.in_flight -= 1
            if request.status is not Status.ENDED:
                self._running.computed(request, row.start + row.length)
                if row.samples:
                    logprobs = result.logprobs[index] if result.logprobs else None
                    self._take(request, result.tokens[index], logprobs, now, events)
            index += row.samples
            if request.in_flight == 0 and request.serial in self._running.draining:
                self._running.drained(request)
        assert index == len(result.tokens), (index, len(result.tokens))
        self._residency.applied(step)
        num_ended = sum(isinstance(event, Ended) for event in events)
        if num_ended:
            self._pace.left(num_ended, now)
        return events

    def finish(
        self, request_id: RequestId, at: int, reason: FinishReason = FinishReason.STOP_STRING
    ) -> list[Event]:
        """Keep `at` generated tokens and end; nothing happens if the request already ended."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        request.truncate(at)
        return [self._end(request, reason)]

    def cancel(self, request_id: RequestId) -> list[Event]:
        """The client left; what the request holds is free after the plans in flight."""
        request = self._requests.get(request_id)
        return [] if request is None else [self._end(request, Cancelled())]

    def adapter(self, event: AdapterEvent, now: float) -> list[Event]:
        """Something happened to an adapter, or should."""
        if isinstance(event, AdapterStaged):
            failure = self._residency.staged(event.key, event.shape)
            if failure is not None:
                return self._fail(event.key, failure)
            self._seat(event.key)
        elif isinstance(event, AdapterFailed):
            self._residency.failed(event.key)
            return self._fail(event.key, AdapterFailure(event.refusal, event.message))
        elif isinstance(event, AdapterPinned):
            self._residency.pin(event.key, event.pinned)
        else:
            self._residency.unload(event.key)
        return []

    def to_stage(self) -> list[AdapterKey]:
        """Adapters to bring to host memory now; each is named once until it is answered."""
        return self._residency.host.to_stage()

    def group_lost(self, now: float) -> list[Event]:
        """The ranks are gone: all running requests wait again with their tokens, next epoch.

        All adapters are back on disk, all plans in flight are void. Answers to keys that
        `to_stage` named before must not be brought any more. A request that was in a step at
        MAX_LOSSES losses in a row ends: it may well be what the ranks die of.
        """
        self._epoch += 1
        self._flights.clear()
        held = [*self._running.members, *self._running.draining.values()]
        self._num_preemptions += self._running.num_preemptions
        self._running = self._new_running()
        self._residency.lost()
        events: list[Event] = []
        for request in held:
            if request.status is Status.ENDED:
                continue
            if (failure := request.count_loss()) is not None:
                del self._requests[request.id]
                events.append(request.ended(failure))
                continue
            request.rewind()
            self._queues.bring_back(request)
            self._enlist(request)
        for key in {request.adapter for request in self._queues}:
            if key is not None:
                self._queues.suspend(key)
        return events

    def reconfigure(self, limits: Limits) -> None:
        """Go on under other limits; no more may run than the ranks had places for at start."""
        self._limits = limits
        self._queues.quantum_tokens = limits.quantum_tokens
        self._running.prefix.enabled = limits.prefix_caching and self._capacity.prefix_caching

    def snapshot(self) -> Snapshot:
        """Count everything."""
        adapters = dict.fromkeys(AdapterState, 0)
        for state in self._residency.states().values():
            adapters[state] += 1
        return Snapshot(
            queued=len(self._queues),
            running=len(self._running.members),
            draining=len(self._running.draining),
            plans_in_flight=len(self._flights),
            num_blocks=self._capacity.num_blocks,
            free_blocks=self._running.num_free_blocks,
            cached_blocks=len(self._running.prefix),
            adapters=adapters,
            step_tokens=self._step_tokens,
            num_steps=self._num_steps,
            num_preemptions=self._num_preemptions + self._running.num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_generated_tokens=self._num_generated_tokens,
        )

    def adapter_states(self) -> dict[AdapterKey, AdapterState]:
        """Where the adapters are that anybody uses, awaits or pins, or that hold memory."""
        return self._residency.states()

    def check(self) -> None:
        """Assert every invariant; costs time in proportion to everything there is."""
        self._running.check()
        self._queues.check()
        flying = [request for step in self._flights for request in step.requests]
        for request in {*flying, *self._requests.values()}:
            assert request.in_flight == flying.count(request), request.id
        held = [*self._running.members, *self._running.draining.values()]
        alive = {r.id for r in held if r.status is not Status.ENDED}
        waiting = {request.id for request in self._queues}
        assert alive.isdisjoint(waiting), alive & waiting
        assert alive | waiting == set(self._requests)
        self._residency.check(held, list(self._queues))

    def _new_running(self) -> Running:
        caching = self._limits.prefix_caching and self._capacity.prefix_caching
        return Running(self._capacity, self._num_places, caching, self._freed)

    def _enlist(self, request: Request) -> None:
        """Let a queued request wait for its turn, and for its adapter before that."""
        if request.adapter is None:
            self._queues.resume(None)
        else:
            self._residency.enlist(request.adapter)
            self._seat(request.adapter)

    def _seat(self, key: AdapterKey) -> None:
        """Put a queue where its adapter lets it be: in the round, among the claims, or aside.

        An adapter that is not on the device always begins as a claim, behind the older ones:
        it must not take the room that they wait for because it happens to come at its turn.
        """
        if key not in self._queues or self._queues.in_round(key):
            return
        standing = self._residency.standing(key)
        if standing is Standing.READY:
            self._queues.resume(key)
        elif standing is Standing.ABSENT:
            self._queues.suspend(key)
        else:
            self._queues.park(key, self._num_steps)

    def _admit(self, step: Step, now: float) -> None:
        """Let waiting requests join, in turn, while there are tokens, places and blocks."""
        self._revive_claims()
        max_running = min(self._limits.max_running, self._num_places)
        while step.budget > 0 and self._running.num_held < max_running:
            request = self._queues.in_turn()
            if request is None:
                return
            key = request.adapter
            if key is not None and not self._may_use(key):
                continue
            if not self._running.in_budget(request, step):
                return
            cached = self._running.fits(request)
            if cached is None:
                return  # It keeps its turn, so that blocks gather for it.
            self._queues.admit(request)
            slot = -1
            if key is not None:
                slot = self._residency.acquire(key, step)
                self._residency.delist(key)
            self._count_join(request, len(cached) * self._capacity.block_size, now)
            self._running.join(request, cached, slot, step)

    def _may_use(self, key: AdapterKey) -> bool:
        """Whether the adapter in turn can be used in this step; if not, its queue steps aside."""
        standing = self._residency.standing(key)
        if standing is Standing.BLOCKED:
            self._queues.park(key, self._num_steps)
        elif standing is Standing.ABSENT:
            self._queues.suspend(key)
        return standing in (Standing.READY, Standing.PLACEABLE)

    def _revive_claims(self) -> None:
        """Bring claims that the device has room for back into the round, oldest first."""
        for key in self._residency.device.take_reopened():
            self._seat(key)
        claims = self._queues.claims(MAX_CLAIMS_SEEN)
        if claims:
            self._reserve_if_due(claims[0])
        reserved = self._residency.device.reserved
        for key in claims if reserved is None else [reserved, *claims]:
            if self._queues.in_round(key):
                continue
            standing = self._residency.standing(key)
            if standing is Standing.ABSENT:
                self._queues.suspend(key)
            elif standing is not Standing.BLOCKED:
                self._queues.resume(key, first=key == reserved)

    def _reserve_if_due(self, key: AdapterKey) -> None:
        """Reserve room for a claim that has waited for its patience, or that nobody will free."""
        if self._residency.device.reserved is not None:
            return
        since = self._queues.waits_since(key)
        if since is None or self._residency.standing(key) is not Standing.BLOCKED:
            return
        waited = self._num_steps - since
        if waited >= self._limits.patience_steps or not self._running.num_held:
            self._residency.reserve(key)

    def _count_join(self, request: Request, cached_tokens: int, now: float) -> None:
        if request.first_scheduled is not None:
            return
        request.first_scheduled = now
        request.cached_tokens = min(cached_tokens, len(request.prompt))
        self._num_prompt_tokens += len(request.prompt)
        self._num_cached_tokens += request.cached_tokens

    def _take(
        self,
        request: Request,
        token: int,
        logprobs: TokenLogprobs | None,
        now: float,
        events: list[Event],
    ) -> None:
        """Account for one sampled token."""
        start = len(request.tokens) - len(request.prompt)
        request.pending -= 1
        self._num_generated_tokens += 1
        if request.first_token is None:
            request.first_token = now
        shown = None
        if request.sampling.logprobs >= 0 and logprobs is not None:
            request.logprobs.append(logprobs)
            shown = [logprobs]
        reason = request.accept(token)
        events.append(NewTokens(request.id, start, [token], shown))
        if reason is not None:
            events.append(self._end(request, reason))

    def _end(self, request: Request, ending: Ending) -> Ended:
        """End a request wherever it is."""
        status = request.status
        event = request.ended(ending)
        del self._requests[request.id]
        if status is Status.WAITING:
            self._queues.remove(request)
            if request.adapter is not None:
                self._residency.delist(request.adapter)
        else:
            self._running.leave(request)
        return event

    def _freed(self, request: Request) -> None:
        """The request holds nothing on the ranks any more; a preempted one waits again."""
        if request.adapter is not None:
            self._residency.release(request.adapter)
        if request.status is Status.LEAVING:
            request.rewind()
            self._queues.bring_back(request)
            self._enlist(request)

    def _fail(self, key: AdapterKey, failure: AdapterFailure) -> list[Event]:
        """End all requests that wait for an adapter that cannot be served."""
        return [self._end(request, failure) for request in self._queues.waiting_for(key)]

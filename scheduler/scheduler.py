"""Scheduler: who computes what in the next step, with which blocks and which adapters.

It is synchronous and deterministic and does no input or output; time comes in as an argument.
`schedule` makes a plan, the ranks execute it, `apply` accounts for the result. Up to
`limits.steps_ahead` plans are in flight, so a plan may name a token that is not yet known; what
a plan in flight names is given to nobody else before it was applied.
"""

from collections import deque
from collections.abc import Mapping

from configs.runtime import AdapterShare
from configs.wire.adapters import AdapterKey, AdapterRefusal
from configs.wire.plan import Capacity, StepPlan, StepResult, TokenLogprobs
from configs.wire.sampling import FinishReason
from scheduler.adapters.residency import Residency
from scheduler.adapters.resident import AdapterState
from scheduler.admission.admission_queue import AdmissionQueue
from scheduler.admission.crash_isolation import CrashIsolation
from scheduler.admission.limits import (
    DrainRate,
    InvalidRequest,
    Limits,
    Overloaded,
    refuse_impossible,
    too_large_now,
)
from scheduler.census import census
from scheduler.events import (
    AdapterArrived,
    AdapterEvent,
    AdapterFailed,
    AdapterFailure,
    AdapterLoaded,
    AdapterPinned,
    AdapterStaged,
    AdapterWanted,
    ClientCancelled,
    ConstraintFailure,
    Ended,
    Ending,
    Event,
    NewTokens,
    RequestEvent,
    RequestId,
)
from scheduler.matchers import Matchers, PrepareMatcher
from scheduler.request import Request, Status
from scheduler.running import RunningRequests
from scheduler.snapshot import AdapterView, Counters, Snapshot
from scheduler.step import StepBuilder

UNLOADED = AdapterFailure(
    AdapterRefusal.UNAVAILABLE, "the adapter was unloaded while it was being staged"
)


class Scheduler:
    """The driver's side of every step: requests, blocks, places, adapters."""

    def __init__(self, limits: Limits, capacity: Capacity, epoch: int = 0) -> None:
        """Serve the group of ranks that has this capacity; `epoch` is its number."""
        self._limits = limits
        self._capacity = capacity
        self._epoch = epoch
        self._num_batch_slots = limits.max_running
        self._next_serial = 0
        self._flights: deque[StepBuilder] = deque()
        self._requests: dict[RequestId, Request] = {}
        self._residency = Residency(capacity)
        self._admission = AdmissionQueue(limits, self._residency)
        self._isolation = CrashIsolation(self._admission)
        self._matchers = Matchers(limits.max_matchers)
        self._running = self._new_running()
        self._drain_rate = DrainRate()
        self._counters = Counters()

    @property
    def epoch(self) -> int:
        """The number of the group of ranks that plans are made for."""
        return self._epoch

    @property
    def has_work(self) -> bool:
        """Whether any request lives, any plan is in flight, or an adapter is to be moved."""
        return bool(self._requests or self._flights or self._residency.has_moves)

    @property
    def next_wake(self) -> float | None:
        """When `schedule` should be asked again though nothing happens; in seconds."""
        return self._admission.rate_limits.next_wake

    def add(self, request: Request, now: float) -> None:
        """Queue a request; `now` in seconds.

        Raises InvalidRequest when it can never be served, Overloaded when too many wait.
        """
        if request.id in self._requests:
            raise InvalidRequest(f"a request with the id {request.id} is already being served")
        refuse_impossible(request, self._limits, self._capacity)
        idle = max(self._limits.max_running - self._running.num_held, 0)
        if self._isolation.is_full(request.adapter, self._limits.max_queued + idle):
            retry_after_s = self._drain_rate.retry_after_s(len(self._isolation))
            raise Overloaded(len(self._isolation), retry_after_s)
        request.serial = self._next_serial
        self._next_serial += 1
        self._requests[request.id] = request
        self._admission.register(request)
        self._isolation.enqueue(request)

    def schedule(self, now: float) -> StepPlan:
        """Make the next plan; it is empty when there is nothing to do or enough is in flight.

        An empty plan must not be sent and is not applied.
        """
        step = StepBuilder(self._limits.max_step_tokens)
        if len(self._flights) < self._limits.steps_ahead:
            self._isolation.prepare_step(self._running)
            self._running.advance(step, self._limits.max_mixed_prompt_tokens)
            if not self._running.stalled:
                self._admit(step, now)
            if not self._isolation.active:
                self._residency.load_pins(step)
            step.dropped = self._residency.host.drops()
        if step.empty:
            return step.build(self._epoch, -1)
        self._counters.num_steps += 1
        self._counters.step_tokens = step.tokens
        self._admission.advance_time(self._counters.step_tokens)
        self._flights.append(step)
        return step.build(self._epoch, self._counters.num_steps)

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestEvent]:
        """Account for the oldest plan in flight; a result of an older group changes nothing."""
        if plan.epoch != self._epoch or result.epoch != self._epoch:
            return []
        step = self._flights.popleft()
        assert step.number == plan.step == result.step, (step.number, plan.step, result.step)
        events: list[RequestEvent] = []
        index = 0
        num_requests = len(self._requests)
        computed, draining, gone = self._running.mark_computed, self._running.draining, Status.ENDED
        for report in result.reports or ():
            step.requests[report.row].add_prompt_report(report)
        faults = dict(result.faults or ())
        for place, (request, row) in enumerate(zip(step.requests, step.rows, strict=True)):
            request.in_flight -= 1
            if place in faults:
                events += self._give_own_matcher(request, faults[place])
            elif request.status is not gone and not request.discards_samples:
                computed(request, row.start + row.length)
                if row.samples:
                    logprobs = result.logprobs[index] if result.logprobs else None
                    self._accept_token(request, result.tokens[index], logprobs, now, events)
                elif request.prompt_done:
                    events.append(self._end(request, FinishReason.LENGTH))
            index += row.samples
            if request.in_flight == 0 and request.serial in draining:
                self._running.finish_draining(request)
        assert index == len(result.tokens), (index, len(result.tokens))
        self._residency.applied(step)
        if num_ended := num_requests - len(self._requests):
            self._drain_rate.record(num_ended, now)
        return events

    def finish(
        self, request_id: RequestId, at: int, reason: FinishReason = FinishReason.STOP_STRING
    ) -> list[RequestEvent]:
        """Keep `at` generated tokens and end; nothing happens if the request already ended."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        request.truncate(at)
        return [self._end(request, reason)]

    def cancel(self, request_id: RequestId) -> list[RequestEvent]:
        """The client left; what the request holds is free after the plans in flight."""
        request = self._requests.get(request_id)
        return [] if request is None else [self._end(request, ClientCancelled())]

    def handle_adapter_event(self, event: AdapterEvent) -> list[Event]:
        """Something happened to an adapter, or should."""
        if isinstance(event, AdapterStaged) and not event.kept:
            self._residency.deferred(event.key, event.shape)
        elif isinstance(event, AdapterStaged):
            failure = self._residency.staged(event.key, event.shape)
            if failure is not None:
                return self._fail_waiting(event.key, failure)
            self._admission.update(event.key)
            return self._answer_stage_request(event.key, None)
        elif isinstance(event, AdapterFailed):
            self._residency.failed(event.key, event.partly)
            return self._fail_waiting(event.key, AdapterFailure(event.refusal, event.message))
        elif isinstance(event, AdapterLoaded):
            self._residency.loaded(event.key)
            self._admission.update(event.key)
        elif isinstance(event, AdapterPinned):
            self._residency.pin(event.key, event.pinned)
        elif isinstance(event, AdapterWanted):
            return [AdapterArrived(event.key)] if self._residency.request_staging(event.key) else []
        else:
            self._residency.unload(event.key)
            return self._answer_stage_request(event.key, UNLOADED)
        return []

    def matchers_to_prepare(self) -> list[PrepareMatcher]:
        """Matchers for the ranks to make now; each is named once until it is answered."""
        return self._matchers.to_prepare(
            lambda: {each.matcher for each in self._running.unfinished}
        )

    def matcher_prepared(self, number: int, fault: str) -> list[RequestEvent]:
        """All ranks have made a matcher, or cannot: then all who want it end with the fault."""
        self._matchers.prepared(number, fault)
        for request in self._admission.release_for_matcher(number):
            self._isolation.enqueue(request)
        users = [each for each in self._requests.values() if fault and each.matcher == number]
        return [self._end(request, ConstraintFailure(fault)) for request in users]

    def to_stage(self) -> list[AdapterKey]:
        """Adapters to bring to host memory now; each is named once until it is answered.

        It is asked before `schedule`, so that none is waited for in vain.
        """
        self._isolation.prepare_step(self._running)
        return self._residency.host.to_stage()

    def group_lost(self, now: float) -> list[RequestEvent]:
        """The ranks are gone: all running requests wait again with their tokens, next epoch.

        All adapters are back on disk, all plans in flight are void. Answers to keys that
        `to_stage` named before must not be brought any more. After losses in a row suspects are
        tried apart (trials.py), and whom the ranks are lost by ends.
        """
        self._epoch += 1
        self._flights.clear()
        ran, moved = self._running.unfinished, self._residency.moving
        self._replace_group(self._capacity)
        self._admission.reset()
        failures = self._isolation.ranks_lost(ran, moved)
        self._matchers.ranks_lost()
        return [self._end(request, failure) for request, failure in failures.items()]

    def regroup(self, capacity: Capacity) -> list[RequestEvent]:
        """New ranks came after `group_lost`: go on with what they hold, be it more or less.

        Requests that they could not hold any more end.
        """
        self._replace_group(capacity)
        failures = too_large_now(self._requests.values(), capacity)
        return [self._end(request, failure) for request, failure in failures.items()]

    def reconfigure(self, limits: Limits) -> None:
        """Go on under other limits; no more may run than the ranks had places for at start."""
        self._limits = limits
        self._admission.reconfigure(limits)
        self._running.prefix.enabled = limits.prefix_caching and self._capacity.prefix_caching

    def set_shares(
        self, base: AdapterShare, default: AdapterShare, own: Mapping[AdapterKey, AdapterShare]
    ) -> None:
        """Go on under other shares: the base model's, every adapter's, and those of some."""
        self._admission.set_shares(base, default, own)

    def set_share(self, key: AdapterKey, share: AdapterShare) -> None:
        """Give one adapter a share of its own."""
        self._admission.set_share(key, share)

    def snapshot(self) -> Snapshot:
        """Count everything."""
        parts = (self._isolation, self._running, self._residency, self._counters)
        return census(*parts, plans_in_flight=len(self._flights))

    def adapter_states(self) -> dict[AdapterKey, AdapterState]:
        """Where the adapters are that anybody uses, awaits or pins, or that hold memory."""
        return self._residency.states()

    def adapters(self) -> list[AdapterView]:
        """The same adapters, and what each has and does."""
        return self._residency.views()

    def check(self) -> None:
        """Assert every invariant; costs time in proportion to everything there is."""
        self._running.check()
        flying = [request for step in self._flights for request in step.requests]
        for request in {*flying, *self._requests.values()}:
            assert request.in_flight == flying.count(request), request.id
        held = [*self._running.members, *self._running.draining.values()]
        self._admission.check(held, self._requests.values())
        alive = {r.id for r in held if r.status is not Status.ENDED}
        self._isolation.check()
        self._matchers.check(list(self._requests.values()))
        waiting = {request.id for request in self._isolation}
        assert alive.isdisjoint(waiting), alive & waiting
        assert alive | waiting == set(self._requests)
        self._residency.check(held, list(self._admission.queues))

    def _replace_group(self, capacity: Capacity) -> None:
        """Nobody is on the ranks, and no adapter."""
        self._counters.num_preemptions += self._running.num_preemptions
        self._capacity = capacity
        self._running = self._new_running()
        self._residency.reset(capacity)

    def _new_running(self) -> RunningRequests:
        caching = self._limits.prefix_caching and self._capacity.prefix_caching
        return RunningRequests(self._capacity, self._num_batch_slots, caching, self._freed)

    def _admit(self, step: StepBuilder, now: float) -> None:
        """Bring adapters closer to those who wait for them, and let others join."""
        self._admission.begin_step(now)
        self._admission.start_loads(step)
        for key in self._admission.expired_slices():
            self._running.preempt_adapter(key)
        self._join_waiting(step, now)
        if not self._running.num_held:
            self._admission.make_room(step)

    def _join_waiting(self, step: StepBuilder, now: float) -> None:
        """Let waiting requests join, in turn, while there are tokens, places and blocks."""
        max_running = min(self._limits.max_running, self._num_batch_slots)
        while step.budget > 0 and self._running.num_held < max_running:
            request = self._admission.next()
            if request is None:
                return
            if not self._matchers.is_ready(request):
                self._admission.hold_for_matcher(request)
                continue
            if not self._running.in_budget(request, step):
                return
            cached = self._running.fits(request)
            if cached is None:
                return  # It keeps its turn, so that blocks gather for it.
            slot = self._admission.admit(request)
            self._count_join(request, len(cached) * self._capacity.block_size, now)
            self._running.join(request, cached, slot, step)

    def _count_join(self, request: Request, cached_tokens: int, now: float) -> None:
        if request.first_scheduled is not None:
            return
        request.first_scheduled = now
        request.cached_tokens = min(cached_tokens, len(request.prompt))
        self._counters.num_prompt_tokens += len(request.prompt)
        self._counters.num_cached_tokens += request.cached_tokens

    def _accept_token(
        self,
        request: Request,
        token: int,
        logprobs: TokenLogprobs | None,
        now: float,
        events: list[RequestEvent],
    ) -> None:
        """Account for one sampled token."""
        start = len(request.tokens) - len(request.prompt)
        request.pending -= 1
        self._counters.num_generated_tokens += 1
        if self._admission.rate_limits.has_rates:
            for payer in request.charged_adapters:
                self._admission.rate_limits.charge(payer, 1, now)
        if request.first_token is None:
            request.first_token = now
        shown = request.add_logprobs(logprobs) if logprobs is not None else None
        reason = request.accept(token)
        events.append(NewTokens(request.id, start, [token], shown))
        if reason is not None:
            events.append(self._end(request, reason))

    def _end(self, request: Request, ending: Ending) -> Ended:
        """End a request wherever it is."""
        status = request.status
        event = request.ended(ending)
        del self._requests[request.id]
        self._matchers.release(request)
        self._admission.forget(request)
        if status is Status.WAITING:
            self._isolation.remove(request)
        else:
            self._running.release(request)
        return event

    def _give_own_matcher(self, request: Request, fault: str) -> list[RequestEvent]:
        """A row's matcher met its limits: go on alone from the tokens before, or end."""
        if request.status is Status.ENDED or request.discards_samples:
            return []
        if not self._matchers.give_own(request):
            return [self._end(request, ConstraintFailure(fault))]
        request.discards_samples = True
        if request.status is Status.RUNNING:
            self._running.preempt(request)
        return []

    def _freed(self, request: Request) -> None:
        """The request holds nothing on the ranks any more; a preempted one waits again."""
        self._admission.release(request)
        if request.status is Status.LEAVING:
            request.rewind()
            self._isolation.enqueue(request)

    def _fail_waiting(self, key: AdapterKey, failure: AdapterFailure) -> list[Event]:
        """End all requests that wait for an adapter that cannot be served."""
        waiting = self._admission.queues.waiting_for(key)
        ended: list[Event] = [self._end(each, failure) for each in waiting]
        return ended + self._answer_stage_request(key, failure)

    def _answer_stage_request(self, key: AdapterKey, failure: AdapterFailure | None) -> list[Event]:
        """Tell who wanted the adapter staged what became of it."""
        return [AdapterArrived(key, failure)] if self._residency.take_stage_request(key) else []

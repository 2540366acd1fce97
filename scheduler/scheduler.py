"""Scheduler: which requests compute which tokens in the next step, in which blocks and slots.

It is synchronous and deterministic, and does no input or output; time is an argument. `schedule`
makes a plan, the ranks execute it, and `apply` accounts for the result. Up to `limits.steps_ahead`
plans are in flight, so a plan may name a token before its value is known. What a plan in flight
names is not given to another request before the plan was applied.
"""

from collections import deque
from collections.abc import Mapping
from itertools import count

from configs.runtime import AdapterShare
from configs.wire.adapters import AdapterKey
from configs.wire.plan import Capacity, StepPlan, StepResult, StepRow
from configs.wire.sampling import FinishReason
from scheduler.adapters.residency import Residency
from scheduler.adapters.resident import AdapterState
from scheduler.admission.admission_queue import AdmissionQueue
from scheduler.admission.crash_isolation import CrashIsolation
from scheduler.admission.limits import (
    DrainRate,
    InvalidRequest,
    Limits,
    refuse_impossible,
    too_large_now,
)
from scheduler.census import census
from scheduler.events import (
    UNLOADED,
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
from scheduler.request import FIRST_BACKGROUND, Request, Status
from scheduler.running import RunningRequests
from scheduler.snapshot import AdapterView, Counters, Snapshot
from scheduler.step import StepBuilder


class Scheduler:
    """The driver's side of every step; `epoch` is the number of the group of ranks."""

    def __init__(self, limits: Limits, capacity: Capacity, epoch: int = 0) -> None:
        self._limits = limits
        self._capacity = capacity
        self.epoch = epoch
        self._num_batch_slots = limits.max_running
        self._serials = count()
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
    def has_work(self) -> bool:
        """Whether any request is alive, any plan is in flight, or an adapter is to be moved."""
        return bool(self._requests or self._flights or self._residency.has_moves)

    @property
    def next_wake(self) -> float | None:
        """When to call `schedule` again though nothing happens, in seconds; None: never."""
        return self._admission.rate_limits.next_wake

    def add(self, request: Request, now: float) -> None:
        """Queue a request; InvalidRequest if it can never run, Overloaded if too many wait."""
        if request.id in self._requests:
            raise InvalidRequest(f"a request with the id {request.id} is already being served")
        refuse_impossible(request, self._limits, self._capacity)
        limit = self._limits.max_queued + max(self._limits.max_running - self._running.num_held, 0)
        if not request.resumed and self._isolation.is_full(request.adapter, limit):
            raise self._drain_rate.overload(len(self._isolation))
        if not self._requests:
            self._drain_rate.begin(now)
        request.serial = next(self._serials) + request.background * FIRST_BACKGROUND
        self._requests[request.id] = request
        self._admission.register(request)
        self._isolation.enqueue(request)

    def schedule(self, now: float) -> StepPlan:
        """Make the next plan; an empty one is neither sent nor applied."""
        step = StepBuilder(self._limits.max_step_tokens, now)
        if len(self._flights) < self._limits.steps_ahead:
            self._prepare_isolation()
            self._running.advance(step, self._limits)
            self._requeue_freed()
            # A new request would take the blocks that a stalled one waits for.
            if not self._running.stalled:
                self._admit(step, now)
            if not self._isolation.active:
                self._residency.load_pins(step)
            # Last: the loads above need their host copies.
            step.dropped = self._residency.host.drops()
        if step.empty:
            return step.build(self.epoch, -1)
        self._counters.num_steps += 1
        self._admission.advance_time(step.tokens)
        self._flights.append(step)
        return step.build(self.epoch, self._counters.num_steps)

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestEvent]:
        """Account for the oldest plan in flight; a result of an older group changes nothing."""
        if plan.epoch != self.epoch or result.epoch != self.epoch:
            return []
        step = self._flights.popleft()
        assert step.number == plan.step == result.step, (step.number, plan.step, result.step)
        events: list[RequestEvent] = []
        next_token, num_requests = 0, len(self._requests)
        running, draining = self._running, self._running.draining
        for report in result.reports or ():
            step.requests[report.row].add_prompt_report(report)
        faults = dict(result.faults or ())
        for number, (request, row) in enumerate(zip(step.requests, step.rows, strict=True)):
            request.in_flight -= 1
            if number in faults:
                events += self._give_own_matcher(request, faults[number])
            elif request.takes(row.start):
                if row.samples:
                    self._accept(request, row, result, next_token, now, events)
                else:
                    running.mark_computed(request, row.start + row.length)
                if request.prompt_done:
                    events.append(self._end(request, FinishReason.LENGTH))
            next_token += row.samples + len(row.drafts)
            # Only now does no plan name its blocks and batch slot.
            if request.in_flight == 0 and request.serial in draining:
                running.finish_draining(request)
                self._requeue_freed()
        assert next_token == len(result.tokens), (next_token, len(result.tokens))
        running.learn(step, result, self._flights, now)
        self._residency.applied(step)
        if num_ended := num_requests - len(self._requests):
            self._drain_rate.record(num_ended, now)
        return events

    def finish(
        self, request_id: RequestId, at: int, reason: FinishReason = FinishReason.STOP_STRING
    ) -> list[RequestEvent]:
        """Keep `at` generated tokens and end the request; nothing happens if it has ended."""
        if (request := self._requests.get(request_id)) is None:
            return []
        request.truncate(at)
        return [self._end(request, reason)]

    def cancel(self, request_id: RequestId) -> list[RequestEvent]:
        """The client left; what the request holds is freed after the plans in flight."""
        request = self._requests.get(request_id)
        return [] if request is None else [self._end(request, ClientCancelled())]

    def handle_adapter_event(self, event: AdapterEvent) -> list[Event]:
        """Account for what happened to an adapter, or for a command about it."""
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
        """Matchers for the ranks to prepare now; each is named once until they reply."""
        return self._matchers.to_prepare(self._running)

    def matcher_prepared(self, number: int, fault: str) -> list[RequestEvent]:
        """All ranks have prepared a matcher, or have a fault: then requests that need it end."""
        self._matchers.prepared(number, fault)
        for request in self._admission.release_for_matcher(number):
            self._isolation.enqueue(request)
            self._admission.end_hold(request)
        users = [each for each in self._requests.values() if fault and each.matcher == number]
        return [self._end(request, ConstraintFailure(fault)) for request in users]

    def to_stage(self) -> list[AdapterKey]:
        """Adapters to stage now, each named once until the ranks reply; call before `schedule`."""
        self._prepare_isolation()
        return self._residency.host.to_stage()

    def group_lost(self, wanted: bool = False) -> list[RequestEvent]:
        """The ranks are gone: running requests wait again with their tokens, for the next epoch.

        No adapter is staged; plans in flight and replies to earlier keys of `to_stage` are void.
        After losses in a row, none of them `wanted`, requests are isolated; some may end.
        """
        self.epoch += 1
        self._flights.clear()
        ran, moved = self._running.unfinished, self._residency.moving
        self._replace_group(self._capacity)
        self._admission.reset()
        failures = self._isolation.ranks_lost(ran, moved, wanted)
        self._matchers.ranks_lost()
        return [self._end(request, failure) for request, failure in failures.items()]

    def regroup(self, capacity: Capacity) -> list[RequestEvent]:
        """New ranks came after `group_lost`: requests that do not fit on them end."""
        self._replace_group(capacity)
        failures = too_large_now(self._requests.values(), capacity)
        return [self._end(request, failure) for request, failure in failures.items()]

    def reconfigure(self, limits: Limits) -> None:
        """Use other limits; no more requests run than the ranks had batch slots for at start."""
        self._limits = limits
        self._admission.reconfigure(limits)
        self._running.prefix.enabled = limits.prefix_caching and self._capacity.prefix_caching

    def set_shares(
        self, base: AdapterShare, default: AdapterShare, own: Mapping[AdapterKey, AdapterShare]
    ) -> None:
        """Use other shares: the base model's, the default, and those of some adapters."""
        self._admission.set_shares(base, default, own)

    def set_share(self, key: AdapterKey, share: AdapterShare) -> None:
        """Give one adapter a share of its own."""
        self._admission.set_share(key, share)

    def snapshot(self) -> Snapshot:
        """Count everything, for metrics."""
        parts = (self._isolation, self._running, self._residency, self._counters)
        return census(*parts, plans_in_flight=len(self._flights))

    def adapter_states(self) -> dict[AdapterKey, AdapterState]:
        """Where the adapters are that are used, waited for or pinned, or that hold memory."""
        return self._residency.states()

    def adapters(self) -> list[AdapterView]:
        """The same adapters, with what each holds and how many requests use it."""
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
        self._residency.check(held, self._admission.waiting)

    def _replace_group(self, capacity: Capacity) -> None:
        """No request and no adapter is on the ranks."""
        self._counters.num_preemptions += self._running.num_preemptions
        self._capacity = capacity
        self._running = self._new_running()
        self._residency.reset(capacity)

    def _new_running(self) -> RunningRequests:
        caching, ahead = self._limits.prefix_caching, self._limits.tokens_ahead
        return RunningRequests(self._capacity, self._num_batch_slots, caching, ahead)

    def _prepare_isolation(self) -> None:
        """During isolation: preempt cleared requests; if none runs, start the next group."""
        if not self._isolation.active:
            return
        for request in self._isolation.take_cleared():
            self._running.preempt(request)
        self._requeue_freed()
        if not self._running.num_held:
            self._isolation.next_group()

    def _admit(self, step: StepBuilder, now: float) -> None:
        """Load adapters that requests wait for, and admit requests."""
        self._admission.begin_step(now)
        self._admission.start_loads(step)
        for key in self._admission.expired_slices():
            self._running.preempt_adapter(key)
        self._requeue_freed()
        self._join_waiting(step, now)
        if not self._running.num_held:
            self._admission.make_room(step)

    def _join_waiting(self, step: StepBuilder, now: float) -> None:
        """Admit waiting requests in their order while there are tokens, batch slots and blocks."""
        running, most = self._running, min(self._limits.max_running, self._num_batch_slots)
        while step.budget > 0 and (running.num_held < most or running.has_background):
            request = self._admission.next()
            if request is None:
                return
            if not self._matchers.is_ready(request):
                self._admission.hold_for_matcher(request)
                continue
            if not running.in_budget(request, step):
                return
            cached = running.fits(request) if running.num_held < most else None
            if cached is None:  # It stays next, so that it gets what is freed.
                running.make_room(request, self._admission.queues.num_online)
                return self._requeue_freed()
            slot = self._admission.admit(request)
            if request.first_scheduled is None:
                request.set_first_scheduled(now, cached.tokens)
                self._counters.admitted(len(request.prompt), request.cached_tokens)
            running.join(request, cached, slot, step)

    def _accept(
        self,
        request: Request,
        row: StepRow,
        result: StepResult,
        first: int,
        now: float,
        events: list[RequestEvent],
    ) -> None:
        """Account for a row's samples. first: the index of the first one in the result."""
        start = len(request.tokens) - len(request.prompt)
        sampled = result.tokens[first : first + 1 + len(row.drafts)]
        tokens, reason = self._running.accept(request, row, sampled)
        found = result.logprobs and result.logprobs[first : first + len(tokens)]
        own = request.add_logprobs(found) if found else None
        if request.first_token is None:
            request.first_token = now
        self._counters.num_generated_tokens += len(tokens)
        if self._admission.rate_limits.has_rates:
            for key in request.charged_adapters:
                self._admission.rate_limits.charge(key, len(tokens), now)
        events.append(NewTokens(request.id, start, tokens, own))
        if reason is not None:
            events.append(self._end(request, reason))

    def _end(self, request: Request, ending: Ending) -> Ended:
        """End a request, whether it waits or runs."""
        status = request.status
        event = request.ended(ending)
        del self._requests[request.id]
        self._matchers.release(request)
        self._admission.forget(request)
        if status is Status.WAITING:
            self._isolation.remove(request)
        else:
            self._running.release(request)
            self._requeue_freed()
        return event

    def _give_own_matcher(self, request: Request, fault: str) -> list[RequestEvent]:
        """A row's matcher met its limits: continue with one of its own, or end."""
        if request.status is Status.ENDED or request.discards_samples:
            return []
        if not self._matchers.give_own(request):
            return [self._end(request, ConstraintFailure(fault))]
        # Plans in flight sample it with the old matcher.
        request.discards_samples = True
        if request.status is Status.RUNNING:
            self._running.preempt(request)
            self._requeue_freed()
        return []

    def _requeue_freed(self) -> None:
        """Account for requests that hold nothing on the ranks now; preempted ones wait again."""
        for request in self._running.take_freed():
            self._admission.release(request)
            if request.status is Status.LEAVING:
                request.rewind()
                self._isolation.enqueue(request)

    def _fail_waiting(self, key: AdapterKey, failure: AdapterFailure) -> list[Event]:
        """End all requests that wait for an adapter that cannot be served."""
        ended = [self._end(each, failure) for each in self._admission.queues.waiting_for(key)]
        return [*ended, *self._answer_stage_request(key, failure)]

    def _answer_stage_request(self, key: AdapterKey, failure: AdapterFailure | None) -> list[Event]:
        """The reply to an AdapterWanted, if one waits."""
        return [AdapterArrived(key, failure)] if self._residency.take_stage_request(key) else []

"""The engine loop: takes commands, sends plans, applies results, emits events. No Ray, no torch.

It has a thread of its own and two queues to the rest of the replica: `post` takes commands
from any thread, `emit` sends events back. Up to two plans are in flight, so that the
ranks never wait for this thread.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from configs.wire.adapters import AdapterKey, AdapterRefusal
from configs.wire.plan import StepPlan
from configs.wire.sleep import SleepMode
from deployments.driver.description import capacity_changes, common
from deployments.driver.later_graphs import LaterGraphs
from deployments.driver.loop_settings import LoopSettings
from deployments.driver.rank_replies import (
    Pending,
    RowSums,
    collect,
    oldest,
    reported_fault,
    staging_event,
)
from deployments.driver.rank_start import RankGroup, RankStart
from deployments.driver.sleep_orders import Done, SleepOrders
from deployments.observability.adapter_records import LoadStage
from deployments.rank.messages import (
    Loaded,
    LoadReport,
    Prepare,
    Prepared,
    RankBroken,
    Recorded,
    Report,
    RunStep,
    Stage,
    StageAnswer,
    StepDone,
    Stop,
)
from deployments.rank.transport import RankLinks, RanksLost
from scheduler.events import AdapterFailed, AdapterLoaded, Ended, Event, RequestEvent
from scheduler.scheduler import Scheduler

_STEPS_AHEAD = 2
_IDLE_SECONDS = 60.0
_SHORTEST_WAIT_SECONDS = 0.001

Command = Callable[[Scheduler, float], Sequence[Event] | None]
"""Runs between two steps; takes the time and may return events to emit."""

logger = logging.getLogger("loray.driver.loop")


class EngineLoop:
    """Drives one scheduler over one group of ranks until `stop`."""

    def __init__(
        self,
        scheduler: Scheduler,
        group: RankGroup,
        started: tuple[RankLinks, list[LoadReport]],
        settings: LoopSettings,
    ) -> None:
        """started: the links and load reports of the running group."""
        links, self.reports = started
        self._capacity = common([report.capacity for report in self.reports])
        self._scheduler = scheduler
        self._group = group
        self._links: RankLinks | None = links
        self._num_ranks = links.num_ranks
        self._settings = settings
        self._commands: deque[Command] = deque()
        self._posted = threading.Event()
        self._in_flight: deque[StepPlan] = deque()
        self._oldest_since = 0.0
        # What all ranks must answer. Each is ordered by start time: the first entry is the oldest.
        self._staging: dict[AdapterKey, Pending[StageAnswer]] = {}
        self._loading: dict[AdapterKey, Pending[Loaded]] = {}
        self._preparing: dict[int, Pending[Prepared]] = {}
        self._num_attempts = 0
        self._row_sums = RowSums()
        self._graphs = LaterGraphs()
        self._graphs.begin(self.reports)
        self._stopping = False
        self._starter: RankStart | None = None
        self._orders = SleepOrders()
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)
        self.healthy = True
        self.asleep = False
        self.num_rebuilds = 0
        self.failure: str | None = None

    def start(self) -> None:
        """Start the loop's thread."""
        self._thread.start()

    def post(self, command: Command) -> None:
        """Have the loop run `command(scheduler, now)` soon and emit its events; from any thread."""
        self._commands.append(command)
        self._posted.set()
        # Read once: the loop's thread sets it to None when the ranks are lost.
        if (links := self._links) is not None:
            links.wake()

    def stop(self) -> None:
        """End the loop and the ranks; returns when both have ended."""
        self._stopping = True
        self.post(lambda scheduler, now: None)
        if self._thread.is_alive():
            self._thread.join(timeout=30.0)
        self._group.release()
        if self._starter is not None:
            self._starter.abandon(timeout_s=30.0)
            self._group.release()  # The ranks that it may have started meanwhile.

    def sleep(self, mode: SleepMode, done: Done) -> None:
        """End the ranks until `wake`, when the mode allows it; call it from a command."""
        if self.asleep:
            done("")
            return
        self._orders.sleep(mode, done)
        if mode is SleepMode.ABORT:
            self._settings.fail("the server goes to sleep: send the request again later")

    def wake(self, done: Done) -> None:
        """Start ranks that sleep; call it from a command. A fault leaves them asleep."""
        self._orders.wake(done)
        if not self.asleep:
            self._orders.woken()

    def _run(self) -> None:
        try:
            while not self._stopping:
                try:
                    self._iterate()
                except RanksLost as loss:
                    if not self._stopping:
                        self._rebuild(str(loss))
            if self._links is not None:
                with suppress(RanksLost):  # They may have ended already.
                    self._links.send(Stop())
        except Exception as error:
            # The last boundary of this thread: without it the replica would look healthy and
            # every client would wait for ever.
            logger.exception("the engine loop failed")
            self.healthy = False
            self.failure = f"the engine loop failed: {type(error).__name__}: {error}"
            self._settings.fail(self.failure)

    def _iterate(self) -> None:
        assert self._links is not None
        self._posted.clear()
        # Commands first: a cancelled request must not be planned again.
        self._run_commands()
        if self._may_sleep():
            self._run_asleep()
            return
        for key in self._scheduler.to_stage():
            self._stage(self._links, key)
        self._launch(self._links)
        self._graphs.request(self._links, busy=bool(self._in_flight))
        self._request_matchers(self._links)
        # `now` is before `receive`: a report that was late because of this thread blames no rank.
        seconds, now = self._seconds_to_wait(), time.monotonic()
        for report in self._links.receive(seconds):
            self._handle(report)
        self._give_up_late(now)
        self._check_progress(now)

    def _seconds_to_wait(self) -> float:
        """How long to wait for a report: until something is overdue or can be scheduled."""
        now, recovery = time.monotonic(), self._settings.recovery
        due = now + _IDLE_SECONDS
        if self._in_flight:
            due = min(due, self._oldest_since + recovery.step_timeout_s)
        elif (wake := self._scheduler.next_wake) is not None:
            due = min(due, wake)
        due = min(due, oldest(self._loading) + recovery.step_timeout_s)
        since = min(oldest(self._staging), oldest(self._preparing))
        return max(min(due, since + recovery.stage_timeout_s) - now, _SHORTEST_WAIT_SECONDS)

    def _check_progress(self, now: float) -> None:
        """Raise RanksLost if a rank has not ended a step or a load for too long."""
        limit = self._settings.recovery.step_timeout_s
        if self._in_flight and (late := now - self._oldest_since) > limit:
            raise RanksLost(f"step {self._in_flight[0].step} has not ended after {late:.1f} s")
        if self._loading and (late := now - oldest(self._loading)) > limit:
            raise RanksLost(f"an adapter has not reached the device after {late:.1f} s")

    def _run_commands(self) -> None:
        while self._commands:
            self._emit(self._commands.popleft()(self._scheduler, time.monotonic()))

    def _stage(self, links: RankLinks, key: AdapterKey) -> None:
        try:
            adapter = self._row_sums.given_to(self._settings.fetched(key))
        except KeyError:  # It waited so long that its files were released.
            self._fail_staging(key, "the adapter was forgotten: request it again", False)
            return
        self._num_attempts += 1
        self._staging[key] = Pending(time.monotonic(), self._num_attempts)
        links.send(Stage(adapter, self._num_attempts))

    def _request_matchers(self, links: RankLinks) -> None:
        for matcher in self._scheduler.matchers_to_prepare():
            self._preparing[matcher.number] = Pending(time.monotonic())
            links.send(Prepare(matcher.number, matcher.constraint, matcher.released))

    def _give_up_late(self, now: float) -> None:
        """Fail what some rank has been reading or compiling for too long (a disk that hangs).

        The rank's thread goes on: `_handle` ignores its reply.
        """
        limit = self._settings.recovery.stage_timeout_s
        while now - oldest(self._staging) > limit:
            key = next(iter(self._staging))
            del self._staging[key]
            message = f"the adapter could not be read within {limit:.0f} s: try again later"
            self._fail_staging(key, message, True)
        while now - oldest(self._preparing) > limit:
            number = next(iter(self._preparing))
            ready = len(self._preparing.pop(number).replies)
            logger.warning("%d of %d ranks made a matcher in %.0f s", ready, self._num_ranks, limit)
            fault = f"the constraint could not be prepared within {limit:.0f} s: try again later"
            self._emit(self._scheduler.matcher_prepared(number, fault))

    def _fail_staging(self, key: AdapterKey, message: str, partly: bool) -> None:
        failed = AdapterFailed(key, AdapterRefusal.UNAVAILABLE, message, partly)
        self._emit(self._scheduler.handle_adapter_event(failed))

    def _launch(self, links: RankLinks) -> None:
        while len(self._in_flight) < _STEPS_AHEAD and self._orders.mode is not SleepMode.KEEP:
            plan = self._scheduler.schedule(time.monotonic())
            if plan.empty:
                return
            if not self._in_flight:
                self._oldest_since = time.monotonic()
            self._in_flight.append(plan)
            for load in plan.loads:
                self._loading[load.key] = Pending(time.monotonic())
            links.send(RunStep(plan))

    def _handle(self, report: Report) -> None:
        if isinstance(report, StepDone):
            self._apply(report)
        elif isinstance(report, RankBroken):
            raise RanksLost(f"rank-{report.rank}: {report.message}")
        elif isinstance(report, Loaded):
            self._collect_load(report)
        elif isinstance(report, Recorded):
            self._graphs.recorded(report)
        elif isinstance(report, Prepared):
            self._collect_prepared(report)
        else:
            self._collect_stage(report)

    def _apply(self, report: StepDone) -> None:
        # Ranks run plans in order, so the result is that of the oldest.
        plan = self._in_flight.popleft()
        assert plan.step == report.result.step, f"answer to {report.result.step}, not {plan.step}"
        self._oldest_since = time.monotonic()
        self._emit(self._scheduler.apply(plan, report.result, self._oldest_since))
        self._settings.applied(plan, report.result)

    def _collect_load(self, report: Loaded) -> None:
        """Wait for every rank: rows use an adapter only once all of them have its bytes."""
        loading = collect(self._loading, report.key, report, self._num_ranks)
        if loading is not None:
            self._settings.loaded(LoadStage.LOAD, time.monotonic() - loading.since)
            self._emit(self._scheduler.handle_adapter_event(AdapterLoaded(report.key)))

    def _collect_prepared(self, report: Prepared) -> None:
        """Wait for every rank: a constraint holds on all of them or on none."""
        if report.number not in self._preparing:
            return  # It took too long and was given up.
        prepared = collect(self._preparing, report.number, report, self._num_ranks)
        if prepared is not None:
            fault = max(reply.fault for reply in prepared.replies)
            self._emit(self._scheduler.matcher_prepared(report.number, fault))

    def _collect_stage(self, report: StageAnswer) -> None:
        """Wait for every rank's answer: an adapter is staged on all of them or on none."""
        staging = self._staging.get(report.key)
        if staging is None or staging.attempt != report.attempt:
            return  # It took too long and was given up.
        if collect(self._staging, report.key, report, self._num_ranks) is not None:
            if self._row_sums.add(staging.replies):
                assert self._links is not None
                self._stage(self._links, report.key)
                return
            self._settings.loaded(LoadStage.STAGE, time.monotonic() - staging.since)
            self._emit(self._scheduler.handle_adapter_event(staging_event(staging.replies)))

    def _emit(self, events: Sequence[Event] | None) -> None:
        if events:
            self._settings.emit(events)

    def _rebuild(self, loss: str) -> None:
        """Kill all ranks and start new ones; running requests wait again, with their tokens."""
        assert self._links is not None
        fault = reported_fault(self._links) or loss
        logger.error("the ranks are lost (%s); rebuilding them", fault)
        self.healthy = False
        self._stop_ranks()
        self._report_ended(self._scheduler.group_lost())
        began = time.monotonic()
        start = self._start_ranks(began + self._settings.recovery.recovery_timeout_s)
        if start.result is not None:
            self._use(start.result)
            self.num_rebuilds += 1
            self.healthy = True
            logger.info("the ranks are back after %.1f s", time.monotonic() - began)
        elif not self._stopping:
            self.failure = f"the ranks did not come back: {start.fault}"
            self._stopping = True
            self._settings.fail(self.failure)

    def _may_sleep(self) -> bool:
        """Whether a sleep is wanted and can begin: no plan is in flight, and no request is open."""
        mode = self._orders.mode
        if mode is None or self._in_flight:
            return False
        seen = self._scheduler.snapshot()
        return mode is SleepMode.KEEP or not seen.running + seen.queued + seen.draining

    def _run_asleep(self) -> None:
        """End the ranks, and run commands until new ones have started."""
        self._stop_ranks()
        self._group.release()
        self._report_ended(self._scheduler.group_lost(wanted=True))
        self._group.await_ends()
        logger.info("asleep: the ranks have ended")
        self.asleep = True
        self._orders.slept()
        while self.asleep and not self._stopping:
            self._run_posted(_IDLE_SECONDS)
            if self._orders.waking:
                self._wake()

    def _wake(self) -> None:
        """Start new ranks; if they do not start, the sleep goes on."""
        start = self._start_ranks(math.inf)
        if start.result is not None:
            self._use(start.result)
            self.asleep = False
            logger.info("awake: new ranks have started")
        self._orders.woken("" if start.result is not None else start.fault or "it is shutting down")

    def _stop_ranks(self) -> None:
        self._links = None
        # Plans of the old epoch: `group_lost` frees what they name.
        for pending in (self._in_flight, self._staging, self._loading, self._preparing):
            pending.clear()
        self._group.stop()

    def _use(self, started: tuple[RankLinks, list[LoadReport]]) -> None:
        """Go on with new ranks; the scheduler gets their capacity, as they measured it again."""
        self._links, self.reports = started
        self._graphs.begin(self.reports)
        capacity = common([report.capacity for report in self.reports])
        before, self._capacity = self._capacity, capacity
        if capacity == before:
            return
        changes = capacity_changes(before, capacity)
        logger.warning("the ranks came back with other memory: %s", changes)
        self._report_ended(self._scheduler.regroup(capacity))

    def _report_ended(self, events: Sequence[RequestEvent]) -> None:
        """Log and emit the ends of requests that the loss of the ranks ended."""
        for event in events:
            if isinstance(event, Ended):
                logger.error("request %s ends: %s", event.request_id, event.ending)
        if isolated := self._scheduler.snapshot().isolated:
            logger.warning("lost again: %d requests run in isolation, the others wait", isolated)
        self._emit(events)

    def _start_ranks(self, deadline: float) -> RankStart:
        """Start the group in a thread, while this one runs commands (cancels above all).

        deadline: by the monotonic clock; after it open requests end.
        """
        start = self._starter = RankStart(self._group, self._posted.set)
        while start.running and not self._stopping:
            if time.monotonic() > deadline:
                self._settings.fail("the ranks were lost and are not back yet: try again")
            self._run_posted(max(0.05, min(1.0, deadline - time.monotonic())))
        return start

    def _run_posted(self, timeout_s: float) -> None:
        """Wait for commands, and run them."""
        self._posted.wait(timeout_s)
        self._posted.clear()
        self._run_commands()

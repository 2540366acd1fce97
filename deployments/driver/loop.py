"""The engine loop: takes commands, sends plans, applies results, emits events. No Ray, no torch.

It has a thread of its own and two queues to the rest of the replica: `post` takes commands
from any thread, `emit` sends events back. Up to two plans are in flight, so that the
ranks never wait for this thread.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from configs.engine import RecoveryConfig
from configs.wire.adapters import AdapterKey, AdapterRefusal, FetchedAdapter
from configs.wire.plan import StepPlan, StepResult
from deployments.driver.description import common
from deployments.driver.rank_replies import Pending, RowSums, collect, oldest, staging_event
from deployments.observability.adapter_records import LoadStage
from deployments.rank.messages import (
    Loaded,
    LoadReport,
    Prepare,
    Prepared,
    RankBroken,
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
_START_ATTEMPTS = 2

Command = Callable[[Scheduler, float], Sequence[Event] | None]
"""Runs between two steps; takes the time and may return events to emit."""

logger = logging.getLogger("loray.driver.loop")


class RankGroup(Protocol):
    """Starts and kills the ranks (`RayRanks`)."""

    def start(self) -> tuple[RankLinks, list[LoadReport]]:
        """Start every rank; RanksLost when that fails."""
        ...

    def stop(self) -> None:
        """Kill every rank."""
        ...


@dataclass(frozen=True)
class LoopSettings:
    """The loop's recovery limits and its callbacks, which it calls on its own thread.

    fetched: an adapter's files; KeyError if it was forgotten.
    emit: takes events.
    fail: ends all open requests with a message.
    applied: takes each plan and its result.
    loaded: takes each stage of an adapter's load and its seconds.
    """

    recovery: RecoveryConfig
    fetched: Callable[[AdapterKey], FetchedAdapter]
    emit: Callable[[Sequence[Event]], None]
    fail: Callable[[str], None]
    applied: Callable[[StepPlan, StepResult], None]
    loaded: Callable[[LoadStage, float], None]


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
        self._stopping = False
        self._starter: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)
        self.healthy = True
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
        self._group.stop()
        if self._starter is not None:
            self._starter.join(timeout=30.0)
            self._group.stop()  # The ranks that it may have started meanwhile.

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
        self._request_staging(self._links)
        self._launch(self._links)
        self._request_matchers(self._links)
        # `now` is before `receive`: a report that was late because of this thread blames no rank.
        seconds, now = self._seconds_to_wait(), time.monotonic()
        for report in self._links.receive(seconds):
            self._handle(report)
        if self._staging or self._preparing:
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
        if self._loading:
            due = min(due, oldest(self._loading) + recovery.step_timeout_s)
        if self._staging or self._preparing:
            since = min(oldest(self._staging), oldest(self._preparing))
            due = min(due, since + recovery.stage_timeout_s)
        return max(due - now, _SHORTEST_WAIT_SECONDS)

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

    def _request_staging(self, links: RankLinks) -> None:
        for key in self._scheduler.to_stage():
            self._stage(links, key)

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
        while len(self._in_flight) < _STEPS_AHEAD:
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
        logger.error("the ranks are lost (%s); rebuilding them", self._reported_fault() or loss)
        self.healthy = False
        self._links = None
        # Plans of the old epoch: `group_lost` frees what they name.
        self._in_flight.clear()
        self._staging.clear()
        self._loading.clear()
        self._preparing.clear()
        self._group.stop()
        self._report_ended(self._scheduler.group_lost())
        began = time.monotonic()
        self._links = self._restart(began)
        if self._links is not None:
            self._apply_capacity()
            self.healthy = True
            logger.info("the ranks are back after %.1f s", time.monotonic() - began)

    def _reported_fault(self) -> str | None:
        """The fault that a rank reported before its connection closed, if any."""
        assert self._links is not None
        with suppress(RanksLost):
            for report in self._links.receive(0.0):
                if isinstance(report, RankBroken):
                    return f"rank-{report.rank}: {report.message}"
        return None

    def _apply_capacity(self) -> None:
        """Give the scheduler the new ranks' capacity: they measured the free memory again."""
        capacity = common([report.capacity for report in self.reports])
        before, self._capacity = self._capacity, capacity
        if capacity == before:
            return
        counts = ("num_blocks", "adapter_pages", "adapter_slots", "host_bytes")
        changes = [
            f"{name} {new} (before: {old})"
            for name in counts
            if (new := getattr(capacity, name)) != (old := getattr(before, name))
        ]
        logger.warning("the ranks came back with other memory: %s", ", ".join(changes))
        self._report_ended(self._scheduler.regroup(capacity))

    def _report_ended(self, events: Sequence[RequestEvent]) -> None:
        """Log and emit the ends of requests that the loss of the ranks ended."""
        for event in events:
            if isinstance(event, Ended):
                logger.error("request %s ends: %s", event.request_id, event.ending)
        if isolated := self._scheduler.snapshot().isolated:
            logger.warning("lost again: %d requests run in isolation, the others wait", isolated)
        self._emit(events)

    def _restart(self, began: float) -> RankLinks | None:
        """Start the group in a thread, while this one runs commands (cancels above all)."""
        started: list[tuple[RankLinks, list[LoadReport]]] = []
        failures: list[str] = []
        ended = threading.Event()

        def start() -> None:
            for _ in range(_START_ATTEMPTS):
                if self._stopping:
                    break
                try:
                    started.append(self._group.start())
                except Exception as error:
                    # The next attempt starts from nothing, whatever the fault was.
                    logger.exception("the ranks did not start")
                    self._group.stop()
                    failures.append(f"{type(error).__name__}: {error}")
                    continue
                break
            ended.set()
            self._posted.set()

        starter = threading.Thread(target=start, name="restart-ranks", daemon=True)
        starter.start()
        self._starter = starter
        deadline = began + self._settings.recovery.recovery_timeout_s
        while starter.is_alive() and not (ended.is_set() or self._stopping):
            if time.monotonic() > deadline:
                self._settings.fail("the ranks were lost and are not back yet: try again")
            self._posted.wait(timeout=max(0.05, min(1.0, deadline - time.monotonic())))
            self._posted.clear()
            self._run_commands()
        if not started and not self._stopping:
            self.failure = f"the ranks did not come back: {failures[-1]}"
            self._stopping = True
            self._settings.fail(self.failure)
        if not started:
            return None
        links, self.reports = started[0]
        self.num_rebuilds += 1
        return links

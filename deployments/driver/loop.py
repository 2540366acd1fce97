"""The engine's loop: commands in, plans out, results in, events out. Knows no Ray and no torch.

It has a thread of its own and meets the rest of the replica in two queues: `post` brings
commands from any thread, `emit` takes events away. Up to two plans are in flight, so that the
ranks never wait for this thread.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from configs.adapters import AdapterKey, AdapterRefusal, AdapterShape, FetchedAdapter
from configs.engine import RecoveryConfig
from deployments.rank.messages import (
    Broken,
    LoadReport,
    Report,
    Stage,
    Staged,
    StageFailed,
    Step,
    Stepped,
    Stop,
)
from deployments.rank.transport import RankLinks, RanksLost
from scheduler.events import AdapterFailed, AdapterStaged, Event
from scheduler.plan import StepPlan
from scheduler.scheduler import Scheduler

_STEPS_AHEAD = 2
_IDLE_SECONDS = 60.0
_START_ATTEMPTS = 2

Command = Callable[[Scheduler, float], Sequence[Event]]

logger = logging.getLogger("loray.driver.loop")


class RankGroup(Protocol):
    """What the loop asks of whoever starts and kills the ranks."""

    def start(self) -> tuple[RankLinks, list[LoadReport]]:
        """Start every rank; RanksLost when that fails."""
        ...

    def stop(self) -> None:
        """Kill every rank."""
        ...


@dataclass(frozen=True)
class LoopSettings:
    """What the loop is told once: how to find an adapter's files, where events go.

    fail ends every open request with a message; applied sees each plan and its seconds.
    """

    recovery: RecoveryConfig
    fetched: Callable[[AdapterKey], FetchedAdapter]
    emit: Callable[[Sequence[Event]], None]
    fail: Callable[[str], None]
    applied: Callable[[StepPlan, float], None]


class EngineLoop:
    """Drives one scheduler over one group of ranks until `stop`."""

    def __init__(
        self,
        scheduler: Scheduler,
        group: RankGroup,
        started: tuple[RankLinks, list[LoadReport]],
        settings: LoopSettings,
    ) -> None:
        """Take over a group that `started`."""
        links, self.reports = started
        self._scheduler = scheduler
        self._group = group
        self._links: RankLinks | None = links
        self._num_ranks = links.num_ranks
        self._settings = settings
        self._commands: deque[Command] = deque()
        self._posted = threading.Event()
        self._in_flight: deque[StepPlan] = deque()
        self._oldest_since = 0.0
        self._staging: dict[AdapterKey, dict[int, Staged | StageFailed]] = {}
        self._staging_since: dict[AdapterKey, float] = {}
        self._stopping = False
        self._starter: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)
        self.healthy = True
        self.num_rebuilds = 0
        self.failure: str | None = None

    def start(self) -> None:
        """Begin turning, in a thread of its own."""
        self._thread.start()

    def post(self, command: Command) -> None:
        """Have the loop call command(scheduler, now) soon; its events are emitted. Any thread."""
        self._commands.append(command)
        self._posted.set()
        if (links := self._links) is not None:
            links.wake()

    def stop(self) -> None:
        """End the loop and the ranks; returns when both are gone."""
        self._stopping = True
        self.post(lambda scheduler, now: [])
        if self._thread.is_alive():
            self._thread.join(timeout=30.0)
        self._group.stop()
        if self._starter is not None:
            self._starter.join(timeout=30.0)
            self._group.stop()  # what it may have started meanwhile

    def _run(self) -> None:
        try:
            while not self._stopping:
                try:
                    self._turn()
                except RanksLost as loss:
                    if not self._stopping:
                        self._rebuild(str(loss))
            if self._links is not None:
                self._links.send(Stop())
        except Exception as error:
            # The last boundary of this thread: without it the replica would look healthy and
            # every client would wait for ever.
            logger.exception("the engine loop failed")
            self.healthy = False
            self.failure = f"the engine loop failed: {type(error).__name__}: {error}"
            self._settings.fail(self.failure)

    def _turn(self) -> None:
        assert self._links is not None
        self._posted.clear()
        self._run_commands()
        self._request_staging(self._links)
        self._launch(self._links)
        self._give_up_staging()
        watching = self._in_flight or self._staging
        timeout_s = self._settings.recovery.step_timeout_s if watching else _IDLE_SECONDS
        for report in self._links.receive(timeout_s):
            self._take(report)
        stuck_for = time.monotonic() - self._oldest_since
        if self._in_flight and stuck_for > self._settings.recovery.step_timeout_s:
            raise RanksLost(f"step {self._in_flight[0].step} has not ended after {stuck_for:.1f} s")

    def _run_commands(self) -> None:
        events: list[Event] = []
        while self._commands:
            events += self._commands.popleft()(self._scheduler, time.monotonic())
        self._emit(events)

    def _request_staging(self, links: RankLinks) -> None:
        for key in self._scheduler.to_stage():
            self._staging[key] = {}
            self._staging_since[key] = time.monotonic()
            links.send(Stage(self._settings.fetched(key)))

    def _give_up_staging(self) -> None:
        """Fail adapters that some rank has been reading for too long (a disk that hangs)."""
        limit = self._settings.recovery.stage_timeout_s
        now = time.monotonic()
        late = [key for key, since in self._staging_since.items() if now - since > limit]
        for key in late:
            del self._staging[key], self._staging_since[key]
            message = f"the adapter could not be read within {limit:.0f} s: try again later"
            failed = AdapterFailed(key, AdapterRefusal.UNAVAILABLE, message)
            self._emit(self._scheduler.adapter(failed, now))

    def _launch(self, links: RankLinks) -> None:
        while len(self._in_flight) < _STEPS_AHEAD:
            plan = self._scheduler.schedule(time.monotonic())
            if plan.empty:
                return
            if not self._in_flight:
                self._oldest_since = time.monotonic()
            self._in_flight.append(plan)
            links.send(Step(plan))

    def _take(self, report: Report) -> None:
        if isinstance(report, Stepped):
            self._apply(report)
        elif isinstance(report, Broken):
            raise RanksLost(f"rank-{report.rank}: {report.message}")
        else:
            self._collect_staging(report)

    def _apply(self, report: Stepped) -> None:
        plan = self._in_flight.popleft()
        assert plan.step == report.result.step, f"answer to {report.result.step}, not {plan.step}"
        self._oldest_since = time.monotonic()
        self._emit(self._scheduler.apply(plan, report.result, self._oldest_since))
        self._settings.applied(plan, report.result.compute_seconds)

    def _collect_staging(self, report: Staged | StageFailed) -> None:
        """Wait for every rank's answer: an adapter is staged on all of them or on none."""
        answers = self._staging.get(report.key)
        if answers is None:
            return  # it took too long and was given up
        answers[report.rank] = report
        if len(answers) < self._num_ranks:
            return
        del self._staging[report.key], self._staging_since[report.key]
        now = time.monotonic()
        for answer in answers.values():
            if isinstance(answer, StageFailed):
                failed = AdapterFailed(answer.key, answer.refusal, answer.message)
                self._emit(self._scheduler.adapter(failed, now))
                return
        shapes = [answer.shape for answer in answers.values() if isinstance(answer, Staged)]
        shape = AdapterShape(shapes[0].num_pages, max(shape.host_bytes for shape in shapes))
        self._emit(self._scheduler.adapter(AdapterStaged(report.key, shape), now))

    def _emit(self, events: Sequence[Event]) -> None:
        if events:
            self._settings.emit(events)

    def _rebuild(self, loss: str) -> None:
        """Kill what is left of the group and start a new one; requests wait with their tokens."""
        logger.error("the ranks are lost (%s); rebuilding them", loss)
        self.healthy = False
        self._links = None
        self._in_flight.clear()
        self._staging.clear()
        self._staging_since.clear()
        self._group.stop()
        self._emit(self._scheduler.group_lost(time.monotonic()))
        began = time.monotonic()
        self._links = self._restart(began)
        if self._links is not None:
            self.healthy = True
            logger.info("the ranks are back after %.1f s", time.monotonic() - began)

    def _restart(self, began: float) -> RankLinks | None:
        """Start the group in a thread while commands (cancels above all) go on."""
        started: list[tuple[RankLinks, list[LoadReport]]] = []
        failures: list[str] = []

        def start() -> None:
            for _ in range(_START_ATTEMPTS):
                if self._stopping:
                    break
                try:
                    started.append(self._group.start())
                except Exception as error:
                    # Whatever kept the ranks from starting, the next attempt starts afresh.
                    logger.exception("the ranks did not start")
                    self._group.stop()
                    failures.append(f"{type(error).__name__}: {error}")
                    continue
                break
            self._posted.set()

        starter = threading.Thread(target=start, name="restart-ranks", daemon=True)
        starter.start()
        self._starter = starter
        deadline = began + self._settings.recovery.recovery_timeout_s
        while starter.is_alive() and not self._stopping:
            self._posted.wait(timeout=max(0.05, min(1.0, deadline - time.monotonic())))
            self._posted.clear()
            self._run_commands()
            if time.monotonic() > deadline:
                self._settings.fail("the ranks were lost and are not back yet: try again")
        if not started and not self._stopping:
            self.failure = f"the ranks did not come back: {failures[-1]}"
            self._stopping = True
            self._settings.fail(self.failure)
        if not started:
            return None
        links, self.reports = started[0]
        self.num_rebuilds += 1
        return links

"""Late threads and callers: no rank counts as lost by mistake, and no hold is leaked."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from configs.engine import RecoveryConfig
from configs.wire.adapters import (
    AdapterKey,
    AdapterReference,
    AdapterRefusal,
    AdapterShape,
    AdapterSource,
    FetchedAdapter,
)
from configs.wire.plan import StepResult
from configs.wire.sampling import Sampling, Stopping
from deployments.driver.adapters.versions import Versions
from deployments.driver.engine import DriverEngine
from deployments.driver.loop import EngineLoop
from deployments.driver.loop_settings import LoopSettings
from deployments.rank.messages import Loaded, RunStep, Stage, Staged, StepDone
from scheduler.adapters.resident import AdapterState
from scheduler.admission.limits import Limits
from scheduler.events import AdapterFailure, Ended, Event
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from tests.clocks import Clock
from tests.deployments.driver.adapters.test_versions import Ranks, Shelf
from tests.deployments.driver.fake_ranks import FakeGroup
from tests.deployments.driver.routing.stories import play
from tests.deployments.driver.test_loop import KEY, HandRank

LIMIT, LONG_AFTER = 300.0, 1000.0
"""Seconds that ranks may take, and more than those."""
HELD_SECONDS, HANGING_SECONDS = 600.0, 120.0
"""How long a thread is held, and awaited, so that a test that fails comes to an end."""
SHAPE = AdapterShape((1,), 100)


class Held:
    """Keeps a thread that comes here until it may go on."""

    def __init__(self) -> None:
        self.came = threading.Event()
        self.may_go_on = threading.Event()

    def stay(self) -> None:
        self.came.set()
        self.may_go_on.wait(HELD_SECONDS)


class LateStarter(threading.Event):
    """Holds the thread that restarts the ranks, right after it reported them."""

    def __init__(self) -> None:
        super().__init__()
        self.held = Held()

    def set(self) -> None:
        super().set()
        if threading.current_thread().name == "restart-ranks":
            self.held.stay()


class Played:
    """A loop over a rank that is played by hand, and what its requests came to."""

    def __init__(self) -> None:
        self.rank = HandRank()
        self.loaded = Held()
        self.loaded.may_go_on.set()
        self.forgotten: set[AdapterKey] = set()
        self._ends: dict[str, Ended] = {}
        self._changed = threading.Condition()
        started = self.rank.start()
        scheduler = Scheduler(Limits(steps_ahead=1), self.rank.report.capacity)
        settings = LoopSettings(
            recovery=RecoveryConfig(step_timeout_s=LIMIT, stage_timeout_s=LIMIT),
            fetched=self.fetched,
            emit=self.take,
            fail=lambda message: None,
            applied=lambda plan, result: None,
            loaded=lambda stage, seconds: self.loaded.stay(),
        )
        self.loop = EngineLoop(scheduler, self.rank, started, settings)

    def fetched(self, key: AdapterKey) -> FetchedAdapter:
        if key in self.forgotten:
            raise KeyError(key)
        return FetchedAdapter(key, "red", "", "digest", ())

    def take(self, events: Sequence[Event]) -> None:
        with self._changed:
            self._ends |= {each.request_id[0]: each for each in events if isinstance(each, Ended)}
            self._changed.notify_all()

    def ask(self, name: str, key: AdapterKey | None = KEY) -> None:
        def add(scheduler: Scheduler, now: float) -> list[Event]:
            scheduler.add(Request((name, 0), [5], Sampling(), Stopping(1), key), now)
            return []

        self.loop.post(add)

    def keep_busy(self, held: Held) -> None:
        """Have the loop's thread held in a command."""

        def stay(scheduler: Scheduler, now: float) -> list[Event]:
            held.stay()
            return []

        self.loop.post(stay)

    def end(self, name: str) -> Ended:
        with self._changed:
            assert self._changed.wait_for(lambda: name in self._ends, HANGING_SECONDS), name
            return self._ends[name]

    def serve_adapted(self, name: str) -> None:
        """Play the rank from an adapter's load to the end of its request."""
        assert [load.key for load in self.rank.answer().loads] == [KEY]
        self.rank.say(Loaded(0, KEY))
        self.rank.answer(7)
        assert self.end(name).tokens == [7]


@pytest.fixture
def played() -> Iterator[Played]:
    played = Played()
    yield played
    played.loop.stop()
    assert played.loop.failure is None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(0.0)
    monkeypatch.setattr("deployments.driver.loop.time", clock)
    return clock


def test_a_reply_that_waits_for_a_late_driver_is_used(played: Played, clock: Clock) -> None:
    played.loop.start()
    played.ask("r")
    attempt = played.rank.hear(Stage).attempt
    held = Held()
    played.keep_busy(held)
    assert held.came.wait(HANGING_SECONDS)
    played.rank.say(Staged(0, KEY, SHAPE, attempt))
    clock.now = LONG_AFTER
    held.may_go_on.set()
    played.serve_adapted("r")


def test_a_late_driver_does_not_count_a_rank_as_lost(played: Played, clock: Clock) -> None:
    """The step's answer comes while the thread that waits for it is busy with another."""
    rank, held = played.rank, played.loaded
    held.may_go_on.clear()
    played.loop.start()
    played.ask("base", None)
    plan = rank.hear(RunStep).plan
    played.ask("red")
    rank.say(Staged(0, KEY, SHAPE, rank.hear(Stage).attempt))
    assert held.came.wait(HANGING_SECONDS)
    rank.say(StepDone(StepResult(plan.epoch, plan.step, [3])))
    clock.now = LONG_AFTER
    held.may_go_on.set()
    assert played.end("base").tokens == [3]
    played.serve_adapted("red")
    assert rank.starts == 1


def test_ranks_that_are_back_serve_however_late_their_starter_ends(played: Played) -> None:
    rank = played.rank
    posted = played.loop._posted = LateStarter()
    played.loop.start()
    rank.end.close()
    assert posted.held.came.wait(HANGING_SECONDS)
    try:
        played.ask("r", None)
        rank.answer(7)
        assert played.end("r").tokens == [7]
    finally:
        posted.held.may_go_on.set()
    assert rank.starts == 2


def test_a_forgotten_adapter_ends_only_its_own_requests(
    played: Played,
) -> None:
    played.forgotten.add(KEY)
    played.loop.start()
    played.ask("late")
    ending = played.end("late").ending
    assert isinstance(ending, AdapterFailure)
    assert ending.refusal is AdapterRefusal.UNAVAILABLE
    played.ask("base", None)
    played.rank.answer(7)
    assert played.end("base").tokens == [7]
    played.forgotten.clear()
    played.ask("again")
    played.rank.say(Staged(0, KEY, SHAPE, played.rank.hear(Stage).attempt))
    played.serve_adapted("again")


def test_a_query_fails_with_the_loop(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        held = Held()

        def fail(scheduler: Scheduler, now: float) -> list[Event]:
            held.stay()
            raise ValueError("a fault of the loop")

        engine._handle.post(fail)
        assert await asyncio.to_thread(held.came.wait, HANGING_SECONDS)
        looks = asyncio.create_task(engine.snapshot())
        await asyncio.sleep(0)  # it is posted behind what fails
        held.may_go_on.set()
        with pytest.raises(RuntimeError, match="a fault of the loop"):
            await looks

    play(root, story)


class GatedRanks(Ranks):
    """Hold nothing, and say so when the gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.queried = asyncio.Event()

    async def ask(self, question: object) -> AdapterState | None:
        self.queried.set()
        await self.gate.wait()
        return AdapterState.DISK


RED = AdapterReference(AdapterSource.LOCAL, "red")
OLD, NEW, NEWER = AdapterKey(1), AdapterKey(2), AdapterKey(3)


def test_a_caller_that_leaves_while_versions_are_compared_holds_neither() -> None:
    async def story() -> None:
        shelf, ranks = Shelf(), GatedRanks()
        versions = Versions(shelf, ranks, ranks, ranks)  # type: ignore[arg-type]
        shelf.hold(OLD)
        assert await versions.select(RED, OLD) == OLD
        shelf.hold(NEW)
        leaves = asyncio.create_task(versions.select(RED, NEW))
        await ranks.queried.wait()
        leaves.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaves
        assert shelf.held == {OLD: 1, NEW: 0}

    asyncio.run(asyncio.wait_for(story(), HANGING_SECONDS))


def test_pins_follow_a_name_that_moves_twice_while_versions_are_compared() -> None:
    async def story() -> None:
        shelf, ranks = Shelf(), GatedRanks()
        versions = Versions(shelf, ranks, ranks, ranks)  # type: ignore[arg-type]
        for key in (OLD, NEW, NEWER, NEWER):
            shelf.hold(key)
        assert await versions.select(RED, OLD) == OLD
        choices = [asyncio.create_task(versions.select(RED, key)) for key in (NEW, NEWER)]
        await ranks.queried.wait()
        ranks.gate.set()
        assert await asyncio.gather(*choices) == [NEW, NEWER]
        assert await versions.select(RED, NEWER) == NEWER
        assert versions.current(RED) == NEWER
        assert ranks.moves == [(OLD, NEW), (NEW, NEWER)]
        assert shelf.held == {OLD: 1, NEW: 1, NEWER: 2}

    asyncio.run(asyncio.wait_for(story(), HANGING_SECONDS))

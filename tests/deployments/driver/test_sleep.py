"""Sleep and wake over fake ranks: what becomes of requests, adapters and the ranks."""

import asyncio
from itertools import count
from pathlib import Path

import pytest

from configs.wire.sleep import SleepMode
from deployments.admin_commands import AdminCommands, save
from deployments.contract import AdapterReport, Completion, ErrorKind, Failed, PinAdapter
from deployments.driver.engine import DriverEngine
from deployments.engine_commands import SleepEngine, WakeEngine
from scheduler.adapters.resident import AdapterState
from tests.deployments.driver.adapters.test_pushes import POLICY, Trainer, play_pushes
from tests.deployments.driver.fake_ranks import FakeGroup, continuation
from tests.deployments.driver.routing.stories import (
    NOWHERE,
    digest_of,
    pin,
    play,
    request,
    together,
    tokens,
    until,
    until_running,
    until_true,
)
from tests.deployments.driver.test_admin_commands import MemoryStore

_times = count(1)


def sleep(mode: SleepMode) -> SleepEngine:
    return SleepEngine(next(_times), mode)


def wake() -> WakeEngine:
    return WakeEngine(next(_times))


async def done(engine: DriverEngine, command: SleepEngine | WakeEngine) -> None:
    report = await engine.adapters(command)
    assert report.failure is None, report.failure


def failure(completion: Completion) -> Failed:
    ending = completion.sequences[0].ending
    assert isinstance(ending, Failed), ending
    return ending


def test_kept_requests_go_on_after_the_sleep_and_others_are_refused(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        await pin(engine, "red")
        group.gate.clear()
        sent = [request("r0", [0], 40), request("r1", [1], 40, "red")]
        kept = await together(engine, sent)
        await until_running(engine, 2)
        asleep = asyncio.create_task(done(engine, sleep(SleepMode.KEEP)))
        await until_true(lambda: not engine.report([], 0).ready)
        group.gate.set()
        await asleep
        assert not group._threads, "ranks live"
        refused = failure(await engine.generate(request("new", [1]), NOWHERE))
        assert (refused.kind, refused.retry_after_s) == (ErrorKind.UNAVAILABLE, 5.0)
        info, load = await engine.describe(), await engine.load()
        assert (info.healthy, info.asleep, load.asleep) == (True, True, True)
        assert engine.failure is None
        await done(engine, wake())
        for i, (digest, task) in enumerate(zip(("", digest_of(engine, "red")), kept, strict=True)):
            assert tokens(await task) == [continuation(digest, [i], 40)]
        await until(engine, lambda seen: seen.adapters[AdapterState.DEVICE] == 1)
        info, load = await engine.describe(), await engine.load()
        assert (info.healthy, info.asleep, load.asleep) == (True, False, False)
        assert (engine.num_rebuilds, (await engine.snapshot()).isolated) == (0, 0)

    assert play(root, story).starts == 2


def test_a_sleep_waits_for_requests_and_new_ones_wait_for_its_end(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        group.gate.clear()
        first = asyncio.create_task(engine.generate(request("r", [4], 20), NOWHERE))
        await until_running(engine)
        asleep = asyncio.create_task(done(engine, sleep(SleepMode.WAIT)))
        await until_true(lambda: engine._gate.asleep)
        later = asyncio.create_task(engine.generate(request("later", [5], 20), NOWHERE))
        await until_true(lambda: engine._gate._num_waiting == 1)
        assert not asleep.done()
        group.gate.set()
        assert tokens(await first) == [continuation("", [4], 20)]
        await asleep
        full = failure(await engine.generate(request("full", [5], 20), NOWHERE))
        assert full.kind is ErrorKind.OVERLOADED
        assert not later.done()
        await done(engine, wake())
        assert tokens(await later) == [continuation("", [5], 20)]

    limits = {"max_step_tokens": 16, "max_running": 8, "max_queued": 1}
    play(root, story, sleep={"requests": "wait"}, limits=limits)


def test_a_sleep_can_end_requests_and_a_server_can_end_asleep(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        group.gate.clear()
        running = asyncio.create_task(engine.generate(request("r", [4], 90), NOWHERE))
        await until_running(engine)
        asleep = asyncio.create_task(done(engine, sleep(SleepMode.ABORT)))
        ended = failure(await running)
        assert (ended.kind, "goes to sleep" in ended.message) == (ErrorKind.UNAVAILABLE, True)
        group.gate.set()
        await asleep

    assert play(root, story).starts == 1


def test_a_wake_that_fails_leaves_the_server_asleep(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        await done(engine, sleep(SleepMode.ABORT))
        group.failing_starts = 2
        fault = (await engine.adapters(wake())).failure
        assert fault is not None
        assert "no room" in fault.message
        assert engine.failure is None
        assert (await engine.describe()).asleep
        await done(engine, wake())
        answer = await engine.generate(request("r", [4], 9), NOWHERE)
        assert tokens(answer) == [continuation("", [4], 9)]

    assert play(root, story).starts == 4


def test_a_wake_comes_before_a_sleep_that_still_waits(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        group.gate.clear()
        running = asyncio.create_task(engine.generate(request("r", [4], 30), NOWHERE))
        await until_running(engine)
        asleep = asyncio.create_task(engine.adapters(sleep(SleepMode.WAIT)))
        await until_true(lambda: engine._gate.asleep)
        late = sleep(SleepMode.WAIT)
        await done(engine, wake())
        await done(engine, late)  # It is older than the wake, and changes nothing.
        group.gate.set()
        assert tokens(await running) == [continuation("", [4], 30)]
        fault = (await asleep).failure
        assert fault is not None
        assert "before it slept" in fault.message

    assert play(root, story).starts == 1


def test_a_command_by_a_clock_that_was_set_back_fails(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        hour = 3600 * 10**9
        await done(engine, SleepEngine(2 * hour, SleepMode.ABORT))
        for command in (WakeEngine(hour), SleepEngine(hour, SleepMode.ABORT)):
            fault = (await engine.adapters(command)).failure
            assert fault is not None
            assert "3600.0 s younger is in force: a clock was set back" in fault.message
        assert (await engine.load()).asleep
        await done(engine, WakeEngine(2 * hour + 1))
        assert not (await engine.load()).asleep

    assert play(root, story).starts == 2


def test_pushes_reach_a_sleeping_server_and_pins_survive(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup, trainer: Trainer) -> None:
        await trainer.push(engine, "1")
        assert (await engine.adapters(PinAdapter(POLICY))).failure is None
        await done(engine, sleep(SleepMode.ABORT))
        second = await trainer.push(engine, "2")
        await done(engine, wake())
        await until(engine, lambda seen: seen.adapters[AdapterState.DEVICE] == 1)
        await until_true(lambda: second in group.runners[0].loaded.values())
        answer = await engine.generate(request("r", [1], 5, "policy"), NOWHERE)
        assert tokens(answer) == [continuation(second, [1], 5)]

    play_pushes(root, story)


@pytest.mark.parametrize("mode", SleepMode)
def test_a_replica_that_starts_later_sleeps_too(root: Path, mode: SleepMode) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        store = MemoryStore()
        saved, command = AdminCommands(store, engine.adapters), sleep(mode)
        save(store, command, [AdapterReport("a")])
        await saved.follow(pins=False)
        assert (await engine.load()).asleep
        save(store, WakeEngine(next(_times)), [AdapterReport("a")])
        await saved.follow()
        assert not (await engine.load()).asleep

    assert play(root, story).starts == 2

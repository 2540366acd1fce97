"""The engine over fake ranks: ranks that die or hang are replaced."""

import asyncio
from pathlib import Path

from deployments.contract import (
    ErrorKind,
    Failed,
)
from deployments.driver.engine import DriverEngine
from scheduler.adapters.resident import AdapterState
from tests.clocks import Clock
from tests.deployments.driver.fake_ranks import POISON, FakeGroup, continuation
from tests.deployments.driver.routing.stories import (
    NOWHERE,
    PATIENCE_S,
    digest_of,
    healthy,
    pass_by,
    play,
    request,
    tokens,
    until,
    until_lost,
    until_running,
)

OVERDUE_S = 1.1 * PATIENCE_S


def test_a_dead_rank_is_replaced_and_requests_go_on(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        requests = [
            engine.generate(request(f"r{i}", [i], 60, "red" if i % 2 else None), NOWHERE)
            for i in range(6)
        ]
        await engine.generate(request("first", [50], 3), NOWHERE)
        group.gate.clear()
        answers = asyncio.gather(*requests)
        await until_running(engine)
        group.kill(1)
        for i, answer in enumerate(await answers):
            digest = digest_of(engine, "red") if i % 2 else ""
            assert tokens(answer) == [continuation(digest, [i], 60)]
        assert (await engine.describe()).healthy

    assert play(root, story).starts == 2


def test_a_request_that_breaks_every_step_ends_and_the_others_go_on(root: Path) -> None:
    """It is tried again after a loss of the ranks, but not for ever."""

    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        poison = engine.generate(request("poison", [1, POISON], 5), NOWHERE)
        ending = (await poison).sequences[0].ending
        assert isinstance(ending, Failed)
        assert ending.kind is ErrorKind.GENERATION
        assert "3 times in a row" in ending.message
        answer = await engine.generate(request("good", [3], 9), NOWHERE)
        assert tokens(answer) == [continuation("", [3], 9)]

    assert play(root, story).starts == 4


def test_a_rank_that_hangs_is_replaced(root: Path, clock: Clock) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        await engine.generate(request("warm", [9], 2), NOWHERE)
        group.gate.clear()
        hung = asyncio.create_task(engine.generate(request("r", [4], 10), NOWHERE))
        await until_running(engine)
        await pass_by(engine, clock, OVERDUE_S)
        assert tokens(await hung) == [continuation("", [4], 10)]

    assert play(root, story).starts == 2


def test_ranks_that_do_not_come_back_end_requests_with_a_retryable_error(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        group.gate.clear()
        answer = asyncio.create_task(engine.generate(request("r", [4], 120), NOWHERE))
        await until_running(engine)
        group.failing_starts = 100
        group.kill(0)
        ending = (await answer).sequences[0].ending
        assert isinstance(ending, Failed)
        assert ending.kind is ErrorKind.UNAVAILABLE
        assert ending.retry_after_s is not None
        assert engine.failure is not None
        later = (await engine.generate(request("later", [4], 1), NOWHERE)).sequences[0].ending
        assert isinstance(later, Failed)

    play(root, story)


def test_a_rebuild_that_takes_too_long_ends_requests_and_later_ones_are_served(
    root: Path, clock: Clock
) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        await engine.generate(request("first", [50], 3), NOWHERE)
        group.gate.clear()
        group.may_start.clear()
        answer = asyncio.create_task(engine.generate(request("r", [4], 60), NOWHERE))
        await until_running(engine)
        group.kill(0)
        await until_lost(engine)
        await pass_by(engine, clock, OVERDUE_S)
        ending = (await answer).sequences[0].ending
        assert isinstance(ending, Failed)
        assert ending.kind is ErrorKind.UNAVAILABLE
        assert not (await engine.describe()).healthy
        assert engine.failure is None, "the replica is still waiting for its ranks"
        group.may_start.set()
        await healthy(engine)
        later = await engine.generate(request("later", [4], 6), NOWHERE)
        assert tokens(later) == [continuation("", [4], 6)]

    assert play(root, story).starts == 2


def test_a_load_that_does_not_end_is_a_loss_of_the_ranks(root: Path, clock: Clock) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        group.load_gate.clear()
        red = asyncio.create_task(engine.generate(request("red", [3], 9, "red"), NOWHERE))
        filling = AdapterState.LOADING
        await until(engine, lambda s: s.adapters[filling] == 1 and not s.plans_in_flight)
        await pass_by(engine, clock, OVERDUE_S)
        assert tokens(await red) == [continuation(digest_of(engine, "red"), [3], 9)]

    assert play(root, story).starts == 2

"""Ranks that are lost at any moment: running requests continue, and new ones are served."""

import asyncio
from math import ceil, log2
from pathlib import Path

import msgspec
import pytest

from configs.wire.adapters import AdapterReference, AdapterSource
from deployments.contract import (
    ErrorKind,
    Failed,
    LoadAdapter,
)
from deployments.driver.engine import DriverEngine
from deployments.rank.messages import Command, RunStep, Stage
from tests.deployments.driver.fake_ranks import POISON, FakeGroup, continuation
from tests.deployments.driver.routing.stories import (
    NOWHERE,
    digest_of,
    healthy,
    play,
    request,
    together,
    tokens,
    until,
    until_lost,
    until_running,
    until_true,
)

LIMITS = {"max_step_tokens": 64, "max_running": 16, "max_queued": 64}


async def until_rebuilt(engine: DriverEngine, times: int) -> None:
    """Wait until the ranks were replaced so often, and serve."""
    while engine.num_rebuilds < times:
        await engine.snapshot()
    await healthy(engine)


def small_capacity(group: FakeGroup, **changes: int) -> None:
    group.capacity = msgspec.structs.replace(group.capacity, **changes)


@pytest.mark.parametrize("count", [2, 8, 16])
def test_only_the_request_that_breaks_each_step_ends(root: Path, count: int) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        names = [None, "red", "blue"]
        requests = [request(f"r{i}", [i, 7], 9, names[i % 3]) for i in range(count - 1)]
        requests.insert(count // 2, request("poison", [1, POISON], 5, names[count % 3]))
        answers = await asyncio.gather(*(engine.generate(each, NOWHERE) for each in requests))
        for each, answer in zip(requests, answers, strict=True):
            if each.id != "poison":
                digest = digest_of(engine, each.adapter.id) if each.adapter else ""
                assert tokens(answer) == [continuation(digest, each.sequences[0].prompt, 9)]
                continue
            ending = answer.sequences[0].ending
            assert isinstance(ending, Failed)
            assert ending.kind is ErrorKind.GENERATION
        assert (await engine.snapshot()).isolated == 0
        assert engine.failure is None

    assert play(root, story, limits=LIMITS).starts <= 1 + 2 + ceil(log2(count)) + 1


def test_a_rank_that_is_lost_while_a_plan_is_sent(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank has the plan, the other never gets it."""

    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        links = group._links
        assert links is not None
        send = links.send
        num_steps = 0

        def send_and_lose(command: Command) -> None:
            nonlocal num_steps
            num_steps += isinstance(command, RunStep)
            if num_steps == 5:
                group.kill(1)
            send(command)

        monkeypatch.setattr(links, "send", send_and_lose)
        requests = [request(f"r{i}", [i], 30) for i in range(4)]
        answers = await asyncio.gather(*(engine.generate(each, NOWHERE) for each in requests))
        for i, answer in enumerate(answers):
            assert tokens(answer) == [continuation("", [i], 30)]

    assert play(root, story).starts == 2


def test_ranks_that_are_lost_while_an_adapter_is_sent_or_read(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        links = group._links
        assert links is not None
        send = links.send

        def send_and_lose(command: Command) -> None:
            send(command)
            if isinstance(command, Stage):
                group.kill(0)

        monkeypatch.setattr(links, "send", send_and_lose)
        answer = await engine.generate(request("r", [3], 9, "red"), NOWHERE)
        assert tokens(answer) == [continuation(digest_of(engine, "red"), [3], 9)]

    assert play(root, story).starts == 2


async def lose(engine: DriverEngine, group: FakeGroup) -> None:
    """Lose the ranks and keep the new ones from starting."""
    group.may_start.clear()
    group.kill(0)
    await until_lost(engine)


def test_clients_leave_come_and_load_adapters_during_a_rebuild(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        group.gate.clear()
        names = ("stays", "leaves")
        requests = [request(name, [i], 60, "red") for i, name in enumerate(names)]
        stays, leaves = await together(engine, requests)
        await until_running(engine, 2)
        await lose(engine, group)
        leaves.cancel()
        comes = asyncio.create_task(engine.generate(request("comes", [9], 8, "blue"), NOWHERE))
        reference = AdapterReference(AdapterSource.LOCAL, "a3")
        loads = asyncio.create_task(engine.adapters(LoadAdapter(reference, pin=True)))
        with pytest.raises(asyncio.CancelledError):
            await leaves
        waiting = await until(engine, lambda snapshot: snapshot.queued == 2)
        assert waiting.running == 0
        group.may_start.set()
        assert tokens(await stays) == [continuation(digest_of(engine, "red"), [0], 60)]
        assert tokens(await comes) == [continuation(digest_of(engine, "blue"), [9], 8)]
        assert (await loads).failure is None
        while digest_of(engine, "a3") not in group.runners[0].loaded.values():
            await engine.snapshot()

    assert play(root, story).starts == 2


def test_a_server_that_stops_during_a_rebuild_leaves_no_rank_and_no_client(root: Path) -> None:
    requests: list[asyncio.Task[object]] = []

    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        group.gate.clear()
        open_request = engine.generate(request("r", [4], 60), NOWHERE)
        requests.append(asyncio.create_task(open_request))
        await until_running(engine)
        await lose(engine, group)
        loop = engine._handle.loop
        stopping = asyncio.create_task(engine.stop())
        await until_true(lambda: loop._stopping)
        group.may_start.set()
        await stopping
        completion = await requests[0]
        assert "shutting down" in str(completion)
        assert not loop._thread.is_alive()

    group = play(root, story)
    assert not group._threads, "ranks that came up meanwhile were left behind"


def test_a_server_that_stops_with_dead_ranks_stops_well(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        await engine.generate(request("r", [4], 3), NOWHERE)
        group.kill(0)
        group.kill(1)
        await engine.stop()
        assert engine.failure is None

    play(root, story)


def test_ranks_that_are_lost_again_while_they_catch_up(root: Path) -> None:
    """All running requests are suspected then, and all of them are cleared."""

    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        requests = [request(f"r{i}", [i], 120, "red" if i % 2 else None) for i in range(6)]
        answers = [asyncio.create_task(engine.generate(each, NOWHERE)) for each in requests]
        for loss in range(2):
            while not (all(a.done() for a in answers) or (await engine.snapshot()).running):
                pass
            group.kill(loss % 2)
            await until_rebuilt(engine, loss + 1)
        for i, answer in enumerate(await asyncio.gather(*answers)):
            digest = digest_of(engine, "red") if i % 2 else ""
            assert tokens(answer) == [continuation(digest, [i], 120)]
        assert engine.num_rebuilds == 2

    play(root, story)


def test_ranks_that_come_back_with_less_memory_go_on_with_that(root: Path) -> None:
    """Blocks, pages and slots are counted anew; requests that no longer fit end with a reason."""

    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        group.gate.clear()
        requests = [request(f"r{i}", [i], 20, f"a{i}") for i in range(6)]
        requests.append(request("large", [7] * 20, 60))
        answers = [asyncio.create_task(engine.generate(each, NOWHERE)) for each in requests]
        await until_running(engine)
        small_capacity(group, num_blocks=10, adapter_pages=1, adapter_slots=1, host_bytes=300)
        group.kill(1)
        *fitting, large = await asyncio.gather(*answers)
        for i, answer in enumerate(fitting):
            assert tokens(answer) == [continuation(digest_of(engine, f"a{i}"), [i], 20)]
        ending = large.sequences[0].ending
        assert isinstance(ending, Failed)
        assert ending.kind is ErrorKind.GENERATION
        assert "which holds 40 tokens" in ending.message
        assert (await engine.describe()).max_batch_total_tokens == 40
        assert (await engine.snapshot()).num_blocks == 10
        late = (await engine.generate(request("late", [1], 50), NOWHERE)).sequences[0].ending
        assert isinstance(late, Failed)
        assert late.kind is ErrorKind.VALIDATION

    assert play(root, story).starts == 2


def test_ranks_that_come_back_with_more_memory_use_it(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        await engine.generate(request("first", [4], 3), NOWHERE)
        small_capacity(group, num_blocks=100)
        group.kill(0)
        await until_rebuilt(engine, 1)
        assert (await engine.snapshot()).free_blocks == 100
        answer = await engine.generate(request("r", [4], 30), NOWHERE)
        assert tokens(answer) == [continuation("", [4], 30)]

    assert play(root, story).starts == 2


def test_ranks_of_unequal_memory_count_by_the_least(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        assert (await engine.snapshot()).num_blocks == 64 - 1

    class Unequal(FakeGroup):
        def _report(self, rank: int):  # type: ignore[no-untyped-def]
            report = super()._report(rank)
            capacity = msgspec.structs.replace(report.capacity, num_blocks=64 - rank)
            return msgspec.structs.replace(report, capacity=capacity)

    play(root, story, Unequal())


def test_graphs_that_a_start_has_left_are_recorded_between_the_same_steps(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        await until_true(lambda: not any(runner.num_unrecorded for runner in group.runners))
        requests = [request(f"r{i}", [i], 60, "red") for i in range(4)]
        calls = await together(engine, requests)
        await until_running(engine, 4)
        group.kill(0)
        for i, call in enumerate(calls):
            assert tokens(await call) == [continuation(digest_of(engine, "red"), [i], 60)]
        await until_true(lambda: not any(runner.num_unrecorded for runner in group.runners))
        # The runners' own lists of what they did: sizes of steps, -1 for a recording.
        await until_true(lambda: len({len(each.batch_sizes) for each in group.runners}) == 1)
        first, second = (runner.batch_sizes for runner in group.runners)
        assert first == second
        assert first.count(-1) == 3

    group = FakeGroup(2)
    group.graphs_left = 3
    assert play(root, story, group).starts == 2

"""The engine over fake ranks: adapters that load, wait, fail or are refused."""

import asyncio
from pathlib import Path

import pytest

from configs.wire.adapters import AdapterReference, AdapterSource
from deployments.contract import (
    ErrorKind,
    Failed,
)
from deployments.driver.engine import DriverEngine
from scheduler.adapters.resident import AdapterState
from tests.clocks import Clock
from tests.deployments.driver.fake_ranks import FakeGroup, continuation
from tests.deployments.driver.routing.stories import (
    NOWHERE,
    PATIENCE_S,
    digest_of,
    pass_by,
    play,
    request,
    tokens,
    until,
)

OVERDUE_S = 1.1 * PATIENCE_S


def test_bad_adapters_are_refused_and_disturb_no_other_request(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        good = [engine.generate(request(f"g{i}", [i], 40, "red"), NOWHERE) for i in range(4)]
        bad = [
            engine.generate(request(f"b-{name}", [1], 5, name), NOWHERE)
            for name in ("missing", "../adapters/red/../../..", "broken", "crash")
        ]
        answers = await asyncio.gather(*good, *bad)
        for i, answer in enumerate(answers[:4]):
            assert tokens(answer) == [continuation(digest_of(engine, "red"), [i], 40)]
        endings = [answer.sequences[0].ending for answer in answers[4:]]
        assert all(isinstance(ending, Failed) for ending in endings)
        kinds = [ending.kind for ending in endings if isinstance(ending, Failed)]
        assert kinds == [
            ErrorKind.ADAPTER_NOT_FOUND,
            ErrorKind.ADAPTER_NOT_FOUND,
            ErrorKind.ADAPTER_UNSUPPORTED,
            ErrorKind.ADAPTER_UNAVAILABLE,
        ]

    play(root, story)


def test_adapters_that_cannot_be_read_in_time_fail_and_others_are_served(
    root: Path, clock: Clock
) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        slow = [
            asyncio.create_task(engine.generate(request(f"s{i}", [i], 5, f"slow{i}"), NOWHERE))
            for i in (1, 2)
        ]
        await until(engine, lambda snapshot: snapshot.adapters[AdapterState.STAGING] == 2)
        answer = await engine.generate(request("good", [3], 9, "red"), NOWHERE)
        assert tokens(answer) == [continuation(digest_of(engine, "red"), [3], 9)]
        assert not any(task.done() for task in slow)
        await until(engine, lambda snapshot: not snapshot.plans_in_flight)
        await pass_by(engine, clock, OVERDUE_S)
        for completion in await asyncio.gather(*slow):
            ending = completion.sequences[0].ending
            assert isinstance(ending, Failed)
            assert ending.kind is ErrorKind.ADAPTER_UNAVAILABLE

    assert play(root, story).starts == 1


def test_names_of_equal_content_read_the_files_that_were_verified_last(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        folder = root / "adapters"
        (folder / "blue" / "adapter_config.json").write_bytes(
            (folder / "red" / "adapter_config.json").read_bytes()
        )
        for name in ("red", "blue"):
            await engine.generate(request(name, [1], 2, name), NOWHERE)
        key = engine._directory._references[AdapterReference(AdapterSource.LOCAL, "red")]
        assert key == engine._directory._references[AdapterReference(AdapterSource.LOCAL, "blue")]
        (folder / "red" / "adapter_config.json").write_text('{"name": "new"}')
        await engine.generate(request("again", [1], 2, "blue"), NOWHERE)
        assert engine._directory.fetched(key).folder.endswith("blue")
        await engine.generate(request("other", [1], 2, "red"), NOWHERE)
        assert digest_of(engine, "red") != digest_of(engine, "blue")

    play(root, story)


@pytest.mark.parametrize("name", ["./red", "a" * 300, "red\0", "red/", "../adapters/red"])
def test_odd_names_are_not_found(root: Path, name: str) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        ending = (await engine.generate(request("r", [1], 2, name), NOWHERE)).sequences[0].ending
        assert isinstance(ending, Failed)
        assert ending.kind is ErrorKind.ADAPTER_NOT_FOUND

    play(root, story)


def test_preloaded_adapters_are_there_and_a_bad_one_stops_the_start(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        assert set(group.runners[0].loaded.values()) == {digest_of(engine, "red")}

    adapters = {"local_roots": [str(root / "adapters")], "default_source": "local"}
    play(root, story, adapters={**adapters, "preload": ["red"]})
    with pytest.raises(ValueError, match=r"preload.*broken is not a LoRA"):
        play(root, story, adapters={**adapters, "preload": ["local:broken"]})


def test_rows_use_an_adapter_only_when_every_rank_has_its_bytes(root: Path) -> None:
    """Others are served while they load, and no step waits."""

    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        group.load_gate.clear()
        red = asyncio.create_task(engine.generate(request("red", [3], 9, "red"), NOWHERE))
        await until(engine, lambda snapshot: snapshot.adapters[AdapterState.LOADING] == 1)
        answer = await engine.generate(request("base", [3], 9), NOWHERE)
        assert tokens(answer) == [continuation("", [3], 9)]
        assert (await engine.snapshot()).adapters[AdapterState.LOADING] == 1
        assert not red.done()
        group.load_gate.set()
        assert tokens(await red) == [continuation(digest_of(engine, "red"), [3], 9)]

    assert play(root, story).starts == 1


def test_an_adapter_that_a_rank_has_no_room_for_waits_for_room(root: Path) -> None:
    """As when two are staged at once and one is larger than any so far."""

    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        group.runners[1].full = 2
        requests = [engine.generate(request(n, [3], 9, n), NOWHERE) for n in ("red", "blue")]
        for name, answer in zip(("red", "blue"), await asyncio.gather(*requests), strict=True):
            assert tokens(answer) == [continuation(digest_of(engine, name), [3], 9)]
        assert group.runners[1].full == 0
        for runner in group.runners:
            assert len(runner.staged) == 2

    play(root, story)

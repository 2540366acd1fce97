"""A name moves to new bytes under load: no request waits, and a bad version never serves."""

import asyncio
import json
from pathlib import Path

from configs.runtime import RuntimeConfig
from configs.wire.adapters import AdapterKey, AdapterReference, AdapterSource
from configs.wire.sampling import FinishReason
from deployments.contract import (
    Completion,
    Failed,
    Finished,
    GenerateRequest,
    SequenceOutcome,
    UnloadAdapter,
)
from deployments.driver.adapters.versions import Versions
from deployments.driver.engine import DriverEngine
from scheduler.adapters.resident import AdapterState
from tests.deployments.driver.fake_ranks import FakeGroup, continuation
from tests.deployments.driver.routing.stories import NOWHERE, digest_of, play, request, tokens


def rewrite(root: Path, name: str, content: str) -> None:
    """Replace the file atomically, as a careful operator does."""
    folder = root / "adapters" / name
    (folder / "new").write_text(json.dumps({"name": content}))
    (folder / "new").rename(folder / "adapter_config.json")


async def ask(engine: DriverEngine, name: str, label: str, count: int = 3) -> list[int]:
    return tokens(await engine.generate(request(label, [1], count, name), NOWHERE))[0]


def test_the_old_version_serves_until_the_new_one_is_staged(root: Path) -> None:
    (root / "adapters" / "slow1").rename(root / "adapters" / "slow-red")

    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        group.staging_gate.set()
        await ask(engine, "slow-red", "first")
        old = digest_of(engine, "slow-red")
        group.staging_gate.clear()
        in_flight = asyncio.create_task(ask(engine, "slow-red", "long", 100))
        await ask(engine, "slow-red", "second")
        rewrite(root, "slow-red", "new")
        for index in range(5):
            assert await ask(engine, "slow-red", f"o{index}") == continuation(old, [1], 3)
        assert (new := digest_of(engine, "slow-red")) != old, "it is known, but not staged"
        group.staging_gate.set()
        await engine._adapters.settle()
        assert await ask(engine, "slow-red", "after") == continuation(new, [1], 3)
        assert await in_flight == continuation(old, [1], 100)

    play(root, story)


def test_a_version_that_cannot_be_served_does_not_replace_one_that_is(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        await ask(engine, "red", "first")
        old = digest_of(engine, "red")
        rewrite(root, "red", "damaged")
        await ask(engine, "red", "second")
        await engine._adapters.settle()
        assert await ask(engine, "red", "third") == continuation(old, [1], 3)
        rewrite(root, "red", "mended")
        await ask(engine, "red", "fourth")
        await engine._adapters.settle()
        new = digest_of(engine, "red")
        assert await ask(engine, "red", "fifth") == continuation(new, [1], 3)

    play(root, story)


def test_what_is_not_in_memory_is_replaced_at_once(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        await ask(engine, "red", "first")
        unload = UnloadAdapter(AdapterReference(AdapterSource.LOCAL, "red"))
        assert (await engine.adapters(unload)).failure is None
        while any(runner.staged for runner in group.runners):
            await engine.snapshot()
        rewrite(root, "red", "new")
        answer = await ask(engine, "red", "second")
        assert answer == continuation(digest_of(engine, "red"), [1], 3)

    play(root, story)


def test_a_pin_follows_its_name(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        await engine.reconfigure(RuntimeConfig(pinned_adapters=("red",)))
        await ask(engine, "red", "first")
        rewrite(root, "red", "new")
        await ask(engine, "red", "second")
        await engine._adapters.settle()
        reference = AdapterReference(AdapterSource.LOCAL, "red")
        key = engine._adapters.serving(reference)
        assert key is not None
        assert engine._adapters.pins.is_pinned(key)
        assert engine._directory.fetched(key).digest == digest_of(engine, "red")
        await engine.reconfigure(RuntimeConfig())
        assert not engine._adapters.pins.is_pinned(key)

    play(root, story)


def test_a_first_version_that_is_bad_is_refused_with_its_reason(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        rewrite(root, "red", "damaged")
        ending = (await engine.generate(request("r", [1], 3, "red"), NOWHERE)).sequences[0].ending
        assert isinstance(ending, Failed)
        assert "damaged" in ending.message

    play(root, story)


class Shelf:
    """A directory whose keys are counted while they are held."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}

    def hold(self, key: AdapterKey) -> bool:
        self.held[key] = self.held.get(key, 0) + 1
        return True

    def release(self, key: AdapterKey) -> None:
        self.held[key] -= 1

    def parts(self, key: AdapterKey) -> tuple[AdapterKey, ...]:
        return ()


class Ranks:
    """Ranks that hold everything, and pins; a new version is tested when the gate opens."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.moves: list[tuple[int, int]] = []

    async def run(self, request: GenerateRequest, key: AdapterKey, *_: object) -> Completion:
        await self.gate.wait()
        return Completion([SequenceOutcome([1], Finished(FinishReason.LENGTH))])

    async def ask(self, question: object) -> AdapterState | None:
        return AdapterState.DEVICE

    def move(self, reference: AdapterReference, old: AdapterKey, new: AdapterKey) -> None:
        self.moves.append((old, new))


def test_an_old_version_whose_files_are_gone_gives_way_at_once() -> None:
    red = AdapterReference(AdapterSource.LOCAL, "red")
    old, new = AdapterKey(1), AdapterKey(2)

    async def story() -> None:
        shelf, ranks = Shelf(), Ranks()
        versions = Versions(shelf, ranks, ranks, ranks)  # type: ignore[arg-type]
        for key in (old, new, new):
            shelf.hold(key)
        assert await versions.select(red, old) == old
        assert not versions.give_up(red, old), "there is nothing else to serve"
        assert await versions.select(red, new) == old
        assert versions.give_up(red, old)
        assert await versions.select(red, new) == new
        ranks.gate.set()
        await versions.settle()
        assert ranks.moves == [(old, new)]
        for key in (old, old, new):
            shelf.release(key)
        assert set(shelf.held.values()) == {0}, "every hold was given back"

    asyncio.run(story())

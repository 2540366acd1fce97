"""Pushed versions on one replica: the next request uses them, running ones end on their own."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from configs.adapters import PushConfig
from configs.wire.adapters import AdapterReference, AdapterSource
from deployments.admin_commands import AdminCommands, save
from deployments.contract import (
    AdapterReport,
    ErrorKind,
    Failed,
    NameAdapter,
    PinAdapter,
    PushAdapter,
    PushedContent,
    UnnameAdapter,
)
from deployments.driver.engine import DriverEngine
from scheduler.adapters.resident import AdapterState
from sources.pushed import PushedFiles
from tests.deployments.driver.fake_ranks import FakeGroup, continuation
from tests.deployments.driver.routing.stories import (
    NOWHERE,
    PATIENCE_S,
    healthy,
    play,
    request,
    tokens,
    until,
    until_lost,
    until_running,
    until_true,
)
from tests.deployments.driver.test_admin_commands import MemoryStore

WEIGHTS = (2).to_bytes(8, "little") + b"{}"
POLICY = AdapterReference(AdapterSource.LOCAL, "policy")
TARGET = AdapterReference(AdapterSource.PUSHED, "policy")
LIMIT = 1 << 20


class Trainer:
    """Pushes versions of `policy` to engines, whose node has one folder for all of them."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "pushed"
        self.files = PushedFiles(PushConfig(folder=str(self.folder), max_bytes=LIMIT), LIMIT)
        self.time = 0

    @property
    def settings(self) -> dict[str, object]:
        """What the engine's `adapters` must say."""
        return {
            "local_roots": [str(self.folder.parent / "adapters")],
            "default_source": "local",
            "look_timeout_s": PATIENCE_S,
            "push": {"folder": str(self.folder), "max_bytes": LIMIT},
        }

    def command(self, version: str, inplace: bool = True) -> PushAdapter:
        """A push of this version; this process holds its files."""
        config = json.dumps({"version": version}).encode()
        self.time += 1
        digest = self.files.store_content("policy", config, WEIGHTS)
        return PushAdapter(POLICY, digest, self.time, inplace)

    async def push(self, engine: DriverEngine, version: str, inplace: bool = True) -> str:
        """Push a version as the ingress does; returns its digest."""
        command = self.command(version, inplace)
        report = await engine.adapters(command)
        self.files.release(command.digest, forget=True)
        assert report.failure is None, report.failure
        (status,) = report.adapters
        assert (status.reference, status.target) == (POLICY, TARGET)
        assert status.digest == command.digest
        return command.digest

    def kept(self) -> int:
        """How many versions are in the node's memory."""
        entries = self.folder / "entries"
        return len(list(entries.iterdir())) if entries.exists() else 0


Story = Callable[[DriverEngine, FakeGroup, Trainer], Awaitable[None]]


def play_pushes(root: Path, story: Story) -> None:
    trainer = Trainer(root)

    async def act(engine: DriverEngine, group: FakeGroup) -> None:
        await story(engine, group, trainer)

    play(root, act, adapters=trainer.settings)


async def answer(engine: DriverEngine, adapter: str = "policy", count: int = 5) -> list[int]:
    (found,) = tokens(await engine.generate(request("r", [1], count, adapter), NOWHERE))
    return found


def test_new_requests_use_the_pushed_version_and_running_ones_end_on_theirs(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup, trainer: Trainer) -> None:
        first = await trainer.push(engine, "1", inplace=False)
        assert await answer(engine) == continuation(first, [1], 5)
        group.gate.clear()
        running = asyncio.create_task(engine.generate(request("old", [2], 20, "policy"), NOWHERE))
        await until_running(engine)
        second = await trainer.push(engine, "2")
        new = asyncio.create_task(engine.generate(request("new", [2], 20, "policy"), NOWHERE))
        await until_true(lambda: len(engine._streams) == 2)
        group.gate.set()
        assert tokens(await running) == [continuation(first, [2], 20)]
        assert tokens(await new) == [continuation(second, [2], 20)]
        # The old version leaves the ranks and the node's memory after its last request.
        await until(engine, lambda seen: sum(seen.adapters.values()) == 1)
        await until_true(lambda: trainer.kept() == 1)

    play_pushes(root, story)


def test_ranks_that_start_later_read_the_pushed_files_again(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup, trainer: Trainer) -> None:
        digest = await trainer.push(engine, "1")
        # Else the new ranks may serve before this thread looks.
        group.may_start.clear()
        group.kill(1)
        await until_lost(engine)
        group.may_start.set()
        await healthy(engine)
        assert await answer(engine) == continuation(digest, [1], 5)

    play_pushes(root, story)


def test_a_version_that_cannot_be_served_changes_nothing(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup, trainer: Trainer) -> None:
        first = await trainer.push(engine, "1")
        damaged = trainer.command("damaged")
        report = await engine.adapters(damaged)
        trainer.files.release(damaged.digest, forget=True)
        assert isinstance(report.failure, Failed)
        assert report.failure.kind is ErrorKind.ADAPTER_UNSUPPORTED
        assert await answer(engine) == continuation(first, [1], 5)
        await until_true(lambda: trainer.kept() == 1)

    play_pushes(root, story)


def test_an_older_push_changes_nothing_and_a_taken_name_is_refused(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup, trainer: Trainer) -> None:
        old = trainer.command("old")
        newest = await trainer.push(engine, "new")
        assert (await engine.adapters(old)).failure is None
        assert await answer(engine) == continuation(newest, [1], 5)
        refused = (await engine.adapters(trainer.command("next", inplace=False))).failure
        assert refused is not None
        assert "load_inplace" in refused.message

    play_pushes(root, story)


def test_pins_follow_the_name_and_merges_use_its_version(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup, trainer: Trainer) -> None:
        await trainer.push(engine, "1")
        assert (await engine.adapters(PinAdapter(POLICY))).failure is None
        second = await trainer.push(engine, "2")
        await until(engine, lambda seen: seen.adapters[AdapterState.DEVICE] == 1)
        await until(engine, lambda seen: sum(seen.adapters.values()) == 1)
        await until_true(lambda: second in group.runners[0].loaded.values())

    play_pushes(root, story)


@pytest.mark.parametrize(
    "command",
    [
        UnnameAdapter(POLICY),
        NameAdapter(POLICY, AdapterReference(AdapterSource.LOCAL, "red"), True),
    ],
)
def test_a_name_that_is_taken_away_frees_the_memory(
    root: Path, command: UnnameAdapter | NameAdapter
) -> None:
    async def story(engine: DriverEngine, group: FakeGroup, trainer: Trainer) -> None:
        await trainer.push(engine, "1")
        assert (await engine.adapters(command)).failure is None
        gone = replace(request("r", [1], 5), adapter=TARGET)
        ending = (await engine.generate(gone, NOWHERE)).sequences[0].ending
        assert isinstance(ending, Failed)
        assert ending.kind is ErrorKind.ADAPTER_NOT_FOUND
        await until_true(lambda: trainer.kept() == 0)
        # The name can be pushed again, at once.
        digest = await trainer.push(engine, "2")
        assert await answer(engine) == continuation(digest, [1], 5)

    play_pushes(root, story)


def test_a_node_without_the_files_asks_for_them(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup, trainer: Trainer) -> None:
        command = trainer.command("1")
        config, weights = trainer.files.content(command.digest) or (b"", b"")
        trainer.files.release(command.digest, forget=True)
        report = await engine.adapters(command)
        assert report.lacks_files
        assert report.failure is not None
        whole = replace(command, content=PushedContent(config, weights))
        assert (await engine.adapters(whole)).failure is None
        assert await engine.pushed_content(command.digest) == PushedContent(config, weights)
        assert await answer(engine) == continuation(command.digest, [1], 5)

    play_pushes(root, story)


def test_a_replica_that_starts_later_serves_the_last_push(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup, trainer: Trainer) -> None:
        store, saved = MemoryStore(), AdminCommands(MemoryStore(), engine.adapters)
        saved = AdminCommands(store, engine.adapters)
        commands = [trainer.command("1"), trainer.command("2")]
        for command in commands:
            save(store, command, [AdapterReport("a")])
        assert len(store.entries) == 1
        await saved.follow(pins=False)
        last = commands[-1].digest
        assert await answer(engine) == continuation(last, [1], 5)
        save(store, UnnameAdapter(POLICY), [AdapterReport("a")])
        await saved.follow()
        ending = (await engine.generate(request("r", [1], 5, "policy"), NOWHERE)).sequences[0]
        assert isinstance(ending.ending, Failed)

    play_pushes(root, story)

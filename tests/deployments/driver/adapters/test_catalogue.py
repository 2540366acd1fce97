"""A catalogue is followed: what it offers is served within a look, with its pins and shares."""

import asyncio
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.catalogue import parse_catalogue
from configs.runtime import AdapterShare, RuntimeConfig
from configs.wire.adapters import AdapterReference, AdapterSource
from deployments.contract import ErrorKind, Failed, ListAdapters
from deployments.driver.adapters.catalogue import CatalogueWatcher
from deployments.driver.engine import DriverEngine
from scheduler.adapters.resident import AdapterState
from tests.deployments.driver.fake_ranks import FakeGroup, continuation
from tests.deployments.driver.routing.stories import (
    NOWHERE,
    PATIENCE_S,
    play,
    request,
    tokens,
    until,
)


class Catalogue:
    """A catalogue that a test writes; `look` has the engine read it."""

    def __init__(self, root: Path, engine: DriverEngine, at: Path) -> None:
        self.folder, self.at = root / "offered", at
        self.engine = engine

    def adapter(self, name: str, version: str) -> None:
        """Write an adapter, as a deployment tool does: whole at once."""
        new = self.folder / f".{name}"
        new.mkdir()
        (new / "adapter_config.json").write_text(json.dumps({"version": version}))
        shutil.rmtree(self.folder / name, ignore_errors=True)
        new.rename(self.folder / name)

    def write(self, **adapters: dict[str, Any]) -> None:
        """Write the file with pins and shares."""
        at = self.at / "catalogue.yaml" if self.at.is_dir() else self.at
        at.write_text(yaml.safe_dump({"adapters": adapters}))

    async def look(self) -> None:
        watcher = self.engine._watcher
        assert isinstance(watcher, CatalogueWatcher)
        await watcher.look()
        await self.engine._adapters.settle()

    async def names(self) -> set[str]:
        return {row.id for row in (await self.engine.describe()).adapters}

    async def pinned(self) -> set[str]:
        report = await self.engine.adapters(ListAdapters())
        return {status.reference.id for status in report.adapters if status.pinned}

    async def answer(self, name: str) -> list[int] | ErrorKind:
        """Five tokens of an adapter, or why there are none."""
        completion = await self.engine.generate(request("r", [1], 5, name), NOWHERE)
        ending = completion.sequences[0].ending
        return ending.kind if isinstance(ending, Failed) else tokens(completion)[0]

    def wanted(self, name: str) -> list[int]:
        """The tokens of the version that serves now."""
        reference = AdapterReference(AdapterSource.LOCAL, name)
        key = self.engine._adapters.serving(reference)
        assert key is not None
        return continuation(self.engine._directory.fetched(key).digest, [1], 5)


Story = Callable[[Catalogue], Awaitable[None]]


def follow(root: Path, story: Story, file: bool = False) -> None:
    at = root / "list.yaml" if file else root / "offered"
    (root / "offered").mkdir()
    if file:
        at.write_text("")

    async def act(engine: DriverEngine, group: FakeGroup) -> None:
        await story(Catalogue(root, engine, at))

    adapters = {
        "local_roots": [str(root / "adapters")],
        "default_source": "local",
        "look_timeout_s": PATIENCE_S,
        "catalogue": {"location": str(at), "interval_s": PATIENCE_S},
    }
    play(root, act, adapters=adapters)


def test_settings_that_come_while_the_catalogues_pins_are_fetched_stay(root: Path) -> None:
    async def story(catalogue: Catalogue) -> None:
        engine = catalogue.engine
        catalogue.adapter("sql", "1")
        catalogue.write(sql={"pinned": True})
        resolve, waits, goes_on = engine._adapters.resolve, asyncio.Event(), asyncio.Event()
        tasks: set[asyncio.Task[object] | None] = set()

        async def slow(*args: Any, **named: Any) -> Any:
            found = await resolve(*args, **named)
            task = asyncio.current_task()
            if task in tasks and not waits.is_set():  # In the second look at the pin.
                waits.set()
                await goes_on.wait()
            tasks.add(task)
            return found

        engine._adapters.resolve = slow  # type: ignore[method-assign]
        looking = asyncio.create_task(catalogue.look())
        await waits.wait()
        setting = asyncio.create_task(engine.reconfigure(RuntimeConfig(names={"new": "red"})))
        await asyncio.sleep(0.01)
        goes_on.set()
        await asyncio.gather(looking, setting)
        assert "new" in await catalogue.names()
        assert await catalogue.pinned() == {"sql"}

    follow(root, story)


def test_a_folders_adapters_come_change_and_go(root: Path) -> None:
    async def story(catalogue: Catalogue) -> None:
        assert await catalogue.answer("poet") is ErrorKind.ADAPTER_NOT_FOUND
        catalogue.adapter("poet", "1")
        catalogue.adapter("sql", "1")
        catalogue.write(sql={"pinned": True, "share": {"max_concurrent": 3}})
        shutil.copytree(catalogue.folder / "sql", catalogue.folder / ".half")
        # No request can spell this name, and no reply can list it.
        shutil.copytree(catalogue.folder / "sql", catalogue.folder / os.fsdecode(b"\xff"))
        await catalogue.look()
        assert {"poet", "sql"} <= await catalogue.names()
        assert ".half" not in await catalogue.names()
        assert await catalogue.pinned() == {"sql"}
        first = await catalogue.answer("sql")
        assert first == catalogue.wanted("sql")
        catalogue.adapter("sql", "2")
        await catalogue.look()
        second = await catalogue.answer("sql")
        assert second == catalogue.wanted("sql") != first
        assert await catalogue.pinned() == {"sql"}
        shutil.rmtree(catalogue.folder / "sql")
        await catalogue.look()
        assert await catalogue.pinned() == set()
        assert await catalogue.answer("sql") is ErrorKind.ADAPTER_NOT_FOUND
        # The first version stays in host memory until its room is needed.
        await until(catalogue.engine, lambda seen: sum(seen.adapters.values()) == 1)
        assert "sql" not in await catalogue.names()

    follow(root, story)


def test_a_folder_may_be_a_link_that_moves(root: Path) -> None:
    """As git-sync and ConfigMaps publish folders: a link to the new one replaces the old link."""

    async def story(catalogue: Catalogue) -> None:
        def publish(version: str, *names: str) -> None:
            catalogue.folder = root / version
            catalogue.folder.mkdir()
            for name in names:
                catalogue.adapter(name, version)
            (root / "new").symlink_to(version)
            (root / "new").rename(catalogue.at)

        catalogue.at.rmdir()
        publish("1", "sql", "poet")
        await catalogue.look()
        first = await catalogue.answer("sql")
        publish("2", "sql", "bard")
        shutil.rmtree(root / "1")
        await catalogue.look()
        assert await catalogue.names() >= {"sql", "bard"}
        assert await catalogue.answer("sql") == catalogue.wanted("sql") != first
        assert await catalogue.answer("bard") == catalogue.wanted("bard")
        assert await catalogue.answer("poet") is ErrorKind.ADAPTER_NOT_FOUND

    follow(root, story)


def test_a_file_gives_names_pins_and_shares_beside_the_operators(root: Path) -> None:
    async def story(catalogue: Catalogue) -> None:
        await catalogue.engine.reconfigure(RuntimeConfig(names={"mine": "local:blue"}))
        catalogue.write(poet={"adapter": "local:red", "pinned": True, "share": {"weight": 2.0}})
        await catalogue.look()
        assert {"poet", "mine"} <= await catalogue.names()
        assert await catalogue.answer("poet") == catalogue.wanted("red")
        await until(catalogue.engine, lambda seen: seen.adapters[AdapterState.DEVICE] >= 1)
        await catalogue.engine.reconfigure(RuntimeConfig(pinned_adapters=("a0",)))
        assert {"poet", "red", "a0"} <= await catalogue.pinned(), "the catalogue's pins stay"
        assert "mine" not in await catalogue.names()
        catalogue.write(poet={"adapter": "local:blue"})
        await catalogue.look()
        assert await catalogue.answer("poet") == catalogue.wanted("blue")
        assert await catalogue.pinned() == {"a0"}

    follow(root, story, file=True)


@pytest.mark.parametrize("text", ["adapters: [", "adapters: {x: {pined: true}}", "- 1", "\x00"])
def test_a_damaged_catalogue_changes_nothing(root: Path, text: str) -> None:
    async def story(catalogue: Catalogue) -> None:
        catalogue.write(poet={"adapter": "local:red"})
        await catalogue.look()
        catalogue.at.write_text(text)
        await catalogue.look()
        assert await catalogue.answer("poet") == catalogue.wanted("red")
        catalogue.at.unlink()
        await catalogue.look()
        assert await catalogue.answer("poet") == catalogue.wanted("red")

    follow(root, story, file=True)


def test_a_pin_that_cannot_be_fetched_waits_and_the_others_are_applied(root: Path) -> None:
    async def story(catalogue: Catalogue) -> None:
        catalogue.write(
            later={"adapter": "local:later", "pinned": True},
            poet={"adapter": "local:red", "pinned": True},
        )
        await catalogue.look()
        assert await catalogue.pinned() == {"poet", "red"}
        later = root / "adapters" / "later"
        later.mkdir()
        (later / "adapter_config.json").write_text("{}")
        await catalogue.look()
        assert "later" in await catalogue.pinned()

    follow(root, story, file=True)


def test_entries_have_shares() -> None:
    entries = parse_catalogue("adapters: {sql: {share: {priority: 2}}}")
    assert entries["sql"].share == AdapterShare(priority=2)
    assert parse_catalogue("") == {}

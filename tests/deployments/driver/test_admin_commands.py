"""Names and pins by admin commands reach replicas that start later, until they are removed."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from configs.runtime import RuntimeConfig
from configs.wire.adapters import AdapterReference, AdapterSource
from deployments.admin_commands import AdminCommands, AdminStoreError, save
from deployments.contract import (
    AdapterReport,
    AdapterStatus,
    ErrorKind,
    Failed,
    ListAdapters,
    LoadAdapter,
    NameAdapter,
    PinAdapter,
    UnloadAdapter,
    UnnameAdapter,
    UnpinAdapter,
)
from deployments.driver.engine import DriverEngine
from deployments.engine_commands import EngineCommand
from tests.deployments.driver.fake_ranks import FakeGroup, continuation
from tests.deployments.driver.routing.stories import (
    NOWHERE,
    config,
    digest_of,
    play,
    request,
    tokens,
)


class MemoryStore:
    """A store in memory; `closed`: it can be neither read nor written."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}
        self.closed = False

    def put(self, key: str, entry: bytes) -> None:
        self._open()
        self.entries[key] = entry

    def remove(self, key: str) -> None:
        self._open()
        self.entries.pop(key, None)

    def read(self) -> dict[str, bytes]:
        self._open()
        return dict(self.entries)

    def _open(self) -> None:
        if self.closed:
            raise AdminStoreError("closed")


def local(name: str) -> AdapterReference:
    return AdapterReference(AdapterSource.LOCAL, name)


def name(alias: str, meaning: str, move: bool = False) -> EngineCommand:
    return NameAdapter(local(alias), local(meaning), replace=move)


def unname(alias: str) -> EngineCommand:
    return UnnameAdapter(local(alias))


Replicas = Callable[[DriverEngine, DriverEngine], Awaitable[None]]


def two_replicas(root: Path, story: Replicas) -> None:
    """Run a story on two engines; the second stands for one that starts later."""

    async def outer(first: DriverEngine, _: FakeGroup) -> None:
        second = DriverEngine(config(root), root, FakeGroup())
        await second.start()
        try:
            await story(first, second)
        finally:
            await second.stop()

    play(root, outer)


async def bring(store: MemoryStore, engine: DriverEngine, *commands: EngineCommand) -> None:
    """Run commands on all replicas, here one, and save them, as an ingress does."""
    for each in commands:
        report = await engine.adapters(each)
        assert report.failure is None, report.failure
        save(store, each, [report])


async def meaning(engine: DriverEngine, alias: str) -> AdapterReference | None:
    """The target of a name on this replica."""
    report = await engine.adapters(ListAdapters(local(alias)))
    [status] = report.adapters or [AdapterStatus(local(alias), "absent")]
    return status.target


async def pinned(engine: DriverEngine) -> set[str]:
    report = await engine.adapters(ListAdapters())
    return {status.reference.id for status in report.adapters if status.pinned}


def test_a_later_replica_knows_names_at_once_and_pins_soon(root: Path) -> None:
    async def story(first: DriverEngine, second: DriverEngine) -> None:
        store = MemoryStore()
        by_path = NameAdapter(local("poet"), str(root / "adapters" / "blue"))
        await bring(store, first, name("sql", "red"), by_path, PinAdapter(local("sql")))
        await bring(store, first, LoadAdapter(local("a0"), pin=True))
        saved = AdminCommands(store, second.adapters)
        await saved.follow(pins=False)
        assert await meaning(second, "sql") == local("red")
        assert await meaning(second, "poet") == local("blue")
        assert await pinned(second) == set(), "nothing was fetched"
        answer = await second.generate(request("r", [3], 5, "sql"), NOWHERE)
        assert tokens(answer) == [continuation(digest_of(second, "red"), [3], 5)]
        await saved.follow()
        assert await pinned(second) == {"red", "sql", "a0"}

    two_replicas(root, story)


def test_removed_and_moved_names_and_pins_reach_later_replicas(root: Path) -> None:
    async def story(first: DriverEngine, second: DriverEngine) -> None:
        store = MemoryStore()
        saved = AdminCommands(store, second.adapters)
        await bring(store, first, name("sql", "red"), name("old", "blue"))
        await bring(store, first, PinAdapter(local("a0")), PinAdapter(local("a1")))
        await saved.follow()
        await bring(store, first, name("sql", "blue", move=True), unname("old"))
        await bring(store, first, UnpinAdapter(local("a0")))
        await bring(store, first, UnloadAdapter(local("a1")))
        await saved.follow()
        assert await meaning(second, "sql") == local("blue")
        assert await meaning(second, "old") is None
        assert await pinned(second) == set()
        await bring(store, first, unname("sql"))
        assert store.entries == {}
        await saved.follow()
        assert await meaning(second, "sql") is None

    two_replicas(root, story)


def test_a_replica_does_not_undo_a_command_that_is_about_to_be_saved(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It reads the store after it has done the command and before the command is saved."""

    async def story(engine: DriverEngine, _: FakeGroup) -> None:
        store = MemoryStore()
        saved = AdminCommands(store, engine.adapters)
        await bring(store, engine, name("sql", "red"), PinAdapter(local("red")))
        await saved.follow()
        for change in (name("sql", "blue", move=True), name("new", "red")):
            report = await engine.adapters(change)
            await saved.follow()
            assert await meaning(engine, "sql") == local("blue")
            save(store, change, [report])
            await saved.follow()
        assert await meaning(engine, "new") == local("red")
        for change in (unname("sql"), UnpinAdapter(local("red"))):
            report = await engine.adapters(change)
            await saved.follow()
            save(store, change, [report])
            await saved.follow()
        assert await meaning(engine, "sql") is None
        assert await pinned(engine) == set()
        assert caplog.messages == [], "commands that the replica has done already are not logged"

    play(root, story)


def test_a_moved_name_survives_the_removal_of_its_old_target(root: Path) -> None:
    async def story(engine: DriverEngine, _: FakeGroup) -> None:
        store = MemoryStore()
        saved = AdminCommands(store, engine.adapters)
        await bring(store, engine, name("sql", "red"))
        await saved.follow()
        save(store, unname("sql"), [AdapterReport("another")])
        assert (await engine.adapters(name("sql", "blue", move=True))).failure is None
        await saved.follow()
        assert await meaning(engine, "sql") == local("blue")

    play(root, story)


def test_a_failing_command_is_tried_again_and_logged_once(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = root / "adapters" / "red"

    async def story(engine: DriverEngine, _: FakeGroup) -> None:
        store = MemoryStore()
        await engine.reconfigure(RuntimeConfig(names={"taken": "local:blue"}))
        pin = PinAdapter(local("red"))
        for each in (pin, name("taken", "red")):
            save(store, each, [AdapterReport("another")])
        folder.rename(root / "away")
        saved = AdminCommands(store, engine.adapters)
        for _attempt in range(3):
            await saved.follow()
        assert await pinned(engine) == set()
        assert await meaning(engine, "taken") == local("blue")
        (root / "away").rename(folder)
        await saved.follow()
        assert await pinned(engine) == {"red"}
        said = [message for message in caplog.messages if "the saved command" in message]
        assert len(said) == 2, said

    play(root, story)


def test_an_unreachable_store_changes_nothing(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story(engine: DriverEngine, _: FakeGroup) -> None:
        store = MemoryStore()
        saved = AdminCommands(store, engine.adapters)
        await bring(store, engine, name("sql", "red"))
        await saved.follow()
        store.closed = True
        await saved.follow()
        assert await meaning(engine, "sql") == local("red")
        assert "could not be read" in caplog.text
        with pytest.raises(AdminStoreError):
            save(store, unname("sql"), [AdapterReport("one")])

    play(root, story)


def failed(kind: ErrorKind) -> AdapterReport:
    return AdapterReport("another", failure=Failed(kind, "no"))


def test_only_commands_that_all_replicas_did_are_saved() -> None:
    store, good = MemoryStore(), AdapterReport("one")
    for kind in (ErrorKind.ADAPTER_NOT_FOUND, ErrorKind.ADAPTER_UNAVAILABLE):
        save(store, name("sql", "red"), [good, failed(kind)])
    save(store, LoadAdapter(local("red")), [good])
    save(store, ListAdapters(), [good])
    assert store.entries == {}
    save(store, name("sql", "red"), [good, good])
    save(store, unname("sql"), [good, failed(ErrorKind.VALIDATION)])
    assert len(store.entries) == 1
    save(store, unname("sql"), [good, failed(ErrorKind.ADAPTER_NOT_FOUND)])
    assert store.entries == {}


def test_tokens_are_not_saved() -> None:
    store = MemoryStore()
    load = LoadAdapter(local("red"), pin=True, api_token="hf_secret")
    save(store, load, [AdapterReport("one")])
    assert len(store.entries) == 1
    assert b"hf_secret" not in b"".join(store.entries.values())


def test_unreadable_entries_of_another_version_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    store.entries = {"x": b"\xff", "y": msgspec.msgpack.encode({"action": "fly"})}

    async def run(command: EngineCommand) -> AdapterReport:
        raise AssertionError("no command can be read")

    asyncio.run(AdminCommands(store, run).follow())
    assert caplog.text.count("cannot read") == 2
    assert len(store.entries) == 2


def entry_before_the_union(action: str, target: str, name: str | None = None) -> bytes:
    """A saved command as the first version wrote it: all fields of all commands."""
    return msgspec.msgpack.encode({
        "action": action, "reference": local(target), "pin": False,
        "name": None if name is None else local(name),
        "folder": None, "replace": False, "stage": True, "api_token": None,
    })  # fmt: skip


def test_entries_of_the_first_version_load(root: Path) -> None:
    async def story(engine: DriverEngine, _: FakeGroup) -> None:
        store = MemoryStore()
        save(store, name("sql", "red"), [AdapterReport("one")])
        save(store, PinAdapter(local("blue")), [AdapterReport("one")])
        name_key, pin_key = store.entries
        assert (
            name_key
            == '["name",{"source":"local","id":"sql","revision":null,"parts":[],"rule":null}]'
        )
        store.entries = {
            name_key: entry_before_the_union("name", "red", "sql"),
            pin_key: entry_before_the_union("pin", "blue"),
        }
        saved = AdminCommands(store, engine.adapters)
        await saved.follow()
        assert await meaning(engine, "sql") == local("red")
        assert await pinned(engine) == {"blue"}
        save(store, unname("sql"), [AdapterReport("one")])
        save(store, UnpinAdapter(local("blue")), [AdapterReport("one")])
        assert store.entries == {}
        await saved.follow()
        assert await meaning(engine, "sql") is None
        assert await pinned(engine) == set()

    play(root, story)

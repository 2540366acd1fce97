"""Names and pins that were given by hand reach replicas that start later, and end with a word."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from configs.runtime import RuntimeConfig
from configs.wire.adapters import AdapterReference, AdapterSource
from deployments.admin_commands import AdminCommands, AdminStoreError, save
from deployments.contract import (
    AdapterAction,
    AdapterCommand,
    AdapterReport,
    AdapterStatus,
    ErrorKind,
    Failed,
)
from deployments.driver.engine import DriverEngine
from tests.deployments.driver.fake_ranks import FakeGroup, continuation
from tests.deployments.driver.routing.stories import (
    NOWHERE,
    config,
    digest_of,
    play,
    request,
    tokens,
)


class Book:
    """A ledger in memory; `closed`: it can be neither read nor written."""

    def __init__(self) -> None:
        self.orders: dict[str, bytes] = {}
        self.closed = False

    def put(self, key: str, order: bytes) -> None:
        self._open()
        self.orders[key] = order

    def remove(self, key: str) -> None:
        self._open()
        self.orders.pop(key, None)

    def read(self) -> dict[str, bytes]:
        self._open()
        return dict(self.orders)

    def _open(self) -> None:
        if self.closed:
            raise AdminStoreError("closed")


def local(name: str) -> AdapterReference:
    return AdapterReference(AdapterSource.LOCAL, name)


def name(alias: str, meaning: str, move: bool = False) -> AdapterCommand:
    return AdapterCommand(AdapterAction.NAME, local(meaning), name=local(alias), replace=move)


def unname(alias: str) -> AdapterCommand:
    return AdapterCommand(AdapterAction.UNNAME, name=local(alias))


def command(action: AdapterAction, adapter: str, pin: bool = False) -> AdapterCommand:
    return AdapterCommand(action, local(adapter), pin=pin)


Replicas = Callable[[DriverEngine, DriverEngine], Awaitable[None]]


def two_replicas(root: Path, story: Replicas) -> None:
    """Play on two engines, of which the second may be taken for one that starts later."""

    async def outer(first: DriverEngine, _: FakeGroup) -> None:
        second = DriverEngine(config(root), root, FakeGroup())
        await second.start()
        try:
            await story(first, second)
        finally:
            await second.stop()

    play(root, outer)


async def bring(book: Book, engine: DriverEngine, *commands: AdapterCommand) -> None:
    """As an ingress does: to all replicas that run, here one, and into the ledger."""
    for each in commands:
        report = await engine.adapters(each)
        assert report.failure is None, report.failure
        save(book, each, [report])


async def meaning(engine: DriverEngine, alias: str) -> AdapterReference | None:
    """What a name stands for on this replica."""
    report = await engine.adapters(command(AdapterAction.LIST, alias))
    [status] = report.adapters or [AdapterStatus(local(alias), "absent")]
    return status.target


async def pinned(engine: DriverEngine) -> set[str]:
    report = await engine.adapters(AdapterCommand(AdapterAction.LIST))
    return {status.reference.id for status in report.adapters if status.pinned}


def test_a_later_replica_knows_names_at_once_and_pins_soon(root: Path) -> None:
    async def story(first: DriverEngine, second: DriverEngine) -> None:
        book = Book()
        by_path = AdapterCommand(
            AdapterAction.NAME, name=local("poet"), folder=str(root / "adapters" / "blue")
        )
        await bring(book, first, name("sql", "red"), by_path, command(AdapterAction.PIN, "sql"))
        await bring(book, first, command(AdapterAction.LOAD, "a0", pin=True))
        orders = AdminCommands(book, second.adapters)
        await orders.follow(pins=False)
        assert await meaning(second, "sql") == local("red")
        assert await meaning(second, "poet") == local("blue")
        assert await pinned(second) == set(), "nothing was fetched"
        answer = await second.generate(request("r", [3], 5, "sql"), NOWHERE)
        assert tokens(answer) == [continuation(digest_of(second, "red"), [3], 5)]
        await orders.follow()
        assert await pinned(second) == {"red", "sql", "a0"}

    two_replicas(root, story)


def test_what_is_taken_back_or_moved_is_so_on_later_replicas_too(root: Path) -> None:
    async def story(first: DriverEngine, second: DriverEngine) -> None:
        book = Book()
        orders = AdminCommands(book, second.adapters)
        await bring(book, first, name("sql", "red"), name("old", "blue"))
        await bring(book, first, command(AdapterAction.PIN, "a0"), command(AdapterAction.PIN, "a1"))
        await orders.follow()
        await bring(book, first, name("sql", "blue", move=True), unname("old"))
        await bring(book, first, command(AdapterAction.UNPIN, "a0"))
        await bring(book, first, command(AdapterAction.UNLOAD, "a1"))
        await orders.follow()
        assert await meaning(second, "sql") == local("blue")
        assert await meaning(second, "old") is None
        assert await pinned(second) == set()
        await bring(book, first, unname("sql"))
        assert book.orders == {}
        await orders.follow()
        assert await meaning(second, "sql") is None

    two_replicas(root, story)


def test_a_replica_does_not_undo_what_is_about_to_be_written_down(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It looks into the ledger between a command's arrival and its being noted."""

    async def story(engine: DriverEngine, _: FakeGroup) -> None:
        book = Book()
        orders = AdminCommands(book, engine.adapters)
        await bring(book, engine, name("sql", "red"), command(AdapterAction.PIN, "red"))
        await orders.follow()
        for change in (name("sql", "blue", move=True), name("new", "red")):
            report = await engine.adapters(change)
            await orders.follow()
            assert await meaning(engine, "sql") == local("blue")
            save(book, change, [report])
            await orders.follow()
        assert await meaning(engine, "new") == local("red")
        for change in (unname("sql"), command(AdapterAction.UNPIN, "red")):
            report = await engine.adapters(change)
            await orders.follow()
            save(book, change, [report])
            await orders.follow()
        assert await meaning(engine, "sql") is None
        assert await pinned(engine) == set()
        assert caplog.messages == [], "what a replica has done already is nothing to talk about"

    play(root, story)


def test_a_name_that_moved_on_is_not_taken_away_with_its_old_meaning(root: Path) -> None:
    async def story(engine: DriverEngine, _: FakeGroup) -> None:
        book = Book()
        orders = AdminCommands(book, engine.adapters)
        await bring(book, engine, name("sql", "red"))
        await orders.follow()
        save(book, unname("sql"), [AdapterReport("another")])
        assert (await engine.adapters(name("sql", "blue", move=True))).failure is None
        await orders.follow()
        assert await meaning(engine, "sql") == local("blue")

    play(root, story)


def test_what_cannot_be_done_is_tried_again_and_told_once(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = root / "adapters" / "red"

    async def story(engine: DriverEngine, _: FakeGroup) -> None:
        book = Book()
        await engine.reconfigure(RuntimeConfig(names={"taken": "local:blue"}))
        pin = AdapterCommand(AdapterAction.PIN, local("red"))
        for order in (pin, name("taken", "red")):
            save(book, order, [AdapterReport("another")])
        folder.rename(root / "away")
        orders = AdminCommands(book, engine.adapters)
        for _attempt in range(3):
            await orders.follow()
        assert await pinned(engine) == set()
        assert await meaning(engine, "taken") == local("blue")
        (root / "away").rename(folder)
        await orders.follow()
        assert await pinned(engine) == {"red"}
        said = [message for message in caplog.messages if "the saved command" in message]
        assert len(said) == 2, said

    play(root, story)


def test_a_ledger_that_does_not_answer_changes_nothing(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(engine: DriverEngine, _: FakeGroup) -> None:
        book = Book()
        orders = AdminCommands(book, engine.adapters)
        await bring(book, engine, name("sql", "red"))
        await orders.follow()
        book.closed = True
        await orders.follow()
        assert await meaning(engine, "sql") == local("red")
        assert "could not be read" in caplog.text
        with pytest.raises(AdminStoreError):
            save(book, unname("sql"), [AdapterReport("one")])

    play(root, story)


def failed(kind: ErrorKind) -> AdapterReport:
    return AdapterReport("another", failure=Failed(kind, "no"))


def test_only_what_all_replicas_did_is_written_down() -> None:
    book, good = Book(), AdapterReport("one")
    for kind in (ErrorKind.ADAPTER_NOT_FOUND, ErrorKind.ADAPTER_UNAVAILABLE):
        save(book, name("sql", "red"), [good, failed(kind)])
    save(book, command(AdapterAction.LOAD, "red"), [good])
    save(book, AdapterCommand(AdapterAction.LIST), [good])
    assert book.orders == {}
    save(book, name("sql", "red"), [good, good])
    save(book, unname("sql"), [good, failed(ErrorKind.VALIDATION)])
    assert len(book.orders) == 1
    save(book, unname("sql"), [good, failed(ErrorKind.ADAPTER_NOT_FOUND)])
    assert book.orders == {}


def test_no_token_is_written_down() -> None:
    book = Book()
    load = AdapterCommand(AdapterAction.LOAD, local("red"), pin=True, api_token="hf_secret")
    save(book, load, [AdapterReport("one")])
    assert len(book.orders) == 1
    assert b"hf_secret" not in b"".join(book.orders.values())


def test_orders_of_another_version_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    book = Book()
    book.orders = {"x": b"\xff", "y": msgspec.msgpack.encode({"action": "fly"})}

    async def run(command: AdapterCommand) -> AdapterReport:
        raise AssertionError("there is nothing to do")

    asyncio.run(AdminCommands(book, run).follow())
    assert caplog.text.count("cannot read") == 2
    assert len(book.orders) == 2

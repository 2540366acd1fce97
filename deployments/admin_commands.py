"""Standing orders: names and pins that operators gave by a route, for replicas that start later.

Whoever brought a command to all replicas writes what lasts of it into a ledger that outlives them
(`save`). A replica that starts does what stands there, and looks into it again from time to time
(`AdminCommands`): for what came before it could be reached, and for what was taken back meanwhile.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import msgspec
from msgspec.structs import replace

from configs.wire.adapters import AdapterReference
from deployments.contract import AdapterAction, AdapterCommand, AdapterReport, ErrorKind

_BACK = {AdapterAction.NAME: AdapterAction.UNNAME, AdapterAction.PIN: AdapterAction.UNPIN}

Run = Callable[[AdapterCommand], Awaitable[AdapterReport]]
"""Does a command on this replica."""

logger = logging.getLogger("loray.orders")


class AdminStoreError(Exception):
    """The ledger could not be read or written; the message is for people."""


class AdminStore(Protocol):
    """Orders by key, the same for all processes; blocks, raises AdminStoreError."""

    def put(self, key: str, order: bytes) -> None:
        """Write an order, over an older one of that key."""
        ...

    def remove(self, key: str) -> None:
        """Take an order out, if it is there."""
        ...

    def read(self) -> Mapping[str, bytes]:
        """All orders."""
        ...


def save(ledger: AdminStore, command: AdapterCommand, reports: Sequence[AdapterReport]) -> None:
    """Write down what lasts of a command that replicas did; AdminStoreError if that fails.

    A name or a pin that one of them refused is not written down; one that is taken back is taken
    out although some did not know of it.
    """
    failures = {report.failure.kind for report in reports if report.failure is not None}
    if failures - {ErrorKind.ADAPTER_NOT_FOUND}:
        return
    meant = _meant(command, reports)
    if command.action in (AdapterAction.UNNAME, AdapterAction.UNPIN, AdapterAction.UNLOAD):
        kind = AdapterAction.NAME if command.name is not None else AdapterAction.PIN
        ledger.remove(_key(kind, command.name or meant))
    elif failures:
        return
    elif command.action is AdapterAction.NAME:
        order = AdapterCommand(AdapterAction.NAME, meant, name=command.name)
        ledger.put(_key(AdapterAction.NAME, command.name), msgspec.msgpack.encode(order))
    elif command.action is AdapterAction.PIN or command.pin:
        order = AdapterCommand(AdapterAction.PIN, meant)
        ledger.put(_key(AdapterAction.PIN, meant), msgspec.msgpack.encode(order))


class AdminCommands:
    """What one replica has done of the ledger; lives on its event loop.

    It acts on what changed there since it looked last, so that a command which has reached the
    replica, and is about to be written down, is not undone.
    """

    def __init__(self, ledger: AdminStore, run: Run) -> None:
        """Nothing is done yet."""
        self._store = ledger
        self._run = run
        self._applied: dict[str, AdapterCommand] = {}
        self._failing: set[str] = set()

    async def follow(self, pins: bool = True) -> None:
        """Do what is new, take back what is gone; what cannot be done is tried again next time.

        pins: without them nothing is fetched, so that it takes no time.
        """
        try:
            told = _decoded(await asyncio.to_thread(self._store.read))
        except AdminStoreError as fault:
            logger.warning("names and pins given by hand could not be read: %s", fault)
            return
        for key in self._applied.keys() - told.keys():
            order = self._applied.pop(key)
            await self._run(replace(order, action=_BACK[order.action]))
        self._failing &= told.keys()
        new = {key: order for key, order in told.items() if self._applied.get(key) != order}
        for key, order in new.items():
            if order.action is AdapterAction.NAME:
                moves = key in self._applied
                await self._do(key, replace(order, replace=moves, stage=False))
                self._applied[key] = order
        if pins:
            wanted = [key for key, order in new.items() if order.action is AdapterAction.PIN]
            done = await asyncio.gather(*(self._do(key, new[key]) for key in wanted))
            self._applied |= {key: new[key] for key, good in zip(wanted, done, strict=True) if good}

    async def _do(self, key: str, order: AdapterCommand) -> bool:
        """Whether it could be done; the first failure in a row is logged."""
        failure = (await self._run(order)).failure
        if failure is None:
            self._failing.discard(key)
            return True
        if key not in self._failing:
            self._failing.add(key)
            what = order.name or order.reference
            assert what is not None, order
            logger.warning("%s %s, as ordered by hand: %s", order.action, what.id, failure.message)
        return False


def _meant(command: AdapterCommand, reports: Sequence[AdapterReport]) -> AdapterReference | None:
    """The adapter itself, where the command went by a name that stands for it or by a folder."""
    for report in reports:
        for status in report.adapters:
            return status.target or status.reference
    return command.reference


def _key(kind: AdapterAction, reference: AdapterReference | None) -> str:
    assert reference is not None, kind
    return msgspec.json.encode((kind.value, reference)).decode()


def _decoded(told: Mapping[str, bytes]) -> dict[str, AdapterCommand]:
    """The orders that can be read; those of another version of the server are left out."""
    orders = {}
    for key, order in told.items():
        try:
            orders[key] = msgspec.msgpack.decode(order, type=AdapterCommand)
        except msgspec.DecodeError:
            logger.warning("an order that this version cannot read: %s", key)
    return {key: order for key, order in orders.items() if order.action in _BACK}

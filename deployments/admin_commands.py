"""Persisted admin commands: operators' names and pins, for replicas that start later.

When all replicas have executed a command, the ingress saves its lasting part in a store (`save`).
A replica executes the saved commands at start, and reads the store again every few seconds
(`AdminCommands`), for commands that did not reach it and for removed ones.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import msgspec
from msgspec.structs import replace

from configs.wire.adapters import AdapterReference
from deployments.contract import (
    AdapterReport,
    ErrorKind,
    LoadAdapter,
    NameAdapter,
    PinAdapter,
    PushAdapter,
    UnloadAdapter,
    UnnameAdapter,
    UnpinAdapter,
)
from deployments.engine_commands import EngineCommand, SleepEngine, WakeEngine

SavedCommand = NameAdapter | PinAdapter | PushAdapter | SleepEngine
"""What is saved. Fields may be added with defaults: entries of older versions must load."""

Run = Callable[[EngineCommand], Awaitable[AdapterReport]]
"""Executes a command on this replica."""

_SLEEP = "sleep"

logger = logging.getLogger("loray.admin_commands")


class AdminStoreError(Exception):
    """The store could not be read or written; the message is for operators."""


class AdminStore(Protocol):
    """Entries by key, shared by all processes; calls block and may raise AdminStoreError."""

    def put(self, key: str, value: bytes) -> None:
        """Write or replace the entry of a key."""
        ...

    def remove(self, key: str) -> None:
        """Delete an entry, if it exists."""
        ...

    def read(self) -> Mapping[str, bytes]:
        """All entries."""
        ...


def save(store: AdminStore, command: EngineCommand, reports: Sequence[AdapterReport]) -> None:
    """Save the lasting part of an executed command; AdminStoreError if that fails.

    A name or a pin that a replica refused is not saved. A removed one is deleted even if some
    replicas did not know it.
    """
    failures = {report.failure.kind for report in reports if report.failure is not None}
    if failures - {ErrorKind.ADAPTER_NOT_FOUND}:
        return
    resolved = _resolved(reports)
    match command:
        case UnnameAdapter(name):
            store.remove(_key("name", name))
        case UnpinAdapter(reference) | UnloadAdapter(reference):
            store.remove(_key("pin", resolved or reference))
        case WakeEngine():
            store.remove(_SLEEP)
        case _ if failures:
            return
        case SleepEngine():
            store.put(_SLEEP, msgspec.msgpack.encode(command))
        case NameAdapter(name, target):
            lasting = NameAdapter(name, resolved or target)
            store.put(_key("name", name), msgspec.msgpack.encode(lasting))
        case PushAdapter(name):
            push = replace(command, content=None, replace=True)
            store.put(_key("name", name), msgspec.msgpack.encode(push))
        case PinAdapter(reference) | LoadAdapter(reference, pin=True):
            pin = PinAdapter(resolved or reference)
            store.put(_key("pin", pin.reference), msgspec.msgpack.encode(pin))


class AdminCommands:
    """Executes saved commands on one replica; lives on its event loop.

    It executes only the changes of the store since the last read: a command that has reached the
    replica but is not saved yet must not be undone.
    """

    def __init__(self, store: AdminStore, run: Run) -> None:
        self._store = store
        self._run = run
        self._applied: dict[str, SavedCommand] = {}
        self._failing: set[str] = set()

    async def follow(self, pins: bool = True) -> None:
        """Execute new commands and undo removed ones; the next call retries failed ones.

        pins: False leaves pins out, so that nothing is fetched.
        """
        try:
            saved = _decoded(await asyncio.to_thread(self._store.read))
        except AdminStoreError as fault:
            logger.warning("persisted admin commands could not be read: %s", fault)
            return
        for key in self._applied.keys() - saved.keys():
            await self._run(_inverse(self._applied.pop(key)))
        self._failing &= saved.keys()
        new = {key: command for key, command in saved.items() if self._applied.get(key) != command}
        for key, command in new.items():
            if isinstance(command, NameAdapter):
                moves = key in self._applied
                await self._execute(key, replace(command, replace=moves, stage=False))
                self._applied[key] = command
            elif not isinstance(command, PinAdapter) and await self._execute(key, command):
                self._applied[key] = command
        if pins:
            wanted = [key for key, command in new.items() if isinstance(command, PinAdapter)]
            done = await asyncio.gather(*(self._execute(key, new[key]) for key in wanted))
            self._applied |= {key: new[key] for key, ok in zip(wanted, done, strict=True) if ok}

    async def _execute(self, key: str, command: SavedCommand) -> bool:
        """Whether the command succeeded; the first of several failures is logged."""
        failure = (await self._run(command)).failure
        if failure is None:
            self._failing.discard(key)
            return True
        if key not in self._failing:
            self._failing.add(key)
            logger.warning("the saved command %s failed: %s", _shown(command), failure.message)
        return False


def _inverse(command: SavedCommand) -> EngineCommand:
    if isinstance(command, NameAdapter):
        return UnnameAdapter(command.name, command.target)
    if isinstance(command, PushAdapter):
        return UnnameAdapter(command.name, command.target)
    if isinstance(command, SleepEngine):
        return WakeEngine(command.sent_at)
    return UnpinAdapter(command.reference)


def _shown(command: SavedCommand) -> str:
    if isinstance(command, PushAdapter):
        return f"push {command.name.id}"
    if isinstance(command, NameAdapter):
        return f"name {command.name.id}"
    if isinstance(command, SleepEngine):
        return "sleep"
    return f"pin {command.reference.id}"


def _resolved(reports: Sequence[AdapterReport]) -> AdapterReference | None:
    """The adapter that an alias or a folder resolved to; None if no replica reported it."""
    for report in reports:
        for status in report.adapters:
            return status.target or status.reference
    return None


def _key(kind: str, reference: AdapterReference) -> str:
    return msgspec.json.encode((kind, reference)).decode()


def _decoded(entries: Mapping[str, bytes]) -> dict[str, SavedCommand]:
    """The commands that can be decoded; those of another version of the server are left out."""
    commands = {}
    for key, entry in entries.items():
        try:
            commands[key] = msgspec.msgpack.decode(entry, type=SavedCommand)
        except msgspec.DecodeError:
            logger.warning("an admin command that this version cannot read: %s", key)
    return commands

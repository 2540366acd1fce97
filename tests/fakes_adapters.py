"""Two driver replicas' adapters, as an operator's commands change them."""

from dataclasses import dataclass, field

from configs.wire.adapters import AdapterReference, AdapterSource
from deployments.contract import (
    AdapterReport,
    AdapterStatus,
    AdapterTier,
    ErrorKind,
    Failed,
    ListAdapters,
    LoadAdapter,
    NameAdapter,
    PinAdapter,
    PushAdapter,
    UnloadAdapter,
    UnnameAdapter,
    UnpinAdapter,
)
from deployments.engine_commands import EngineCommand, SleepEngine, WakeEngine


@dataclass
class Replica:
    """One driver: what it knows, and what keeps it from loading anything; far: on another node."""

    name: str
    known: dict[AdapterReference, AdapterStatus] = field(default_factory=dict)
    broken: Failed | None = None
    far: bool = False

    def run(self, command: EngineCommand) -> AdapterReport:
        """Do it, or say why not."""
        if isinstance(command, LoadAdapter):
            return self._load(command)
        if isinstance(command, NameAdapter):
            return self._call(command)
        if isinstance(command, PushAdapter):
            return self._push(command)
        if isinstance(command, SleepEngine | WakeEngine):
            return AdapterReport(self.name, failure=self.broken)
        reference = command.name if isinstance(command, UnnameAdapter) else command.reference
        if reference is None:
            return AdapterReport(self.name, list(self.known.values()))
        status = self.known.get(reference)
        if status is None:
            return self._fail(ErrorKind.ADAPTER_NOT_FOUND, f"no adapter {reference.id!r} here")
        match command:
            case UnnameAdapter():
                del self.known[reference]
                return AdapterReport(self.name)
            case UnloadAdapter():
                status = self.known[reference] = AdapterStatus(reference, "disk")
            case PinAdapter() | UnpinAdapter():
                pinned = isinstance(command, PinAdapter)
                status = self.known[reference] = AdapterStatus(reference, "device", pinned=pinned)
            case ListAdapters():
                pass
        return AdapterReport(self.name, [status])

    def _load(self, command: LoadAdapter) -> AdapterReport:
        if self.broken is not None:
            return AdapterReport(self.name, failure=self.broken)
        state: AdapterTier = "device" if command.pin else "host"
        status = AdapterStatus(
            command.reference, state, None, "d1", 16, 900, 800, 4 * command.pin, command.pin
        )
        self.known[command.reference] = status
        return AdapterReport(self.name, [status])

    def _call(self, command: NameAdapter) -> AdapterReport:
        if command.name in self.known and not command.replace:
            return self._fail(ErrorKind.VALIDATION, f"{command.name.id!r} is taken")
        target = command.target
        if isinstance(target, str):
            if not target.startswith("/roots/"):
                return self._fail(ErrorKind.ADAPTER_NOT_FOUND, "not under the roots")
            target = AdapterReference(AdapterSource.LOCAL, target.removeprefix("/roots/"))
        status = self.known[command.name] = AdapterStatus(command.name, "host", target)
        return AdapterReport(self.name, [status])

    def _push(self, command: PushAdapter) -> AdapterReport:
        if self.broken is not None:
            return AdapterReport(self.name, failure=self.broken)
        if self.far and command.content is None:
            failed = Failed(ErrorKind.ADAPTER_UNAVAILABLE, "no files")
            return AdapterReport(self.name, failure=failed, lacks_files=True)
        if command.name in self.known and not command.replace:
            return self._fail(ErrorKind.VALIDATION, f"{command.name.id!r} is taken")
        status = AdapterStatus(command.name, "host", command.target, command.digest)
        self.known[command.name] = status
        return AdapterReport(self.name, [status])

    def _fail(self, kind: ErrorKind, message: str) -> AdapterReport:
        return AdapterReport(self.name, failure=Failed(kind, message))


@dataclass
class Replicas:
    """All of them; `asked` keeps the commands."""

    members: list[Replica] = field(default_factory=lambda: [Replica("a1"), Replica("b2")])
    commands: list[EngineCommand] = field(default_factory=list)

    def run(self, command: EngineCommand) -> list[AdapterReport]:
        """One report from each."""
        self.commands.append(command)
        return [replica.run(command) for replica in self.members]

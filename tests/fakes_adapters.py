"""Two driver replicas' adapters, as an operator's commands change them."""

from dataclasses import dataclass, field

from configs.wire.adapters import AdapterReference, AdapterSource
from deployments.contract import (
    AdapterAction,
    AdapterCommand,
    AdapterReport,
    AdapterStatus,
    AdapterTier,
    ErrorKind,
    Failed,
)


@dataclass
class Replica:
    """One driver: what it knows, and what keeps it from loading anything."""

    name: str
    known: dict[AdapterReference, AdapterStatus] = field(default_factory=dict)
    broken: Failed | None = None

    def run(self, command: AdapterCommand) -> AdapterReport:
        """Do it, or say why not."""
        if command.action is AdapterAction.LIST and command.reference is None:
            return AdapterReport(self.name, list(self.known.values()))
        if command.action is AdapterAction.LOAD:
            return self._load(command)
        if command.action is AdapterAction.NAME:
            return self._call(command)
        reference = command.reference or command.name
        assert reference is not None
        status = self.known.get(reference)
        if status is None:
            return self._fail(ErrorKind.ADAPTER_NOT_FOUND, f"no adapter {reference.id!r} here")
        if command.action is AdapterAction.UNNAME:
            del self.known[reference]
            return AdapterReport(self.name)
        if command.action is AdapterAction.UNLOAD:
            status = self.known[reference] = AdapterStatus(reference, "disk")
        elif command.action in (AdapterAction.PIN, AdapterAction.UNPIN):
            pinned = command.action is AdapterAction.PIN
            status = self.known[reference] = AdapterStatus(reference, "device", pinned=pinned)
        return AdapterReport(self.name, [status])

    def _load(self, command: AdapterCommand) -> AdapterReport:
        if self.broken is not None:
            return AdapterReport(self.name, failure=self.broken)
        assert command.reference is not None
        state: AdapterTier = "device" if command.pin else "host"
        status = AdapterStatus(
            command.reference, state, None, "d1", 16, 900, 800, 4 * command.pin, command.pin
        )
        self.known[command.reference] = status
        return AdapterReport(self.name, [status])

    def _call(self, command: AdapterCommand) -> AdapterReport:
        assert command.name is not None
        if command.name in self.known and not command.replace:
            return self._fail(ErrorKind.VALIDATION, f"{command.name.id!r} is taken")
        target = command.reference
        if command.folder is not None:
            if not command.folder.startswith("/roots/"):
                return self._fail(ErrorKind.ADAPTER_NOT_FOUND, "not under the roots")
            target = AdapterReference(AdapterSource.LOCAL, command.folder.removeprefix("/roots/"))
        status = self.known[command.name] = AdapterStatus(command.name, "host", target)
        return AdapterReport(self.name, [status])

    def _fail(self, kind: ErrorKind, message: str) -> AdapterReport:
        return AdapterReport(self.name, failure=Failed(kind, message))


@dataclass
class Replicas:
    """All of them; `asked` keeps the commands."""

    members: list[Replica] = field(default_factory=lambda: [Replica("a1"), Replica("b2")])
    asked: list[AdapterCommand] = field(default_factory=list)

    def run(self, command: AdapterCommand) -> list[AdapterReport]:
        """One report from each."""
        self.asked.append(command)
        return [replica.run(command) for replica in self.members]

"""Admin commands about one driver's adapters; on the replica's event loop."""

import contextlib
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from configs.reading import read_object
from configs.wire.adapters import (
    AdapterError,
    AdapterKey,
    AdapterReference,
    AdapterRefusal,
    AdapterSource,
    FetchedAdapter,
)
from deployments.contract import (
    AdapterCommand,
    AdapterReport,
    AdapterStatus,
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
from deployments.driver.adapters.aliases import Aliases
from deployments.driver.adapters.lifecycle import EngineAdapters
from deployments.driver.adapters.pushes import LacksFiles, PushedVersions
from deployments.driver.adapters.staging import AdapterStaging
from deployments.driver.description import TIERS
from deployments.driver.loop_handle import LoopHandle
from deployments.driver.usage import AdapterUsage
from scheduler.events import AdapterUnloaded
from scheduler.scheduler import Scheduler
from scheduler.snapshot import AdapterView
from sources.base import CONFIG_NAME, MAX_CONFIG_BYTES

_MAX_RANKS = 10_000


class _CommandRefused(Exception):
    """A command cannot be executed; the message is for the operator."""


class AdapterControl:
    """Names, loads, pins and unloads adapters, and reports where they are.

    The effects last as long as the replica; `admin_commands.py` persists names and pins.
    """

    def __init__(
        self,
        aliases: Aliases,
        adapters: EngineAdapters,
        usage: AdapterUsage,
        handle: LoopHandle,
        staging: AdapterStaging,
        pushes: PushedVersions,
    ) -> None:
        self._aliases = aliases
        self._adapters = adapters
        self._directory = adapters.directory
        self._pins = adapters.pins
        self._usage = usage
        self._handle = handle
        self._staging = staging
        self._pushes = pushes
        self._ranks: dict[str, int | None] = {}

    def configure(self, names: dict[str, str]) -> None:
        """Replace the aliases of the config; ValueError for a name that cannot be parsed."""
        read = self._adapters.read
        self._aliases.configured = {read(name): read(target) for name, target in names.items()}

    async def run(self, command: AdapterCommand) -> AdapterReport:
        """Execute a command; a failure is in the report."""
        try:
            reference = await self._execute(command)
            return AdapterReport("", await self._statuses(reference))
        except AdapterError as error:
            failure = Failed(ErrorKind(error.refusal.value), error.message)
        except LacksFiles:
            failure = Failed(ErrorKind.ADAPTER_UNAVAILABLE, "the pushed files are gone: push again")
            return AdapterReport("", failure=failure, lacks_files=True)
        except _CommandRefused as error:
            failure = Failed(ErrorKind.VALIDATION, str(error))
        return AdapterReport("", failure=failure)

    async def _execute(self, command: AdapterCommand) -> AdapterReference | None:
        """Execute a command; returns the name that it is about, None for all."""
        match command:
            case ListAdapters(reference):
                return reference
            case NameAdapter():
                return await self._name(command)
            case PushAdapter():
                return await self._push(command)
            case UnnameAdapter(name, expected):
                return self._unname(name, expected)
        target = self._aliases.resolve(command.reference)
        match command:
            case LoadAdapter(pin=pin, api_token=token):
                await self._load(target, token)
                if pin:
                    await self._adapters.pin_name(target, token or True)
            case PinAdapter():
                await self._adapters.pin_name(target, True)
            case UnpinAdapter():
                self._known(target)
                self._pins.remove(target)
            case UnloadAdapter():
                self._unload(target)
        return command.reference

    async def _load(self, reference: AdapterReference, api_token: str | None = None) -> None:
        """Fetch the adapter and have it staged; AdapterError if that fails."""
        key = await self._adapters.resolve(reference, api_token or True)
        try:
            await self._staging.stage(key)
        finally:
            self._adapters.release(key)

    def _unload(self, reference: AdapterReference) -> None:
        """Have the adapter's bytes dropped when its present requests have ended."""
        key = self._known(reference)
        if self._pins.is_configured(reference):
            raise _CommandRefused(
                f"{reference.id!r} is pinned by the server's user_config: unpin it there"
            )
        self._pins.remove(reference)
        if self._pins.is_pinned(key):
            raise _CommandRefused(f"{reference.id!r} is pinned by another name of the same content")
        self._handle.post(
            lambda scheduler, now: scheduler.handle_adapter_event(AdapterUnloaded(key))
        )

    async def _name(self, command: NameAdapter) -> AdapterReference:
        """Give an adapter an alias, once it is staged."""
        name, target = command.name, command.target
        self._check_configured(name)
        if isinstance(target, str):
            target = await self._reference_of_folder(target)
        before = None if command.replace else self._aliases.given.get(name)
        if before is not None and (command.stage or before != target):
            raise _taken(name)
        if command.stage:
            await self._load(target)
        self._give(name, target)
        return name

    async def _push(self, command: PushAdapter) -> AdapterReference:
        """Serve pushed files under a name."""
        name = command.name
        self._check_configured(name)
        if name in self._aliases.given and not command.replace:
            raise _taken(name)
        await self._pushes.push(command)
        self._give(name, command.target)
        return name

    def _check_configured(self, name: AdapterReference) -> None:
        if name in self._aliases.configured:
            raise _CommandRefused(
                f"{name.id!r} is named by the server's user_config: change it there"
            )

    def _give(self, name: AdapterReference, target: AdapterReference) -> None:
        """Give a name to an adapter; a pushed one that had it is forgotten."""
        before = self._aliases.given.get(name)
        self._aliases.given[name] = target
        if before is not None and before != target:
            self._pushes.forget(before)

    async def _reference_of_folder(self, folder: str) -> AdapterReference:
        reference = await self._directory.lookups.local_reference(folder)
        if reference is None:
            raise AdapterError(
                AdapterRefusal.NOT_FOUND,
                f"{folder!r} does not lie under the server's local adapter roots "
                "(adapters.local_roots)",
            )
        return reference

    def _unname(
        self, name: AdapterReference, expected: AdapterReference | str | None
    ) -> AdapterReference:
        target = self._aliases.given.get(name)
        if target is None or expected not in (None, target):
            raise AdapterError(
                AdapterRefusal.NOT_FOUND, f"the lora adapter {name.id!r} is not loaded"
            )
        del self._aliases.given[name]
        others = {*self._aliases.given.values(), *self._aliases.configured.values()}
        key = self._adapters.serving(target)
        if target in others:
            return name
        if key is not None and not self._pins.is_pinned(key):
            self._unload(target)
        self._pushes.forget(target)
        return name

    def _known(self, reference: AdapterReference) -> AdapterKey:
        key = self._adapters.serving(reference)
        if key is None:
            raise AdapterError(
                AdapterRefusal.NOT_FOUND, f"adapter {reference.id!r} is not known here"
            )
        return key

    async def _statuses(self, only: AdapterReference | None) -> list[AdapterStatus]:
        """The status of every known name, or of one."""
        views = {view.key: view for view in await self._handle.ask(Scheduler.adapters)}
        names = self._aliases.all
        local = await self._directory.lookups.local_names()
        listed = [only] if only is not None else [*names, *self._all_names(views, local)]
        found = []
        for reference in dict.fromkeys(listed):
            target = names.get(reference, reference)
            key = self._adapters.serving(target)
            adapter = None if key is None else self._directory.peek(key)
            alias = target if reference in names else None
            found.append((reference, alias, adapter, views.get(key) if key else None))
        await self._record_ranks([adapter for _, _, adapter, _ in found if adapter is not None])
        on_disk = set(local)
        statuses = [self._status(*each, on_disk) for each in found]
        return [each for each in statuses if each.state != "absent" or each.target is not None]

    def _all_names(
        self, keys: Iterable[AdapterKey], local: Iterable[str]
    ) -> Iterable[AdapterReference]:
        """Known adapters, those under the local roots, and the merges that the ranks know."""
        yield from self._directory.names()
        yield from (AdapterReference(AdapterSource.LOCAL, name) for name in local)
        for key in keys:
            yield from self._directory.recipes(key)

    def _status(
        self,
        reference: AdapterReference,
        alias: AdapterReference | None,
        adapter: FetchedAdapter | None,
        view: AdapterView | None,
        on_disk: set[str],
    ) -> AdapterStatus:
        if adapter is None:
            target = alias or reference
            folder = "@".join(filter(None, (target.id, target.revision)))
            is_local = target.source is AdapterSource.LOCAL and folder in on_disk
            return AdapterStatus(reference, "disk" if is_local else "absent", alias)
        uses = self._usage.of(adapter.key)
        return AdapterStatus(
            reference=reference,
            state="disk" if view is None else TIERS[view.state],
            target=alias,
            digest=adapter.digest,
            rank=self._ranks.get(adapter.digest),
            bytes=sum(size for _, size, _ in adapter.fingerprint),
            host_bytes=view.host_bytes if view else 0,
            device_pages=view.device_pages if view else 0,
            pinned=bool(view and view.pinned),
            draining=bool(view and view.draining),
            running=view.running if view else 0,
            waiting=view.waiting if view else 0,
            num_requests=uses.count,
            last_used=uses.last,
        )

    async def _record_ranks(self, adapters: Sequence[FetchedAdapter]) -> None:
        """Read the LoRA ranks that are not known yet, off the event loop."""
        unknown = {a.digest: a for a in adapters if a.digest not in self._ranks}
        if len(self._ranks) + len(unknown) > _MAX_RANKS:
            self._ranks.clear()
        with contextlib.suppress(AdapterError):
            for digest, adapter in unknown.items():
                read = partial(_rank, adapter)
                self._ranks[digest] = await self._directory.lookups.read_local(
                    ("rank", digest), read
                )


def _taken(name: AdapterReference) -> _CommandRefused:
    return _CommandRefused(
        f"the lora adapter {name.id!r} has already been loaded: set `load_inplace` to "
        "true to give the name to another, or unload it first"
    )


def _rank(adapter: FetchedAdapter) -> int | None:
    """The largest LoRA rank of an adapter or of its parts; None if it cannot be read."""
    ranks = [_rank_in(member.folder) for member in adapter.members if member.folder]
    return max((rank for rank in ranks if rank is not None), default=None)


def _rank_in(folder: str) -> int | None:
    try:
        config = read_object(Path(folder) / CONFIG_NAME, MAX_CONFIG_BYTES)
        ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    except (OSError, ValueError, AttributeError):
        return None
    return max((rank for rank in ranks if isinstance(rank, int)), default=None)

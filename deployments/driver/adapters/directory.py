"""The directory of adapters: from a name to files on disk and a key, before admission.

The key stands for the content's digest. So two names of the same bytes share pages and prefix
cache, and changed bytes under an old name never use what the old ones computed.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice

from msgspec.structs import replace

from configs.adapters import AdaptersConfig
from configs.wire.adapters import (
    AdapterError,
    AdapterKey,
    AdapterReference,
    AdapterRefusal,
    AdapterSource,
    FetchedAdapter,
)
from configs.wire.merging import MergeRule
from deployments.contract import AdapterInfo
from deployments.driver.adapters.lookups import Lookups, Overdue, ReadAdapter
from deployments.driver.adapters.single_flight import call_after_callers
from sources.adapters import AdapterSources
from sources.base import AdapterFolder, FoundAdapter, Token

_LINGER_SECONDS = 1.0
_FORGET_AT_ONCE = 64
_ORIGINS_OF_ONE = 8


@dataclass
class _Known:
    """One adapter's content: its files, its holders and its names.

    origins: the last ones that had this content.
    folders: those that the disk cache keeps for the holders, by origin.
    holders: how many requests and pins may need the files.
    idle_since: seconds of the event loop.
    parts: the keys of a merge's parts, in its order. A hold of the merge also holds them.
    """

    adapter: FetchedAdapter
    names: set[AdapterReference] = field(default_factory=set)
    origins: list[str] = field(default_factory=list)
    folders: dict[str, AdapterFolder] = field(default_factory=dict)
    holders: int = 0
    idle_since: float = 0.0
    parts: tuple[AdapterKey, ...] = ()


class AdapterDirectory:
    """All adapters that were requested and found; lives on the replica's event loop.

    A key from `resolve` is held by its caller: the files stay on disk until each holder has called
    `release`. Keys without a holder are forgotten when more than `max_known` are known.
    """

    def __init__(
        self, sources: AdapterSources, config: AdaptersConfig, linger_s: float = _LINGER_SECONDS
    ) -> None:
        """linger_s: seconds from the last use of files until they are released."""
        self._sources = sources
        self._config = config
        self._linger_s = linger_s
        self.lookups = Lookups(sources, config)
        self._next_key = count(1)
        self._keys: dict[str, AdapterKey] = {}
        self._known: OrderedDict[AdapterKey, _Known] = OrderedDict()
        self._origins: dict[str, AdapterKey] = {}
        self._references: dict[AdapterReference, AdapterKey] = {}

    async def resolve(
        self,
        reference: AdapterReference,
        api_token: Token,
        patience_s: float | None = None,
        payer: str | None = None,
    ) -> AdapterKey:
        """Fetch the adapter if it is not on disk; AdapterError if that fails.

        The caller holds the key that is returned.
        api_token: the caller's, False for none, True for the server's own.
        patience_s: Overdue after so long, or if the new version is refused: the caller has the
        last version. None: wait up to `fetch_timeout_s`.
        payer: as in `AdapterSources.fetch`.

        Callers of the same content share one download; a caller that leaves or waits too long
        does not end it for the others.
        """
        if reference.rule is not None:
            one = partial(self.resolve, api_token=api_token, patience_s=patience_s, payer=payer)
            return await self._resolve_merge(reference, reference.rule, one)
        try:
            async with asyncio.timeout(self._config.fetch_timeout_s):
                found = await self.lookups.find(reference, api_token, patience_s)
                bring = partial(self._fetch_and_hold, found, api_token, payer)
                key = await self.lookups.fetch_once(found, bring, patience_s, payer)
        except TimeoutError as error:
            raise AdapterError(
                AdapterRefusal.UNAVAILABLE,
                f"adapter {reference.id!r} is not here after {self._config.fetch_timeout_s:g} s; "
                "it is still being fetched: try again",
            ) from error
        except Overdue:
            raise
        except AdapterError as error:
            self.lookups.refused(reference, api_token, error)
            raise
        self._name(reference, key)
        self.hold(key)
        return key

    async def bring(self, found: FoundAdapter) -> AdapterKey:
        """The key of content that was found already, held by the caller."""
        work = partial(self._fetch_and_hold, found, True, None)
        key = await self.lookups.fetch_once(found, work, None, None)
        self.hold(key)
        return key

    def serve(self, reference: AdapterReference, key: AdapterKey) -> None:
        """Have a name stand for a key that is held."""
        self._name(reference, key)

    def forget_name(self, reference: AdapterReference) -> None:
        """Forget a name; its content stays while it is held."""
        key = self._references.pop(reference, None)
        if key is not None:
            self._known[key].names.discard(reference)

    def hold(self, key: AdapterKey) -> bool:
        """Add a holder; False if the key, or a part of it, was forgotten."""
        known = self._known.get(key)
        if known is None or not all(part in self._known for part in known.parts):
            return False
        for part in known.parts:
            self.hold(part)
        known.holders += 1
        self._known.move_to_end(key)
        return True

    def release(self, key: AdapterKey) -> None:
        """Remove a holder."""
        known = self._known[key]
        known.holders -= 1
        assert known.holders >= 0, known
        self._mark_idle(key, known)
        for part in known.parts:
            self.release(part)

    def fetched(self, key: AdapterKey) -> FetchedAdapter:
        """The files of a key that is held; callable from any thread."""
        known = self._known[key]
        if not known.parts:
            return known.adapter
        # A part's files may have moved since the merge was first requested.
        return replace(known.adapter, parts=tuple(map(self.fetched, known.parts)))

    def parts(self, key: AdapterKey) -> tuple[AdapterKey, ...]:
        """The parts of a merge that is held, in its order; () for other adapters."""
        return self._known[key].parts

    def names(self) -> list[AdapterReference]:
        """The names of all known adapters, without merges."""
        return [reference for reference in self._references if not reference.parts]

    def find(self, reference: AdapterReference) -> AdapterKey | None:
        """The newest known content of a name."""
        return self._references.get(reference)

    def recipes(self, key: AdapterKey) -> list[AdapterReference]:
        """The names of a merge that is still known; none for other adapters."""
        known = self._known.get(key)
        return [] if known is None else [name for name in known.names if name.parts]

    def peek(self, key: AdapterKey) -> FetchedAdapter | None:
        """The files of a key that may have no holder; None if it was forgotten."""
        known = self._known.get(key)
        if known is None or not known.parts:
            return None if known is None else known.adapter
        parts = (self.peek(part) for part in known.parts)
        return replace(known.adapter, parts=tuple(part for part in parts if part is not None))

    async def listing(self) -> list[AdapterInfo]:
        """Known adapters, and those under the local roots that were not requested yet."""
        known = {_listed_id(reference): reference for reference in self.names()}
        rows = [AdapterInfo(name, ref.source.value, "known") for name, ref in known.items()]
        rows += [
            AdapterInfo(name, "local", "on disk")
            for name in await self.lookups.local_names()
            if name not in known
        ]
        return sorted(rows, key=lambda row: row.id)

    def close(self) -> None:
        """Release all files, and do not wait for downloads: the replica ends."""
        self.lookups.close()
        for known in self._known.values():
            self._release_files(known.folders.values())

    def check(self) -> None:
        """Assert that all maps have the same keys."""
        assert {known.adapter.digest: key for key, known in self._known.items()} == self._keys
        assert all(reference in self._known[k].names for reference, k in self._references.items())
        assert sum(len(known.names) for known in self._known.values()) == len(self._references)
        origins = {name: key for key, known in self._known.items() for name in known.origins}
        assert origins == self._origins

    async def _resolve_merge(
        self,
        reference: AdapterReference,
        rule: MergeRule,
        resolve: Callable[[AdapterReference], Awaitable[AdapterKey]],
    ) -> AdapterKey:
        """The key of a merge of the present versions of its parts.

        resolve: resolves one part; AdapterError if this caller may not use it.
        """
        held: dict[int, AdapterKey] = {}

        async def fetch(index: int) -> None:
            held[index] = await resolve(reference.parts[index])

        try:
            indices = range(len(reference.parts))
            ended = await asyncio.gather(*map(fetch, indices), return_exceptions=True)
            # The refusal of one part comes before the lateness of another: a retry cannot help.
            for fault in sorted(filter(None, ended), key=lambda fault: isinstance(fault, Overdue)):
                raise fault
            key = self._register_merge(reference, rule, tuple(held[i] for i in indices))
            self._name(reference, key)
            self.hold(key)
            return key
        finally:
            for part in held.values():
                self.release(part)

    def _register_merge(
        self, reference: AdapterReference, rule: MergeRule, parts: tuple[AdapterKey, ...]
    ) -> AdapterKey:
        digest = rule.digest([self._known[part].adapter.digest for part in parts])
        key = self._key_of(digest)
        adapter = FetchedAdapter(key, reference.id, "", digest, rule=rule.normalised())
        # A part that was forgotten meanwhile has another key now; then the merge had no holder.
        self._known.setdefault(key, _Known(adapter)).parts = parts
        self._mark_idle(key, self._known[key])
        self._forget_oldest()
        return key

    async def _fetch_and_hold(
        self, found: FoundAdapter, token: Token, payer: str | None
    ) -> AdapterKey:
        """Fetch files and hold them until all callers hold them, even if the event loop is busy."""
        key = await self._fetch(found, token, payer)
        self.hold(key)
        call_after_callers(partial(self.release, key))
        return key

    async def _fetch(self, found: FoundAdapter, token: Token, payer: str | None) -> AdapterKey:
        """The key of a found adapter; its files are on this node and stay there for a while."""
        key = self._origins.get(found.origin)
        if key is not None and self._is_on_disk(found, self._known[key]):
            self._mark_idle(key, self._known[key])
            return key
        hashed = self._known[key].adapter.digest if key is not None else None
        return self._register(found, await self.lookups.read(found, token, hashed, payer))

    def _is_on_disk(self, found: FoundAdapter, known: _Known) -> bool:
        """Whether the files of the last read are those that were found, and are still kept."""
        held = known.folders.get(found.origin)
        folder = found.folder if held is None else held.folder
        return folder is not None and str(folder) == known.adapter.folder

    def _register(self, found: FoundAdapter, read: ReadAdapter) -> AdapterKey:
        key, folder = self._key_of(read.digest), read.folder
        # Names may share content: the folder to read is the one that was verified last.
        adapter = FetchedAdapter(
            key,
            found.reference.id,
            str(folder.folder),
            read.digest,
            folder.fingerprint,
            root=str(folder.root or ""),
            invocation=read.invocation,
        )
        known = self._known.setdefault(key, _Known(adapter))
        known.adapter = adapter
        if folder.held is not None and known.folders.setdefault(folder.held, folder) is not folder:
            self._sources.release(folder)
        self._remember(folder.origin, key, known)
        self._mark_idle(key, known)
        self._forget_oldest()
        return key

    def _key_of(self, digest: str) -> AdapterKey:
        key = self._keys.get(digest)
        if key is None:
            key = self._keys[digest] = AdapterKey(next(self._next_key))
        return key

    def _remember(self, origin: str, key: AdapterKey, known: _Known) -> None:
        """Map an origin to its key; a content's last few origins are found without hashing."""
        if self._origins.get(origin) != key:
            self._origins[origin] = key
            known.origins.append(origin)
        if len(known.origins) > _ORIGINS_OF_ONE:
            del self._origins[known.origins.pop(0)]

    def _name(self, reference: AdapterReference, key: AdapterKey) -> None:
        """Map a name to a key, instead of the key that it had."""
        before = self._references.get(reference)
        if before is not None:
            self._known[before].names.discard(reference)
        self._references[reference] = key
        self._known[key].names.add(reference)

    def _mark_idle(self, key: AdapterKey, known: _Known) -> None:
        """Release a key's files if it has no holder for `linger_s` from now."""
        loop = asyncio.get_running_loop()
        known.idle_since = loop.time()
        self._known.move_to_end(key)
        if not known.holders and known.folders:
            loop.call_later(self._linger_s, self._release_files_if_idle, known)

    def _release_files_if_idle(self, known: _Known) -> None:
        idle_for = asyncio.get_running_loop().time() - known.idle_since
        if not known.holders and idle_for >= self._linger_s * 0.99:
            folders = [*known.folders.values()]
            known.folders.clear()
            # In a thread: pushed files that nothing uses any more are deleted, many MB of memory.
            asyncio.get_running_loop().run_in_executor(None, self._release_files, folders)

    def _release_files(self, folders: Iterable[AdapterFolder]) -> None:
        for folder in folders:
            self._sources.release(folder)

    def _forget_oldest(self) -> None:
        """Forget the keys used least recently beyond `max_known`; held and recent ones stay."""
        surplus = len(self._known) - self._config.max_known
        if surplus <= 0:
            return
        recent = asyncio.get_running_loop().time() - self._linger_s
        for key in list(islice(self._known, min(surplus, _FORGET_AT_ONCE))):
            known = self._known[key]
            if not known.holders and not known.folders and known.idle_since < recent:
                self._forget(key, known)

    def _forget(self, key: AdapterKey, known: _Known) -> None:
        del self._known[key], self._keys[known.adapter.digest]
        for reference in known.names:
            del self._references[reference]
        for origin in known.origins:
            del self._origins[origin]


def _listed_id(reference: AdapterReference) -> str:
    """The id in listings. A local revision is a part of the folder's name, not a version of it."""
    if reference.source is AdapterSource.LOCAL and reference.revision is not None:
        return f"{reference.id}@{reference.revision}"
    return reference.id

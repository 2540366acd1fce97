"""Calls to adapter sources, in threads: the present version of a name, and its files.

Lookups in local folders, reading and hashing, lookups of new names at remote sources, those of
known names, and downloads have pools of their own, so that none delays another: a flood of names
that do not exist delays new names alone. A local call that hangs (on a mount that does not respond)
does not prevent the next one from starting.
"""

import contextlib
import logging
from collections.abc import Awaitable, Callable, Container, Hashable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec

from configs.adapters import AdaptersConfig
from configs.wire.adapters import (
    AdapterError,
    AdapterKey,
    AdapterReference,
    AdapterRefusal,
    AdapterSource,
)
from deployments.driver.adapters.access_cache import AccessCache, Caller
from deployments.driver.adapters.invocation import invocation_of
from deployments.driver.adapters.single_flight import BlockingCalls, Late, SingleFlight
from sources.adapters import AdapterSources
from sources.base import AdapterFolder, FoundAdapter, Token, Unreachable

_LOOKING_THREADS = 16
_READING_THREADS = 4
_DOWNLOADING_THREADS = 16
_HANGING_THREADS = 64
_READING_PATIENCE_S = 30.0

_NO_VERSION = frozenset({AdapterRefusal.NOT_FOUND, AdapterRefusal.FORBIDDEN, AdapterRefusal.DENIED})
"""Refusals of a name; other refusals concern the files that were found."""

_ON_THIS_NODE = frozenset({AdapterSource.LOCAL, AdapterSource.PUSHED})
"""Sources whose replies cost nothing, and are not cached."""

T = TypeVar("T")

logger = logging.getLogger("loray.driver.adapters")


class Overdue(AdapterError):
    """The caller may use the adapter, but its present version is not known in time.

    goes_on: True while the lookup goes on; False if the present version was refused.
    """

    def __init__(self, refusal: AdapterRefusal, message: str, goes_on: bool) -> None:
        super().__init__(refusal, message)
        self.goes_on = goes_on


@dataclass(frozen=True)
class ReadAdapter:
    """An adapter's files on this node, the digest of their content, and FetchedAdapter's tokens."""

    folder: AdapterFolder
    digest: str
    invocation: tuple[int, ...]


class Lookups:
    """Calls to the sources, each made once at a time; lives on the replica's event loop."""

    def __init__(self, sources: AdapterSources, config: AdaptersConfig) -> None:
        self.sources = sources
        self._config = config
        self._access_cache = AccessCache(config.fetch)
        self._flights = SingleFlight()
        self._fetching: dict[AdapterReference, str] = {}
        self._local_names: list[str] = []
        self._looking = BlockingCalls("look", _LOOKING_THREADS)
        self._rechecking = BlockingCalls("recheck", _LOOKING_THREADS)
        patience_s = config.look_timeout_s
        self._local = BlockingCalls("stat", _LOOKING_THREADS, patience_s, _HANGING_THREADS)
        patience_s = _READING_PATIENCE_S
        self._reading = BlockingCalls("read", _READING_THREADS, patience_s, _HANGING_THREADS)
        self._downloading = BlockingCalls("fetch", _DOWNLOADING_THREADS)

    def close(self) -> None:
        """Do not wait for running calls: the replica ends."""
        self.sources.close()
        for calls in (
            self._looking, self._rechecking, self._local, self._reading, self._downloading
        ):  # fmt: skip
            calls.close()

    def caller(self, token: Token) -> Caller:
        """The caller's identity, without its token."""
        return self._access_cache.caller(token)

    async def find(
        self, reference: AdapterReference, token: Token, patience_s: float | None
    ) -> FoundAdapter:
        """The reference's present version; AdapterError if there is none for this caller.

        patience_s: Overdue after so long, or if a local folder is no adapter. It does not apply to
        remote sources, which must first confirm that this caller may use the adapter.
        """
        caller = self.caller(token)
        fresh = self._access_cache.fresh(reference, caller)
        if fresh is not None:
            return fresh
        lookup = partial(self._look_up, reference, token, caller)
        if reference.source is not AdapterSource.LOCAL:
            patience_s = None
        key = (reference, caller)
        return await self._once(reference, key, lookup, patience_s, raised=_NO_VERSION)

    async def fetch_once(
        self,
        found: FoundAdapter,
        work: Callable[[], Awaitable[AdapterKey]],
        patience_s: float | None,
        payer: str | None,
    ) -> AdapterKey:
        """The result of `work`, which fetches a version, once for all callers of this payer.

        patience_s: Overdue after so long, if it is refused, or while another version of the same
        name is fetched: otherwise a file that grows would be hashed at each of its sizes.
        """
        reference = found.reference
        if patience_s is not None and self._fetching.get(reference, found.origin) != found.origin:
            raise _overdue(reference)

        async def fetch() -> AdapterKey:
            self._fetching[reference] = found.origin
            try:
                return await work()
            finally:
                self._fetching.pop(reference, None)

        return await self._once(reference, (found.origin, payer), fetch, patience_s)

    async def read(
        self, found: FoundAdapter, token: Token, digest: str | None, payer: str | None
    ) -> ReadAdapter:
        """The files on this node, and what is known of them.

        digest: the known one of the same files, which are then not hashed again.
        """

        known = digest or found.digest

        def read() -> ReadAdapter:
            folder = self.sources.fetch(found, token, payer)
            try:
                _check_sendable(folder, found.reference.id)
                digest = known or self.sources.digest(folder, found.reference.id)
                return ReadAdapter(folder, digest, invocation_of(folder.folder))
            except AdapterError:
                self.sources.release(folder)
                raise

        calls = self._reading if found.folder else self._downloading
        return await calls.run(read)

    def refused(self, reference: AdapterReference, token: Token, error: AdapterError) -> None:
        """Cache a remote source's refusal, unless it is the server's own of this caller."""
        is_callers_own = error.refusal in (AdapterRefusal.DENIED, AdapterRefusal.QUOTA)
        if reference.source not in _ON_THIS_NODE and not is_callers_own:
            self._access_cache.refuse(reference, self.caller(token), error)

    def forget(self, reference: AdapterReference) -> None:
        """Ask the source again at the next request: it has changed the adapter."""
        self._access_cache.forget(reference)

    async def local_names(self) -> list[str]:
        """Ids of the adapters directly under the local roots; the last list if that takes long."""
        with contextlib.suppress(AdapterError, OSError):
            self._local_names = await self.read_local("names", self.sources.known_local)
        return self._local_names

    async def local_reference(self, folder: str) -> AdapterReference | None:
        """The name of a folder under the local roots; None for any other path."""
        return await self.read_local(folder, partial(self.sources.local_reference, folder))

    async def read_local(self, key: Hashable, call: Callable[[], T]) -> T:
        """The result of a short call that reads local files; AdapterError if it takes too long.

        key: calls with the same key at the same time share the result.
        """
        look = partial(self._local.run, call)
        limit = self._config.look_timeout_s
        try:
            return await self._flights.once(("local", key), look, limit)
        except Late:
            message = f"the adapters' files could not be read within {limit:g} s: try again"
            raise AdapterError(AdapterRefusal.UNAVAILABLE, message) from None

    async def _once(
        self,
        reference: AdapterReference,
        key: Hashable,
        work: Callable[[], Awaitable[T]],
        patience_s: float | None,
        raised: Container[AdapterRefusal] = (),
    ) -> T:
        """The result of `work`, shared by all callers of this key.

        patience_s: Overdue after so long, or after a refusal that is not among `raised`.
        """
        try:
            return await self._flights.once(key, work, patience_s)
        except Late:
            raise _overdue(reference) from None
        except AdapterError as error:
            if patience_s is None or error.refusal in raised:
                raise
            raise Overdue(error.refusal, error.message, goes_on=False) from error

    async def _look_up(
        self, reference: AdapterReference, token: Token, caller: Caller
    ) -> FoundAdapter:
        """The version that the source names; the last known one if it is unreachable."""
        look = partial(self.sources.resolve, reference, token)
        try:
            if reference.source is AdapterSource.LOCAL:
                found = await self._local.run(look)
            elif self._access_cache.knows(reference, caller):
                found = await self._rechecking.run(look)
            else:
                found = await self._looking.run(partial(self._if_wanted, reference, caller, look))
        except Unreachable as error:
            recent = self._access_cache.confirmed(reference, caller)
            if recent is None:
                raise AdapterError(
                    AdapterRefusal.UNAVAILABLE,
                    f"adapter {reference.id!r}: its source {reference.source.value!r} is "
                    f"unreachable ({error}) and did not confirm recently that this caller may use "
                    "it: try again",
                ) from error
            logger.warning("%s is unreachable; its last replies are used", reference.source.value)
            return recent
        if found.lasting:
            self._access_cache.record(reference, caller, found)
        return found

    def _if_wanted(
        self, reference: AdapterReference, caller: Caller, look: Callable[[], FoundAdapter]
    ) -> FoundAdapter:
        """Look a new name up, unless all callers have left while it waited for a thread."""
        if not self._flights.is_wanted((reference, caller)):
            message = f"adapter {reference.id!r}: its lookup was given up: try again"
            raise AdapterError(AdapterRefusal.UNAVAILABLE, message)
        return look()


def _check_sendable(folder: AdapterFolder, name: str) -> None:
    """Refuse what no message to a rank can hold: the loop, which sends it, would end.

    That is a path that is no UTF-8, or a time of centuries, as file systems in memory keep it.
    """
    try:
        msgspec.msgpack.encode((str(folder.folder), folder.fingerprint))
    except (OverflowError, UnicodeEncodeError) as error:
        raise AdapterError(
            AdapterRefusal.UNSUPPORTED,
            f"adapter {name!r}: the path or a time of its files cannot be sent to the ranks "
            f"({error}): give them others",
        ) from error


def _overdue(reference: AdapterReference) -> Overdue:
    message = f"adapter {reference.id!r}: its present version is not known yet: try again"
    return Overdue(AdapterRefusal.UNAVAILABLE, message, goes_on=True)

"""The catalogue on one replica: new, changed and removed adapters take effect within seconds."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from configs.catalogue import as_settings
from configs.runtime import RuntimeConfig
from configs.wire.adapters import AdapterError, AdapterKey, AdapterReference
from deployments.contract import AdapterCommand, AdapterReport, UnloadAdapter
from deployments.driver.adapters.lifecycle import EngineAdapters
from sources.base import Unreachable
from sources.catalogue import CatalogueListing

Apply = Callable[[RuntimeConfig], Awaitable[None]]
"""Applies the catalogue's settings beside the operator's; raises ValueError or AdapterError."""

Execute = Callable[[AdapterCommand], Awaitable[AdapterReport]]

logger = logging.getLogger("loray.driver.catalogue")


class CatalogueWatcher:
    """Compares the catalogue with what was read before; lives on the replica's event loop.

    A catalogue that cannot be read or applied changes nothing; the next look tries again.
    """

    def __init__(
        self,
        read: Callable[[], CatalogueListing],
        adapters: EngineAdapters,
        apply: Apply,
        execute: Execute,
    ) -> None:
        """read: blocks. execute: runs a command on this replica."""
        self._read = read
        self._adapters = adapters
        self._apply = apply
        self._execute = execute
        self._known = CatalogueListing()
        self._missing: tuple[str, ...] = ()
        self._fault: str | None = None

    async def look(self) -> None:
        """Read the catalogue and take over its changes."""
        try:
            listing = await asyncio.to_thread(self._read)
            if listing != self._known or self._missing:
                await self._take(listing)
        except (OSError, ValueError, AdapterError, Unreachable) as error:
            self._report(str(error))
            return
        self._report(None)

    async def watch(self, interval_s: float) -> None:
        """Look again and again until it is cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(interval_s)

    async def _take(self, listing: CatalogueListing) -> None:
        settings = as_settings(listing.entries)
        before, self._missing = self._missing, ()
        pins: list[str] = []
        for text in settings.pinned_adapters:
            fault = await self._fetch_fault(self._adapters.read(text))
            if fault is None:
                pins.append(text)
            else:
                self._missing = (*self._missing, text)
                if text not in before:
                    logger.warning("the catalogue's pin of %s waits: %s", text, fault)
        await self._apply(settings.model_copy(update={"pinned_adapters": tuple(pins)}))
        known, self._known = self._known, listing
        await self._refresh(known, listing)
        offered = {self._reference(listing, name) for name in listing.entries}
        for name in known.entries.keys() - listing.entries.keys():
            reference = self._reference(known, name)
            if reference not in offered:  # Else it has another name.
                await self._remove(reference)
            logger.info("the catalogue has adapter %s no more", name)

    async def _refresh(self, known: CatalogueListing, listing: CatalogueListing) -> None:
        """Have names that serve already look for their new version now, not at the next recheck."""
        for name in listing.entries:
            reference = self._reference(listing, name)
            if name not in known.entries:
                self._adapters.directory.lookups.forget(reference)
                logger.info("the catalogue has a new adapter: %s", name)
            elif known.versions.get(name) != listing.versions.get(name):
                self._adapters.directory.lookups.forget(reference)
                if self._adapters.serving(reference) is not None:
                    await self._fetch_fault(reference)

    async def _remove(self, reference: AdapterReference) -> None:
        """Unload and forget an adapter that has left; its requests end on it."""
        self._adapters.directory.lookups.forget(reference)
        key: AdapterKey | None = self._adapters.serving(reference)
        if key is not None:
            report = await self._execute(UnloadAdapter(reference))
            if report.failure is None:  # Else the operator has pinned it.
                self._adapters.forget(reference)

    async def _fetch_fault(self, reference: AdapterReference) -> str | None:
        """Fetch the present version; why it cannot be, None if it was."""
        try:
            self._adapters.release(await self._adapters.resolve(reference, True))
        except AdapterError as error:
            return error.message
        return None

    def _reference(self, listing: CatalogueListing, name: str) -> AdapterReference:
        return self._adapters.read(listing.entries[name].adapter or name)

    def _report(self, fault: str | None) -> None:
        if fault is not None and fault != self._fault:
            logger.error("the catalogue is not applied, the one before it stays: %s", fault)
        self._fault = fault

"""An engine's adapters: the version that serves each name, pins and preloads."""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from configs.adapters import AdaptersConfig
from configs.wire.adapters import (
    AdapterError,
    AdapterKey,
    AdapterReference,
    AdapterRefusal,
    AdapterSource,
    parse_reference,
)
from configs.wire.templates import TemplateSource, read_template
from deployments.driver.adapters.directory import AdapterDirectory
from deployments.driver.adapters.lookups import Overdue
from deployments.driver.adapters.pins import Pins
from deployments.driver.adapters.versions import Versions
from deployments.driver.loop_handle import LoopHandle
from deployments.driver.request_runner import RequestRunner
from sources.base import Token

_LOG_EVERY_S = 10.0

logger = logging.getLogger("loray.driver.adapters")


class EngineAdapters:
    """Resolves names for requests, pins and templates; lives on the replica's event loop.

    num_overdue: requests that an adapter's last version served, because its present one was not
    known in time.
    """

    def __init__(
        self,
        config: AdaptersConfig,
        directory: AdapterDirectory,
        handle: LoopHandle,
        runner: RequestRunner,
    ) -> None:
        self.directory = directory
        self.pins = Pins(directory, handle)
        self.num_overdue = 0
        self._config = config
        self._handle = handle
        self._versions = Versions(directory, self.pins, handle, runner)
        self._logged_overdue = -_LOG_EVERY_S

    async def resolve(
        self, reference: AdapterReference, token: Token, payer: str | None = None
    ) -> AdapterKey:
        """The version that serves a request now, held until `release`; AdapterError if none.

        token: the caller's, False for none, True for the server's own. payer: the group of API
        keys that a download is charged to, None for the operator's downloads, which are free.
        """
        if reference.source is AdapterSource.PUSHED:
            served = self._versions.current(reference)
            if served is not None and self.directory.hold(served):
                return served  # Its next version replaces it, and nothing else does.
        token = token or self._config.share_hub_token
        is_served = self._versions.current(reference) is not None
        try:
            patience_s = self._config.look_timeout_s if is_served else None
            newest = await self.directory.resolve(reference, token, patience_s, payer)
        except Overdue as overdue:
            last = await self._versions.last(reference)
            if last is not None:
                self._overdue(reference, overdue)
                return last
            if not overdue.goes_on:
                raise
            newest = await self.directory.resolve(reference, token, payer=payer)
        return await self._versions.select(reference, newest)

    def _overdue(self, reference: AdapterReference, overdue: Overdue) -> None:
        """Count a request that the last version serves, and log it now and then."""
        self.num_overdue += 1
        now = asyncio.get_running_loop().time()
        if now - self._logged_overdue >= _LOG_EVERY_S:
            self._logged_overdue = now
            logger.warning(
                "the last version of adapter %s serves (%d requests over any until now): %s",
                reference.id,
                self.num_overdue,
                overdue.message,
            )

    def release(self, key: AdapterKey) -> None:
        """Remove a holder, once the scheduler has run all commands posted until now."""
        # The scheduler must not name a key that the directory has forgotten.
        self._handle.after_posted(self.directory.release, key)

    def give_up(self, reference: AdapterReference, key: AdapterKey) -> bool:
        """After a version could not be read: whether another one serves the name now."""
        return self._versions.give_up(reference, key)

    async def chat_template(
        self, reference: AdapterReference, token: Token, payer: str
    ) -> TemplateSource:
        """The adapter's own chat template; AdapterError if the caller may not use it.

        A merge has none.
        """
        if reference.rule is not None:
            return TemplateSource()
        key = await self.resolve(reference, token, payer)
        try:
            folder = Path(self.directory.fetched(key).folder)
            look = partial(read_template, folder)
            return await self.directory.lookups.read_local(("template", key), look)
        except (OSError, ValueError) as error:
            raise AdapterError(
                AdapterRefusal.UNSUPPORTED,
                f"adapter {reference.id!r}: its chat template cannot be read: {error}",
            ) from error
        finally:
            self.release(key)

    def read(self, text: str) -> AdapterReference:
        """Parse a reference that an operator wrote; ValueError if it is none."""
        return parse_reference(text, self._config.default_source)

    async def pin_only(self, references: Sequence[AdapterReference]) -> None:
        """Replace the config's pins; AdapterError, and no change, if one cannot be fetched."""
        pins: dict[AdapterReference, AdapterKey] = {}
        try:
            for reference in references:
                pins[reference] = await self.resolve(reference, True)
        except BaseException:
            for key in pins.values():
                self.release(key)
            raise
        self.pins.configure(pins)

    async def pin_name(self, reference: AdapterReference, token: Token = True) -> None:
        """Pin a name until `pins.remove`; AdapterError if it cannot be fetched.

        token: the caller's, True for the server's own; unused if the name is pinned already.
        """
        if not self.pins.is_commanded(reference):
            self.pins.add(reference, await self.resolve(reference, token))

    def replace(self, reference: AdapterReference, key: AdapterKey) -> None:
        """Have a version serve a name for all requests from now on. The caller holds the key."""
        self.directory.serve(reference, key)
        self._versions.replace(reference, key)

    def forget(self, reference: AdapterReference) -> None:
        """Forget a name."""
        self._versions.forget(reference)
        self.directory.forget_name(reference)

    def serving(self, reference: AdapterReference) -> AdapterKey | None:
        """The version that serves a name now; None if it is not known."""
        return self._versions.current(reference) or self.directory.find(reference)

    def contents(self) -> list[tuple[AdapterReference, AdapterKey]]:
        """Every known name and the version that serves it."""
        served = [(name, self.serving(name)) for name in self.directory.names()]
        return [(name, key) for name, key in served if key is not None]

    async def preload(self) -> None:
        """Pin the configured adapters and generate a token with each; ValueError if one fails."""
        for text in self._config.preload:
            reference = self.read(text)
            key = await self.resolve(reference, True)
            self.pins.add(reference, key)
            fault = await self._versions.test(reference, key)
            if fault is not None:
                raise ValueError(f"adapters.preload: {text!r}: {fault}")
            logger.info("adapter %s is loaded", reference.id)

    async def settle(self) -> None:
        """Wait until no name is changing its version."""
        await self._versions.settle()

    async def close(self) -> None:
        """Cancel background work."""
        await self._versions.close()
        self.directory.close()

"""The operator's `user_config` on one replica: a fault in it never stops a replica that serves."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from configs.base import faults
from configs.runtime import RuntimeConfig
from configs.wire.adapters import AdapterError
from deployments.admin_commands import AdminStore, AdminStoreError

_LAST = "user_config"

logger = logging.getLogger("loray.driver.settings")

Apply = Callable[[RuntimeConfig], Awaitable[None]]
"""Applies settings, all or none; raises ValueError, or AdapterError for a pin."""


class OperatorSettings:
    """Applies each `user_config`; the last one that could be applied stays until the next can.

    A replica that starts under a `user_config` with a fault takes the last good one of its
    application from the store. A pin that cannot be had is left out at start.
    """

    def __init__(self, apply: Apply, store: AdminStore) -> None:
        self._apply = apply
        self._store = store
        self._wanted: Mapping[str, Any] | None = None
        self._applied = False
        self._lock = asyncio.Lock()
        self.refused: str | None = None
        """Why the `user_config` that Serve gave last is not applied; None if it is."""

    async def take(self, wanted: Mapping[str, Any]) -> None:
        """Apply it, or say why not in `refused`; ValueError where there is no other to start by."""
        async with self._lock:
            self._wanted = wanted
            await self._try()
            if not self._applied:
                await self._start()

    async def retry(self) -> None:
        """Try again what was refused: a source may be back."""
        async with self._lock:
            if self.refused is not None:
                await self._try()

    async def _try(self) -> None:
        try:
            await self._apply(RuntimeConfig.model_validate(self._wanted))
        except (ValueError, AdapterError) as error:
            self._refuse(error)
            return
        if self.refused is not None:
            logger.info("user_config is applied now")
        self.refused, self._applied = None, True
        try:
            await asyncio.to_thread(self._store.put, _LAST, msgspec.json.encode(self._wanted))
        except AdminStoreError as fault:
            logger.warning("replicas that start later will not know this user_config: %s", fault)

    def _refuse(self, error: Exception) -> None:
        why = "; ".join(faults(error)) if isinstance(error, ValueError) else str(error)
        if why != self.refused:
            logger.error("user_config is not applied, the settings before it stay: %s", why)
        self.refused = why

    async def _start(self) -> None:
        """Start with what can be applied of the wanted settings, or of the last good ones."""
        try:
            runtime = RuntimeConfig.model_validate(self._wanted)
            await self._apply(runtime.model_copy(update={"pinned_adapters": ()}))
        except ValueError as error:
            last = await self._last()
            if last is None:
                raise ValueError(f"user_config: {self.refused}") from error
            runtime = last
            await self._apply(runtime.model_copy(update={"pinned_adapters": ()}))
            logger.warning("this replica starts with the last user_config that could be applied")
        self._applied = True
        await self._pin(runtime)

    async def _pin(self, runtime: RuntimeConfig) -> None:
        """Pin those adapters that can be had; the settings without them are applied."""
        pins: tuple[str, ...] = ()
        for one in runtime.pinned_adapters:
            try:
                await self._apply(runtime.model_copy(update={"pinned_adapters": (*pins, one)}))
            except AdapterError as error:
                logger.error("user_config: the pin of %s is left out: %s", one, error)
                continue
            pins = (*pins, one)

    async def _last(self) -> RuntimeConfig | None:
        """The last good `user_config` of this application, if one is known and still fits."""
        try:
            found = (await asyncio.to_thread(self._store.read)).get(_LAST)
            return None if found is None else RuntimeConfig.model_validate_json(found)
        except (AdminStoreError, ValueError) as error:
            logger.warning("the last good user_config cannot be read: %s", error)
            return None

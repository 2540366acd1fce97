"""The operator's `user_config` on one replica; a fault in it never ends a running replica."""

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
_PATIENCE_S = 1.0

logger = logging.getLogger("loray.driver.settings")

Apply = Callable[[RuntimeConfig], Awaitable[None]]
"""Applies all settings or none; raises ValueError, or AdapterError for a pin."""


class OperatorSettings:
    """Applies each `user_config`. One with a fault changes nothing: the last good one stays.

    A replica that starts with a faulty `user_config` uses the application's last good one, from
    the store. At start, a pin that cannot be fetched is left out.
    """

    def __init__(self, apply: Apply, store: AdminStore, patience_s: float = _PATIENCE_S) -> None:
        """patience_s: how long `take` waits for settings of a running replica."""
        self._apply = apply
        self._store = store
        self._patience_s = patience_s
        self._latest: Mapping[str, Any] | None = None
        self._applied = False
        self._attempt: asyncio.Task[None] | None = None
        self.refused: str | None = None
        """Why Serve's latest `user_config` is not applied; None if it is, or is being applied."""

    async def take(self, user_config: Mapping[str, Any]) -> None:
        """Apply it, or set `refused`; ValueError if the replica has no settings to start with.

        A pin may take minutes to fetch, and Serve sends a replica no requests until this returns.
        So it returns soon where the replica runs already, and the attempt goes on.
        """
        self._latest = user_config
        if self._attempt is not None:  # Of older settings.
            self._attempt.cancel()
            await asyncio.wait({self._attempt})
        self.refused = None
        if self._applied:
            await self._attempted(self._patience_s)
            return
        await self._try()
        if not self._applied:
            await self._start()

    async def retry(self) -> None:
        """Try a refused `user_config` again: a source may be reachable now."""
        if self.refused is not None and not self.is_pending:
            await self._attempted(None)

    @property
    def is_pending(self) -> bool:
        """Whether an attempt to apply the latest `user_config` goes on."""
        return self._attempt is not None and not self._attempt.done()

    async def _attempted(self, timeout_s: float | None) -> None:
        self._attempt = attempt = asyncio.create_task(self._try())
        done, _ = await asyncio.wait({attempt}, timeout=timeout_s)
        if done and not attempt.cancelled():
            attempt.result()

    async def _try(self) -> None:
        try:
            await self._apply(RuntimeConfig.model_validate(self._latest))
        except Exception as error:
            # A fault of ours too: `take` may have returned, so only `refused` reports it.
            self._refuse(error)
            if not isinstance(error, ValueError | AdapterError):
                raise
            return
        if self.refused is not None:
            logger.info("user_config is applied now")
        self.refused, self._applied = None, True
        try:
            await asyncio.to_thread(self._store.put, _LAST, msgspec.json.encode(self._latest))
        except AdminStoreError as fault:
            logger.warning("replicas that start later will not know this user_config: %s", fault)

    def _refuse(self, error: Exception) -> None:
        reason = (
            "; ".join(faults(error, RuntimeConfig)) if isinstance(error, ValueError) else str(error)
        ) or type(error).__name__
        if reason != self.refused:
            logger.error("user_config is not applied, the settings before it stay: %s", reason)
        self.refused = reason

    async def _start(self) -> None:
        """Apply the latest settings, or else the last good ones, without pins that fail."""
        try:
            runtime = RuntimeConfig.model_validate(self._latest)
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
        """Pin the adapters that can be fetched; the other settings are applied already."""
        pins: tuple[str, ...] = ()
        for name in runtime.pinned_adapters:
            try:
                await self._apply(runtime.model_copy(update={"pinned_adapters": (*pins, name)}))
            except AdapterError as error:
                logger.error("user_config: the pin of %s is left out: %s", name, error)
                continue
            pins = (*pins, name)

    async def _last(self) -> RuntimeConfig | None:
        """The application's last good `user_config`; None if there is none that still fits."""
        try:
            found = (await asyncio.to_thread(self._store.read)).get(_LAST)
            return None if found is None else RuntimeConfig.model_validate_json(found)
        except (AdminStoreError, ValueError) as error:
            logger.warning("the last good user_config cannot be read: %s", error)
            return None

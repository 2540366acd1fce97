"""Staging without a request: commands wait until all ranks have an adapter in host memory."""

import asyncio

from configs.wire.adapters import AdapterError, AdapterKey, AdapterRefusal
from deployments.driver.loop_handle import LoopHandle
from scheduler.events import AdapterArrived, AdapterWanted


class AdapterStaging:
    """The commands that wait for adapters; lives on the replica's event loop."""

    def __init__(self, handle: LoopHandle, timeout_s: float) -> None:
        self._handle = handle
        self._timeout_s = timeout_s
        self._waiting: dict[AdapterKey, list[asyncio.Future[AdapterArrived]]] = {}

    def finished(self, event: AdapterArrived) -> None:
        """End the waits for an adapter: it is staged, or staging failed."""
        for future in self._waiting.pop(event.key, ()):
            if not future.done():
                future.set_result(event)

    async def stage(self, key: AdapterKey) -> None:
        """Have all ranks stage an adapter that the caller holds; AdapterError if one cannot.

        Ranks that sleep stage it when they wake, and nothing waits for that.
        """
        if self._handle.asleep:
            self._want(key)
            return
        future: asyncio.Future[AdapterArrived] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append(future)
        self._want(key)
        try:
            async with asyncio.timeout(self._timeout_s):
                arrived = await future
        except TimeoutError as error:
            raise AdapterError(
                AdapterRefusal.UNAVAILABLE,
                f"the adapter is not staged after {self._timeout_s:g} s: the host tier is "
                "full of pinned adapters, or the disk is slow; staging continues",
            ) from error
        if arrived.failure is not None:
            raise AdapterError(arrived.failure.refusal, arrived.failure.message)

    def _want(self, key: AdapterKey) -> None:
        self._handle.post(lambda scheduler, now: scheduler.handle_adapter_event(AdapterWanted(key)))

"""Runs all batches that have not ended; one runner for a server."""

import asyncio
import logging
from collections.abc import Callable

from deployments.batch_runner.requests import SendRequest
from deployments.batch_runner.work import BatchWork
from deployments.ingress.batches.records import OpenBatch
from deployments.ingress.batches.store import BatchStore

_POLL_SECONDS = 10.0
_CLEAN_SECONDS = 3600.0
_MAX_BATCHES = 8
"""How many batches of one API key run at once; all share the slots of running requests."""

logger = logging.getLogger("loray.batches")


class BatchRunner:
    """Looks for open batches and runs them; a batch that was interrupted goes on where it was."""

    def __init__(
        self, store: BatchStore, sender: Callable[[str], SendRequest], max_line_bytes: int
    ) -> None:
        """sender: makes what sends requests under the key of a name."""
        self._store = store
        self._sender = sender
        self._max_line_bytes = max_line_bytes
        self._slots = asyncio.Semaphore(store.config.max_running)
        self._running: dict[str, tuple[OpenBatch, asyncio.Task[None]]] = {}
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """A batch was made or is to be cancelled: look now."""
        self._woken.set()

    async def run(self) -> None:
        """Run batches until the task is cancelled."""
        cleaned = float("-inf")
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._woken.clear()
                try:
                    if loop.time() - cleaned > _CLEAN_SECONDS:
                        cleaned = loop.time()
                        await asyncio.to_thread(self._store.delete_expired)
                    await self._start_batches()
                except Exception:
                    # The storage may be away for a while.
                    logger.exception("the batches cannot be read: trying again")
                await self._pause()
        finally:
            tasks = [task for _, task in self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(_POLL_SECONDS):
                await self._woken.wait()
        except TimeoutError:
            pass

    async def _start_batches(self) -> None:
        """Start as many open batches of each owner as may run, and those that are to end."""
        for entry in await asyncio.to_thread(self._store.open_batches):
            if entry.id in self._running:
                continue
            owned = sum(each.owner == entry.owner for each, _ in self._running.values())
            if owned < _MAX_BATCHES or await asyncio.to_thread(self._store.is_to_end, entry):
                task = asyncio.create_task(self._run_batch(entry))
                self._running[entry.id] = entry, task

    async def _run_batch(self, entry: OpenBatch) -> None:
        try:
            work = BatchWork(self._store, entry, self._slots, self._max_line_bytes)
            await work.run(lambda: self._sender(entry.key))
        except Exception:
            # It stays open, so the next look at the batches tries again.
            logger.exception("the batch %s was interrupted", entry.id)
            await asyncio.sleep(_POLL_SECONDS)
        finally:
            del self._running[entry.id]
            self.wake()

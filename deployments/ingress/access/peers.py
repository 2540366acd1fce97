"""The number of ingress replicas; each one enforces its part of a quota."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

logger = logging.getLogger("loray.ingress.peers")

_SECONDS = 10.0


class ReplicaCount:
    """The number of replicas when it was last fetched."""

    def __init__(self, fetch: Callable[[], int], seconds: float = _SECONDS) -> None:
        """fetch: called in a thread every so many seconds; it may block, and it may fail."""
        self._fetch = fetch
        self._seconds = seconds
        self._count = 1

    def count(self) -> int:
        """The number, at least 1 for this replica."""
        return self._count

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Fetch the number from time to time while the context is open."""
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            try:
                self._count = max(1, await asyncio.to_thread(self._fetch))
            except Exception:
                # The fetch may fail in any way; the last number is still the best guess.
                logger.warning("the number of ingress replicas is not known", exc_info=True)
            await asyncio.sleep(self._seconds)

"""A bounded queue with round-robin over keys, for a few workers."""

import asyncio
from collections import OrderedDict, deque


class QueueFull(Exception):
    """The queue is full.

    waiting: the number of those that wait, of the same key if any.
    """

    def __init__(self, waiting: int) -> None:
        super().__init__(waiting)
        self.waiting = waiting


class FairQueue:
    """Lets `at_once` callers run; at most max_each of one key and max_all in total wait."""

    def __init__(self, max_each: int, max_all: int, at_once: int = 1) -> None:
        self._max_each = max_each
        self._max_all = max_all
        self._free = at_once
        self._num_waiting = 0
        self._queues: OrderedDict[bytes, deque[asyncio.Future[None]]] = OrderedDict()

    async def acquire(self, key: bytes) -> None:
        """Wait until the caller may run; QueueFull if too many wait. `release` must follow."""
        if self._free:
            self._free -= 1
            return
        own = len(self._queues.get(key, ()))
        if own >= self._max_each or self._num_waiting >= self._max_all:
            raise QueueFull(own or self._num_waiting)
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(key, deque()).append(admitted)
        self._num_waiting += 1
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.cancelled():
                self._remove(key, admitted)
            else:  # It was admitted just before it was cancelled, so it must give the room back.
                self.release()
            raise

    def release(self) -> None:
        """A caller has finished: admit the first one of the next key."""
        if not self._queues:
            self._free += 1
            return
        # The room goes to one that waits, not back to `_free`: else a new caller could overtake it.
        key, queue = next(iter(self._queues.items()))
        admitted = queue[0]
        self._remove(key, admitted)
        if key in self._queues:
            self._queues.move_to_end(key)
        if admitted.cancelled():
            # Its `acquire` has not run yet since the cancellation, so pass the room on.
            self.release()
        else:
            admitted.set_result(None)

    def _remove(self, key: bytes, admitted: asyncio.Future[None]) -> None:
        queue = self._queues.get(key)
        if queue is None or admitted not in queue:
            return
        queue.remove(admitted)
        self._num_waiting -= 1
        if not queue:
            del self._queues[key]

"""Work that several callers need at once runs once for all of them; on one event loop."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class Late(Exception):
    """The work took too long; it goes on for other callers, and for the next call."""


@dataclass
class _Flight:
    task: "asyncio.Task[Any]"
    since: float
    callers: int = 0


class SingleFlight:
    """Runs the work of each key once at a time; a caller that leaves does not cancel it."""

    def __init__(self) -> None:
        self._pending: dict[Hashable, _Flight] = {}

    async def once(
        self, key: Hashable, work: Callable[[], Awaitable[T]], patience_s: float | None = None
    ) -> T:
        """The result of `work`, shared by all callers of this key while it runs.

        Late when it has run for `patience_s`, no matter which caller began it; None: no limit.
        """
        loop = asyncio.get_running_loop()
        flight = self._pending.get(key)
        if flight is None:
            flight = _Flight(asyncio.ensure_future(work()), loop.time())
            self._pending[key] = flight
            flight.task.add_done_callback(partial(self._done, key))
        flight.callers += 1
        try:
            if patience_s is not None:
                left = flight.since + patience_s - loop.time()
                done, _ = await asyncio.wait({flight.task}, timeout=max(0.0, left))
                if not done:
                    raise Late
            result: T = await asyncio.shield(flight.task)
            return result
        finally:
            flight.callers -= 1

    def is_wanted(self, key: Hashable) -> bool:
        """Whether a caller waits for this work; threads may ask too."""
        flight = self._pending.get(key)
        return flight is not None and flight.callers > 0

    def _done(self, key: Hashable, task: "asyncio.Task[Any]") -> None:
        del self._pending[key]
        if not task.cancelled():
            task.exception()  # Reads the exception: all callers may have left.


def call_after_callers(call: Callable[[], None]) -> None:
    """Have `call` run once all callers of the current task have continued with its result.

    A task's callbacks run in the order in which they were added. Those of its callers were added
    before this one, so each caller resumes before `call` runs.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    task.add_done_callback(lambda _: loop.call_soon(call))


class BlockingCalls:
    """Runs calls that block on disk or network in threads, `width` of them at a time.

    A call that takes longer than `patience_s` does not count any more, so that files on a mount
    that hangs do not stop others; it continues. most: the limit of threads in all.
    """

    def __init__(
        self, name: str, width: int, patience_s: float | None = None, most: int | None = None
    ) -> None:
        self._slots = asyncio.Semaphore(width)
        self._patience_s = patience_s
        self._pool = ThreadPoolExecutor(most or width, thread_name_prefix=name)

    async def run(self, call: Callable[[], T]) -> T:
        """The call's result, or what it raises."""
        async with self._slots:
            future = asyncio.get_running_loop().run_in_executor(self._pool, call)
            await asyncio.wait({future}, timeout=self._patience_s)
        return await future

    def close(self) -> None:
        """Begin no more calls; those that run go on."""
        self._pool.shutdown(wait=False, cancel_futures=True)

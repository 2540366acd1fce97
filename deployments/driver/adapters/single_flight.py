"""What several ask for at once, and what is done but once for all of them; on one event loop."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class Late(Exception):
    """Not done in time; it goes on for others, and for who asks again."""


@dataclass(frozen=True)
class _Errand:
    task: "asyncio.Task[Any]"
    since: float


class SingleFlight:
    """Each errand is run once at a time; who leaves does not end it for the others."""

    def __init__(self) -> None:
        """None is under way."""
        self._pending: dict[Hashable, _Errand] = {}

    async def once(
        self,
        what: Hashable,
        work: Callable[[], Awaitable[Any]],
        patience_s: float | None = None,
    ) -> Any:
        """The result of `work`, shared by all who ask for it while it runs.

        Late when it has run for `patience_s`, since whoever began it; None waits to its end.
        """
        loop = asyncio.get_running_loop()
        errand = self._pending.get(what)
        if errand is None:
            errand = _Errand(asyncio.ensure_future(_awaited(work)), loop.time())
            self._pending[what] = errand
            errand.task.add_done_callback(partial(self._done, what))
        if patience_s is not None:
            left = errand.since + patience_s - loop.time()
            done, _ = await asyncio.wait({errand.task}, timeout=max(0.0, left))
            if not done:
                raise Late
        return await asyncio.shield(errand.task)

    def _done(self, what: Hashable, task: "asyncio.Task[Any]") -> None:
        del self._pending[what]
        if not task.cancelled():
            task.exception()  # Everybody who asked may have left.


def wait_for_all(call: Callable[[], None]) -> None:
    """At an errand's end: `call` as soon as all who asked have gone on with its result.

    A task's callbacks run in the order in which they were added. Those of who waits were added
    before this one, so what they call soon (who waits, to go on) comes before `call`.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    task.add_done_callback(lambda _: loop.call_soon(call))


class BlockingCalls:
    """Calls that block on disk or network, in threads, `width` of them at a time.

    A call that takes longer than `patience_s` gives its place to the next one and goes on, so that
    files on a mount that hangs do not stop those of others. `most`: threads there may be in all.
    """

    def __init__(
        self, name: str, width: int, patience_s: float | None = None, most: int | None = None
    ) -> None:
        """Threads are made when they are needed."""
        self._places = asyncio.Semaphore(width)
        self._patience_s = patience_s
        self._pool = ThreadPoolExecutor(most or width, thread_name_prefix=name)

    async def run(self, call: Callable[[], T]) -> T:
        """The call's result, or what it raises."""
        async with self._places:
            future = asyncio.get_running_loop().run_in_executor(self._pool, call)
            await asyncio.wait({future}, timeout=self._patience_s)
        return await future

    def close(self) -> None:
        """Begin no more calls; those that run go on."""
        self._pool.shutdown(wait=False, cancel_futures=True)


async def _awaited(work: Callable[[], Awaitable[Any]]) -> Any:
    return await work()

"""What several ask for at once, and what is done but once for all of them; on one event loop."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import Any


class Errands:
    """Each errand is run once at a time; who leaves does not end it for the others."""

    def __init__(self) -> None:
        """None is under way."""
        self._pending: dict[Hashable, asyncio.Task[Any]] = {}

    async def once(self, what: Hashable, work: Callable[[], Awaitable[Any]]) -> Any:
        """The result of `work`, shared by all who ask for it while it runs."""
        task = self._pending.get(what)
        if task is None:
            task = self._pending[what] = asyncio.ensure_future(_awaited(work))
            task.add_done_callback(partial(self._done, what))
        return await asyncio.shield(task)

    def _done(self, what: Hashable, task: "asyncio.Task[Any]") -> None:
        del self._pending[what]
        if not task.cancelled():
            task.exception()  # Everybody who asked may have left.


def when_all_have_it(call: Callable[[], None]) -> None:
    """At an errand's end: `call` as soon as all who asked have gone on with its result.

    A task's callbacks run in the order in which they were added. Those of who waits were added
    before this one, so what they call soon (who waits, to go on) comes before `call`.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    task.add_done_callback(lambda _: loop.call_soon(call))


async def _awaited(work: Callable[[], Awaitable[Any]]) -> Any:
    return await work()

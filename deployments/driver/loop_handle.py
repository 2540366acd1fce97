"""The event loop's handle of the engine loop: commands and queries down, results up."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from configs.wire.sleep import SleepMode
from deployments.driver.loop import Command, EngineLoop
from scheduler.scheduler import Scheduler

T = TypeVar("T")


class LoopFailed(RuntimeError):
    """The engine loop has failed, or was not started; the message says why."""


class LoopHandle:
    """Reaches the engine loop, which has its own thread, from the replica's event loop.

    All methods but `call_soon` must be called on the event loop.
    """

    def __init__(self) -> None:
        self._loop: EngineLoop | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._queries: set[asyncio.Future[Any]] = set()

    def listen(self) -> None:
        """Have `call_soon` use the running event loop."""
        self._event_loop = asyncio.get_running_loop()

    def start(self, loop: EngineLoop) -> None:
        """Start the engine loop; only then may commands be posted."""
        self._loop = loop
        loop.start()

    def stop(self) -> None:
        """End the engine loop and its ranks; blocks until both have ended."""
        if self._loop is not None:
            self._loop.stop()

    @property
    def started(self) -> bool:
        """Whether the engine loop was started."""
        return self._loop is not None

    @property
    def loop(self) -> EngineLoop:
        """The engine loop, once it was started."""
        assert self._loop is not None, "start comes first"
        return self._loop

    @property
    def asleep(self) -> bool:
        """Whether the ranks have ended until they are woken."""
        return self._loop is not None and self._loop.asleep

    @property
    def failure(self) -> str | None:
        """Why this replica cannot serve any more; None while it can."""
        return self._loop.failure if self._loop is not None else "not started"

    def post(self, command: Command) -> None:
        """Have the engine loop run `command(scheduler, now)` between two steps."""
        self.loop.post(command)

    async def ask(self, query: Callable[[Scheduler], T]) -> T:
        """The result of `query`, run between two steps; LoopFailed once the loop failed."""
        return await self._reply(lambda scheduler, reply: reply(query(scheduler)))

    async def sleep(self, mode: SleepMode) -> str:
        """End the ranks; returns why they do not sleep, "" if they do. LoopFailed as in `ask`."""
        return await self._reply(lambda _, reply: self.loop.sleep(mode, reply))

    async def wake(self) -> str:
        """Start the ranks; returns why they sleep on, "" if they run. LoopFailed as in `ask`."""
        return await self._reply(lambda _, reply: self.loop.wake(reply))

    async def _reply(self, command: Callable[[Scheduler, Callable[[T], None]], None]) -> T:
        """What a command on the engine loop's thread replies."""
        if self.failure is not None:
            raise LoopFailed(self.failure)
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queries.add(result)

        def reply(value: T) -> None:
            self.call_soon(_resolve, result, value)

        self.post(lambda scheduler, now: command(scheduler, reply))
        try:
            return await result
        finally:
            self._queries.discard(result)

    async def drain(self) -> None:
        """Return when all commands posted until now have run and their events were handled."""
        with contextlib.suppress(LoopFailed):  # A loop that failed sends no more events.
            await self.ask(lambda scheduler: None)

    def after_posted(self, callback: Callable[..., None], *arguments: object) -> None:
        """Call back on the event loop once all commands posted until now have run."""
        self.post(lambda scheduler, now: self.call_soon(callback, *arguments))

    def call_soon(self, callback: Callable[..., None], *arguments: object) -> None:
        """Call back on the event loop, from any thread; does nothing once it is closed."""
        assert self._event_loop is not None, "listen comes first"
        with contextlib.suppress(RuntimeError):
            self._event_loop.call_soon_threadsafe(callback, *arguments)

    def fail_queries(self) -> None:
        """Fail all open queries if the engine loop has failed: it runs no more commands."""
        if self.failure is None:
            return
        for result in self._queries:
            if not result.done():
                result.set_exception(LoopFailed(self.failure))


def _resolve(result: "asyncio.Future[T]", value: T) -> None:
    if not result.done():
        result.set_result(value)

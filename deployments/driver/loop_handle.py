"""The event loop's handle of the engine loop: commands and questions down, answers back up."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from deployments.driver.loop import Command, EngineLoop
from scheduler.events import Event
from scheduler.scheduler import Scheduler

T = TypeVar("T")


class LoopFailed(RuntimeError):
    """The engine loop has failed, or was not started; the message says why."""


class LoopHandle:
    """What the replica's event loop knows of the engine loop, which has a thread of its own.

    All methods but `call_soon` are called on the event loop.
    """

    def __init__(self) -> None:
        self._loop: EngineLoop | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._questions: set[asyncio.Future[Any]] = set()

    def listen(self) -> None:
        """Take the running event loop as the one that `call_soon` calls back on."""
        self._event_loop = asyncio.get_running_loop()

    def start(self, loop: EngineLoop) -> None:
        """Start the engine loop's thread; from now on commands reach it."""
        self._loop = loop
        loop.start()

    def stop(self) -> None:
        """End the engine loop and its ranks; blocks until both are gone."""
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
    def failure(self) -> str | None:
        """Why this replica cannot go on; None while it can."""
        return self._loop.failure if self._loop is not None else "not started"

    def post(self, command: Command) -> None:
        """Have the engine loop run `command(scheduler, now)` between two steps."""
        self.loop.post(command)

    async def ask(self, question: Callable[[Scheduler], T]) -> T:
        """The answer of `question`, taken between two steps; LoopFailed once the loop failed."""
        if self.failure is not None:
            raise LoopFailed(self.failure)
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def take(scheduler: Scheduler, now: float) -> Sequence[Event]:
            self.call_soon(_resolve, answer, question(scheduler))
            return []

        self._questions.add(answer)
        self.post(take)
        try:
            return await answer
        finally:
            self._questions.discard(answer)

    async def drain(self) -> None:
        """Return when all commands posted until now are done and their events were handled."""
        with contextlib.suppress(LoopFailed):  # A loop that failed sends no more events.
            await self.ask(lambda scheduler: None)

    def after_posted(self, callback: Callable[..., None], *arguments: object) -> None:
        """Call back on the event loop once all commands posted until now are done."""

        def done(scheduler: Scheduler, now: float) -> Sequence[Event]:
            self.call_soon(callback, *arguments)
            return []

        self.post(done)

    def call_soon(self, callback: Callable[..., None], *arguments: object) -> None:
        """Call back on the event loop, from any thread; nothing happens once that is closed."""
        assert self._event_loop is not None, "listen comes first"
        with contextlib.suppress(RuntimeError):
            self._event_loop.call_soon_threadsafe(callback, *arguments)

    def fail_questions(self) -> None:
        """Fail every open question if the engine loop has failed: nothing will answer it."""
        if self.failure is None:
            return
        for answer in self._questions:
            if not answer.done():
                answer.set_exception(LoopFailed(self.failure))


def _resolve(answer: "asyncio.Future[T]", value: T) -> None:
    if not answer.done():
        answer.set_result(value)

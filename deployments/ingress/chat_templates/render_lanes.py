"""A line of renderings before one process: each template has its turn after the others."""

import asyncio
import contextlib
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from deployments.ingress.chat_templates.rendering import HEAD, LENGTH, Rendered

# By the clock on the wall; for a process that hangs, not for one that is slow.
_HANGING_S = 120.0
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
_COMMAND = (
    sys.executable, "-c",
    f"import sys; sys.path.insert(0, {_PACKAGE_ROOT!r}); "
    "from deployments.ingress.chat_templates.rendering import serve; serve()",
)  # fmt: skip


class Full(Exception):
    """Too many wait already."""

    def __init__(self, waiting: int) -> None:
        """`waiting`: how many."""
        super().__init__(waiting)
        self.waiting = waiting


class Turns:
    """One at a time; those who wait are called by their keys in turn."""

    def __init__(self, max_each: int, max_all: int) -> None:
        """Of one key, and in all, so many may wait."""
        self._max_each = max_each
        self._max_all = max_all
        self._taken = False
        self._num_waiting = 0
        self._queues: OrderedDict[bytes, deque[asyncio.Future[None]]] = OrderedDict()

    async def take(self, key: bytes) -> None:
        """Wait for a turn; Full if it would be too long a wait."""
        if not self._taken:
            self._taken = True
            return
        own = len(self._queues.get(key, ()))
        if own >= self._max_each or self._num_waiting >= self._max_all:
            raise Full(own or self._num_waiting)
        called: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(key, deque()).append(called)
        self._num_waiting += 1
        try:
            await called
        except asyncio.CancelledError:
            if called.cancelled():
                self._leave(key, called)
            else:  # It was called in the same moment.
                self.give()
            raise

    def give(self) -> None:
        """The turn is over: call the next key's first."""
        if not self._queues:
            self._taken = False
            return
        key, queue = next(iter(self._queues.items()))
        called = queue[0]
        self._leave(key, called)
        if key in self._queues:
            self._queues.move_to_end(key)
        if called.cancelled():
            self.give()
        else:
            called.set_result(None)

    def _leave(self, key: bytes, called: asyncio.Future[None]) -> None:
        queue = self._queues.get(key)
        if queue is None or called not in queue:
            return
        queue.remove(called)
        self._num_waiting -= 1
        if not queue:
            del self._queues[key]


class Lane:
    """One process, started by the first rendering, and the line before it."""

    def __init__(
        self, limit_s: float, max_each: int, max_all: int, command: Sequence[str] = _COMMAND
    ) -> None:
        """A rendering may compute for `limit_s`; of one key, and in all, so many may wait."""
        self.limit_s = limit_s
        self._turns = Turns(max_each, max_all)
        self._command = command
        self._process: asyncio.subprocess.Process | None = None

    async def ask(
        self, key: bytes, asked: bytes, wanted: Callable[[], bool], learn: Callable[[bool], None]
    ) -> Rendered | None:
        """The answer, None if it is not wanted any more when its turn has come.

        learn: told whether it was late, before the next has its turn. Raises Full, and OSError
        when the process cannot be had or is lost.
        """
        await self._turns.take(key)
        if not wanted():
            self._turns.give()
            return None
        # Who leaves does not end it: half an answer would be the next one's.
        rendering = asyncio.ensure_future(self._learning(asked, learn))
        rendering.add_done_callback(self._done)
        return await asyncio.shield(rendering)

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _done(self, rendering: "asyncio.Future[Rendered]") -> None:
        if not rendering.cancelled():
            rendering.exception()  # It may be nobody's by now.
        self._turns.give()

    async def _learning(self, asked: bytes, learn: Callable[[bool], None]) -> Rendered:
        answer = await self._exchange(asked)
        learn(answer.late)
        return answer

    async def _exchange(self, asked: bytes) -> Rendered:
        done = False
        try:
            async with asyncio.timeout(_HANGING_S):
                answer = await self._answer(asked)
            done = True
            return msgspec.msgpack.decode(answer, type=Rendered)
        except asyncio.IncompleteReadError as error:
            raise ConnectionError("it ended") from error
        finally:
            if not done:
                await self.close()

    async def _answer(self, asked: bytes) -> bytes:
        process = await self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(HEAD.pack(len(asked), self.limit_s) + asked)
        await process.stdin.drain()
        (size,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
        return await process.stdout.readexactly(size)

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            pipe = asyncio.subprocess.PIPE
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=pipe, stdout=pipe
            )
        return self._process

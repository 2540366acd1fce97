"""A rendering process with a fair queue."""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from deployments.ingress.chat_templates.rendering import Rendered
from deployments.ingress.processes.fair_queue import FairQueue
from deployments.ingress.processes.worker import WorkerProcess, python_command


class RenderLane:
    """Renders one task at a time, round-robin over keys.

    limit_s: CPU seconds of one rendering.
    """

    def __init__(
        self, limit_s: float, max_each: int, max_all: int, command: Sequence[str] = ()
    ) -> None:
        self.limit_s = limit_s
        module = "deployments.ingress.chat_templates.rendering"
        self.worker = WorkerProcess(command or python_command(module, limit_s))
        self._queue = FairQueue(max_each, max_all)

    async def render(
        self,
        key: bytes,
        task: bytes,
        is_wanted: Callable[[], bool],
        on_reply: Callable[[bool], None],
    ) -> Rendered | None:
        """Render a task; None if `is_wanted` is False when its turn comes.

        on_reply: called with `Rendered.late` before the next task runs. Raises QueueFull, and
        OSError if the process cannot start or ends.
        """
        await self._queue.acquire(key)
        if not is_wanted():
            self._queue.release()
            return None
        # A client that leaves must not cancel this: the process would have to be killed.
        rendering = asyncio.ensure_future(self._run(task, on_reply))
        rendering.add_done_callback(self._done)
        return await asyncio.shield(rendering)

    async def close(self) -> None:
        """End the process."""
        await self.worker.close()

    def _done(self, rendering: "asyncio.Future[Rendered]") -> None:
        if not rendering.cancelled():
            rendering.exception()  # Read, so that asyncio does not log it if the client is gone.
        self._queue.release()

    async def _run(self, task: bytes, on_reply: Callable[[bool], None]) -> Rendered:
        reply = msgspec.msgpack.decode(await self.worker.send(task), type=Rendered)
        on_reply(reply.late)
        return reply

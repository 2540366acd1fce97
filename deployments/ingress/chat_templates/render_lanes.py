"""One rendering process and the fair queue before it."""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from deployments.ingress.chat_templates.rendering import Rendered
from deployments.ingress.processes.fair_queue import FairQueue
from deployments.ingress.processes.worker import WorkerProcess, python_command


class RenderLane:
    """Renders one task at a time; keys are served in turn.

    limit_s: seconds that a rendering may compute.
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
        """The reply, None if it is no longer wanted when it may run.

        on_reply: called with `late` before the next one runs. Raises QueueFull, and OSError when
        the process cannot be started or is lost.
        """
        await self._queue.acquire(key)
        if not is_wanted():
            self._queue.release()
            return None
        # A client that leaves must not end the process, which others use.
        rendering = asyncio.ensure_future(self._run(task, on_reply))
        rendering.add_done_callback(self._done)
        return await asyncio.shield(rendering)

    async def close(self) -> None:
        """End the process."""
        await self.worker.close()

    def _done(self, rendering: "asyncio.Future[Rendered]") -> None:
        if not rendering.cancelled():
            rendering.exception()  # Read it: the client may have left.
        self._queue.release()

    async def _run(self, task: bytes, on_reply: Callable[[bool], None]) -> Rendered:
        reply = await self._exchange(task)
        on_reply(reply.late)
        return reply

    async def _exchange(self, task: bytes) -> Rendered:
        return msgspec.msgpack.decode(await self.worker.send(task), type=Rendered)

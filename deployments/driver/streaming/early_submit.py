"""Early submits: requests that came by socket before their calls, and run at once.

Lives on the replica's event loop. The call that follows attaches to the running request. Until
then no tokens are sent, and a request without a call is cancelled after a while. A request never
runs twice at the same time. A call may overtake its early submit, which is then ignored, however
late it comes.
"""

import asyncio
import contextvars
from collections import OrderedDict
from typing import NamedTuple, Protocol

from deployments.contract import Completion, GenerateRequest, ReplyAddress

_PATIENCE_SECONDS = 10.0
_REMEMBERED = 1 << 12


class Generator(Protocol):
    """Runs requests to their end (`RequestHandler`)."""

    async def generate(self, request: GenerateRequest, reply_to: ReplyAddress) -> Completion:
        """Run a request; cancelling this call ends it."""
        ...


class TokenGate(Protocol):
    """Holds a request's tokens until its call arrives (`Streams`)."""

    def hold(self, request_id: str) -> None:
        """Send none of this request's tokens from now on."""
        ...

    def release(self, request_id: str) -> None:
        """Send the tokens that were held, and those that follow."""
        ...


class LoopBarrier(Protocol):
    """Waits for the engine loop (`LoopHandle`)."""

    async def drain(self) -> None:
        """Return when the engine loop has done all that was posted until now."""
        ...


class _EarlyRequest(NamedTuple):
    """A request that runs and waits for its call.

    task: the run.
    since: when it began, in seconds of the event loop.
    expiry: the timer that withdraws it.
    """

    request: GenerateRequest
    reply_to: ReplyAddress
    task: asyncio.Task[Completion]
    since: float
    expiry: asyncio.TimerHandle


class EarlySubmits:
    """The calls of one driver, and the requests that run before theirs.

    num_attached: calls that found their request running.
    lead_seconds: the sum of the times by which those requests were early.
    """

    def __init__(
        self,
        generator: Generator,
        tokens: TokenGate,
        barrier: LoopBarrier,
        patience_s: float = _PATIENCE_SECONDS,
    ) -> None:
        """patience_s: how long a request waits for its call before it is cancelled."""
        self._generator = generator
        self._gate = tokens
        self._barrier = barrier
        self._patience_s = patience_s
        self._waiting: dict[str, _EarlyRequest] = {}
        self._calls: set[str] = set()
        self._leaving: dict[str, asyncio.Task[Completion]] = {}
        self._seen: OrderedDict[str, None] = OrderedDict()
        self.num_attached = 0
        self.lead_seconds = 0.0

    def __len__(self) -> int:
        """How many requests wait for their calls."""
        return len(self._waiting)

    def start(self, request: GenerateRequest, reply_to: ReplyAddress) -> None:
        """Run a request before its call; ignored if the request or its call came before."""
        if request.id in self._waiting or request.id in self._calls or request.id in self._seen:
            return
        loop = asyncio.get_running_loop()
        # This task has the context of the request that dialled; the new one must not inherit it.
        context = contextvars.Context()
        task = loop.create_task(self._generator.generate(request, reply_to), context=context)
        # In time: the task does not start before this method returns.
        self._gate.hold(request.id)
        task.add_done_callback(lambda ended: self._task_ended(request.id, ended))
        expiry = loop.call_later(self._patience_s, self.withdraw, request.id)
        self._waiting[request.id] = _EarlyRequest(request, reply_to, task, loop.time(), expiry)

    async def call(self, request: GenerateRequest, reply_to: ReplyAddress) -> Completion:
        """The completion of a call: of its early submit, else of a run that begins now.

        Cancelling this call ends the request.
        """
        self._calls.add(request.id)
        try:
            early = self._waiting.get(request.id)
            if early is not None and (early.request, early.reply_to) == (request, reply_to):
                return await self._attach(early)
            self.withdraw(request.id)
            await self._wait_until_gone(request.id)
            return await self._generator.generate(request, reply_to)
        finally:
            self._calls.discard(request.id)
            self._mark_seen(request.id)

    def withdraw(self, request_id: str) -> None:
        """Cancel an early submit: its call is not coming, or not soon. Ignored once attached."""
        early = self._waiting.pop(request_id, None)
        if early is not None:
            early.expiry.cancel()
            early.task.cancel()
            self._leaving[request_id] = early.task
            self._mark_seen(request_id)

    def ingress_lost(self, address: ReplyAddress) -> None:
        """Withdraw the early submits of an ingress replica that is gone with its calls."""
        for request_id in [r for r, early in self._waiting.items() if early.reply_to == address]:
            self.withdraw(request_id)

    def close(self) -> None:
        """Cancel all that wait for their calls."""
        for request_id in list(self._waiting):
            self.withdraw(request_id)

    async def _attach(self, early: _EarlyRequest) -> Completion:
        # From here on `withdraw` does not find it: only its call can end it.
        del self._waiting[early.request.id]
        early.expiry.cancel()
        self.num_attached += 1
        self.lead_seconds += asyncio.get_running_loop().time() - early.since
        self._gate.release(early.request.id)
        return await early.task

    async def _wait_until_gone(self, request_id: str) -> None:
        """Wait until an earlier run of this id sends no more events: they look the same."""
        if request_id in self._leaving:
            await asyncio.wait([self._leaving[request_id]])
        if request_id in self._seen:
            await self._barrier.drain()

    def _task_ended(self, request_id: str, task: asyncio.Task[Completion]) -> None:
        self._gate.release(request_id)
        self._leaving.pop(request_id, None)
        if not task.cancelled():
            task.exception()  # An attached call raises it; without one nothing reads it.

    def _mark_seen(self, request_id: str) -> None:
        """Ignore further early submits of this request."""
        self._seen[request_id] = None
        self._seen.move_to_end(request_id)
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)

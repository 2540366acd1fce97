"""Requests that came ahead of their calls: begun at once, adopted by the call that follows.

Lives on the replica's event loop. Serve's call stays the truth: what it does not adopt in time is
cancelled, none of its tokens leave before, and a request never runs twice at the same time. A call
may also overtake its head start, which then changes nothing, however late it comes.
"""

import asyncio
import contextvars
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, Protocol

from deployments.contract import Completion, GenerateRequest, ReplyAddress

_PATIENCE_SECONDS = 10.0
_REMEMBERED = 1 << 12

Run = Callable[[GenerateRequest, ReplyAddress], Coroutine[Any, Any, Completion]]


class TokenGate(Protocol):
    """What keeps a request's tokens back until its call is here."""

    def hold(self, request_id: str) -> None:
        """Send none of this request's from now on."""
        ...

    def release(self, request_id: str) -> None:
        """Send those that were held, and what follows."""
        ...


class _EarlyRequest(NamedTuple):
    """A request that waits for its call, since a time in seconds; `expiry` gives it up."""

    request: GenerateRequest
    reply_to: ReplyAddress
    task: asyncio.Task[Completion]
    since: float
    expiry: asyncio.TimerHandle


class EarlySubmits:
    """The calls of one driver, and the requests that are ahead of theirs.

    num_attached: calls that found their request running. lead_seconds: by how much, all together.
    """

    def __init__(
        self,
        run: Run,
        tokens: TokenGate,
        settle: Callable[[], Awaitable[object]],
        patience_s: float = _PATIENCE_SECONDS,
    ) -> None:
        """`run` runs a request to its end; when it is cancelled, `settle` waits until it is gone.

        patience_s: how long a request is kept whose call does not come.
        """
        self._run = run
        self._gate = tokens
        self._drain = settle
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
        """Run a request ahead of its call; nothing if either was here already."""
        if request.id in self._waiting or request.id in self._calls or request.id in self._seen:
            return
        loop = asyncio.get_running_loop()
        # The socket's reader bears the context of the request that dialled: not this one's.
        context = contextvars.Context()
        task = loop.create_task(self._run(request, reply_to), context=context)
        self._gate.hold(request.id)
        task.add_done_callback(lambda ended: self._task_ended(request.id, ended))
        expiry = loop.call_later(self._patience_s, self.withdraw, request.id)
        self._waiting[request.id] = _EarlyRequest(request, reply_to, task, loop.time(), expiry)

    async def call(self, request: GenerateRequest, reply_to: ReplyAddress) -> Completion:
        """A call's answer: of the request that is ahead of it, else it begins now.

        A caller that goes away ends the request.
        """
        self._calls.add(request.id)
        try:
            begun = self._waiting.get(request.id)
            if begun is not None and (begun.request, begun.reply_to) == (request, reply_to):
                return await self._attach(begun)
            self.withdraw(request.id)
            await self._wait_until_gone(request.id)
            return await self._run(request, reply_to)
        finally:
            self._calls.discard(request.id)
            self._remember(request.id)

    def withdraw(self, request_id: str) -> None:
        """Its call is not coming, or not soon; nothing to one that was adopted."""
        begun = self._waiting.pop(request_id, None)
        if begun is not None:
            begun.expiry.cancel()
            begun.task.cancel()
            self._leaving[request_id] = begun.task
            self._remember(request_id)

    def ingress_lost(self, address: ReplyAddress) -> None:
        """This ingress replica is gone, and its calls with it."""
        for request_id in [r for r, begun in self._waiting.items() if begun.reply_to == address]:
            self.withdraw(request_id)

    def close(self) -> None:
        """Cancel all that wait for their calls."""
        for request_id in list(self._waiting):
            self.withdraw(request_id)

    async def _attach(self, begun: _EarlyRequest) -> Completion:
        del self._waiting[begun.request.id]
        begun.expiry.cancel()
        self.num_attached += 1
        self.lead_seconds += asyncio.get_running_loop().time() - begun.since
        self._gate.release(begun.request.id)
        return await begun.task

    async def _wait_until_gone(self, request_id: str) -> None:
        """Wait until nothing is left of what was here by this id, to be mistaken for what comes."""
        if request_id in self._leaving:
            await asyncio.wait([self._leaving[request_id]])
        if request_id in self._seen:
            await self._drain()

    def _task_ended(self, request_id: str, task: asyncio.Task[Completion]) -> None:
        self._gate.release(request_id)
        self._leaving.pop(request_id, None)
        if not task.cancelled():
            task.exception()  # The call that adopts it raises it; else nobody asks for it.

    def _remember(self, request_id: str) -> None:
        """No head start of this request is taken any more."""
        self._seen[request_id] = None
        self._seen.move_to_end(request_id)
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)

"""Server-sent events: their format, and a response that stops when its client leaves."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.ingress.http.errors import RequestError

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b":\n\n"
"""A comment, which clients skip. Proxies close connections that are silent for too long."""

R = TypeVar("R")

_encode = msgspec.json.Encoder().encode


def data(value: object) -> bytes:
    """One event. JSON has no raw line breaks, so one `data:` line is enough."""
    return b"data: " + _encode(value) + b"\n\n"


class ClientGone(Exception):
    """The client has closed the connection."""


async def unless_gone(receive: Receive, work: Awaitable[R]) -> R:
    """Return the result of `work`; if the client leaves, cancel it and raise ClientGone."""
    working = asyncio.ensure_future(work)
    try:
        await wait_unless_gone(receive, working)
        return await working
    finally:
        # The request must not end before its work, which may be a call of the driver.
        if _cancelled(working):
            await asyncio.gather(working, return_exceptions=True)


async def wait_unless_gone(
    receive: Receive, working: "asyncio.Future[R]", seconds: float | None = None
) -> None:
    """Wait until `working` is done, at most `seconds`; ClientGone if the client leaves first."""
    # When `working` is done this awaits nothing else, not even the end of `leaving`: each round of
    # a busy event loop would delay the reply.
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        both: set[asyncio.Future[Any]] = {working, leaving}
        await asyncio.wait(both, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if working.done() or not leaving.done():
            return
        if leaving.exception() is None:
            raise ClientGone
        # `receive` failed, so it cannot report whether the client left: just wait.
        await asyncio.wait({working}, timeout=seconds)
    finally:
        _cancelled(leaving)


def _cancelled(task: "asyncio.Future[R]") -> bool:
    """Cancel a task that still runs; else read its exception, so that asyncio does not log it."""
    if not task.done():
        return task.cancel()
    if not task.cancelled():
        task.exception()
    return False


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events as they come; a RequestError on the way becomes the last event.

    `first` was made before: a failure up to then still had a status of its own. `error_body` makes
    the last event's data, or all of its bytes. A comment is sent whenever nothing was for
    `keep_alive` seconds.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        error_body: Callable[[RequestError], object],
        headers: Mapping[str, str],
        keep_alive: float,
    ) -> None:
        """first: sent with the status. events: the rest; closed at the end in any case."""
        self.status_code = 200
        self.background = None
        self._first = first
        self._events = events
        self._error_body = error_body
        self._keep_alive = keep_alive
        self._sent = 0.0
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the events end or the client leaves."""
        try:
            # Not in a task of its own, which would delay the first event by a round of the loop.
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send(send, self._first)
            await unless_gone(receive, self._send_rest(send))
        except (ClientGone, OSError):
            pass
        finally:
            await self._events.aclose()

    async def _send_rest(self, send: Send) -> None:
        heart = asyncio.create_task(self._beat(send))
        try:
            async for event in self._events:
                await self._send(send, event)
        except RequestError as error:
            body = self._error_body(error)
            await self._send(send, body if isinstance(body, bytes) else data(body))
        finally:
            # Before the last message: a comment after it would break the connection.
            heart.cancel()
            await asyncio.gather(heart, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, chunk: bytes) -> None:
        self._sent = time.monotonic()
        await send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _beat(self, send: Send) -> None:
        """Send a comment after each silence. One sleeping task, so that events cost nothing."""
        with contextlib.suppress(OSError):
            while True:
                silent = time.monotonic() - self._sent
                if silent >= self._keep_alive:
                    await self._send(send, KEEP_ALIVE)
                    silent = 0.0
                await asyncio.sleep(self._keep_alive - silent)

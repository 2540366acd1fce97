"""Drains an ingress replica: refuses new requests, and ends the running ones in time."""

import asyncio

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.contract import ErrorKind
from deployments.ingress.generation.engine import EngineClient
from deployments.ingress.http.error_responses import error_response
from deployments.ingress.http.errors import RequestError

_CLOSING = "the server is shutting down: send the request again"
_ERROR_EVENT_SECONDS = 5.0
"""Time to write the error events of requests that were ended."""


class ReplicaDrain:
    """Counts open requests, and ends them on `run`. Use it on the application's event loop.

    begun: the replica drains.
    """

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.begun = False

    async def run(self, seconds: float) -> None:
        """Refuse new requests, and return when the running ones have ended.

        After `seconds` they are ended as unavailable: with an error event in a stream, else with a
        503. A second call with fewer seconds ends them earlier.
        """
        self.begun = True
        if not await self._idle_within(seconds):
            self._engine.end_calls(closing)
            await self._idle_within(_ERROR_EVENT_SECONDS)

    def opened(self) -> None:
        """Count a request that begins."""
        self._num_open += 1
        self._idle.clear()

    def closed(self) -> None:
        """Count a request that ends."""
        self._num_open -= 1
        if not self._num_open:
            self._idle.set()

    async def _idle_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


class DrainGate:
    """Middleware before all routes. A draining replica refuses all, so health checks fail too."""

    def __init__(self, app: ASGIApp, drain: ReplicaDrain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count a request while it runs, or reply with 503."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._drain.begun:
            request = Request(scope)
            reply = error_response(request, closing())
            reply.headers["connection"] = "close"
            await reply(scope, receive, send)
            return
        self._drain.opened()
        try:
            await self._app(scope, receive, send)
        finally:
            self._drain.closed()


def closing() -> RequestError:
    """The error of new and of ended requests while the replica drains."""
    return RequestError(ErrorKind.UNAVAILABLE, _CLOSING, retry_after_s=1.0)

"""Drains an ingress replica: it takes no new requests and ends the running ones."""

import asyncio

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.contract import ErrorKind
from deployments.ingress.generation.engine import EngineClient
from deployments.ingress.http.error_responses import error_response
from deployments.ingress.http.errors import RequestError

_CLOSING = "the server is shutting down: send the request again"
_ERROR_EVENT_SECONDS = 5.0
"""How long the error events of requests that were ended may take to be written."""


class ReplicaDrain:
    """Counts open requests and ends them on `run`; used on the application's event loop."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._num_open = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self.begun = False

    async def run(self, seconds: float) -> None:
        """Refuse new requests, and return when the running ones have ended.

        After `seconds` they end as unavailable: by an error event in a stream, else by a 503. A
        later call with fewer seconds counts.
        """
        self.begun = True
        if not await self._quiet_within(seconds):
            self._engine.end_calls(closing)
            await self._quiet_within(_ERROR_EVENT_SECONDS)

    def opened(self) -> None:
        """A request has come."""
        self._num_open += 1
        self._quiet.clear()

    def closed(self) -> None:
        """One has ended."""
        self._num_open -= 1
        if not self._num_open:
            self._quiet.set()

    async def _quiet_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True


class DrainGate:
    """Middleware before all routes; a draining replica refuses everything, health checks too."""

    def __init__(self, app: ASGIApp, drain: ReplicaDrain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count a request while it runs, or answer 503."""
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
    """The error of requests that come, or still run, while the replica drains."""
    return RequestError(ErrorKind.UNAVAILABLE, _CLOSING, retry_after_s=1.0)

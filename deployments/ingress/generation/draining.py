"""The end of an ingress replica's service: no new requests, and an end for those that it has."""

import asyncio

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.contract import ErrorKind
from deployments.ingress.generation.engine import EngineClient
from deployments.ingress.http.error_responses import error_response
from deployments.ingress.http.errors import RequestError

_CLOSING = "the server is shutting down: send the request again"
_LAST_WORDS_SECONDS = 5.0
"""How long the error events of requests that were ended may take to be written."""


class Drain:
    """Counts what is open, and ends it when asked; lives on the application's event loop."""

    def __init__(self, engine: EngineClient) -> None:
        """Requests are taken."""
        self._engine = engine
        self._num_open = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self.begun = False

    async def run(self, seconds: float) -> None:
        """Take no more requests, and return when those that run have ended.

        After `seconds` they end as unavailable: by an error event in a stream, else by a 503. A
        later call with fewer seconds counts.
        """
        self.begun = True
        if not await self._quiet_within(seconds):
            self._engine.end_calls(closing)
            await self._quiet_within(_LAST_WORDS_SECONDS)

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
    """Stands before all routes; a replica that drains refuses, also health checks."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        """Stand before `app`."""
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
    """What a request is told that comes or runs too late."""
    return RequestError(ErrorKind.UNAVAILABLE, _CLOSING, retry_after_s=1.0)

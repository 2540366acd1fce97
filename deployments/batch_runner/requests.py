"""Sends a batch's requests to an application in this process, under their key's permissions."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import httpx
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from deployments.ingress.access.keys import Grant

LONGEST_WAIT_S = 60.0
LONGEST_OUTAGE_S = 1800.0
_AWAY = 503
_URL = "http://batch"


class LineReply(NamedTuple):
    """The reply to one request; retry_after_s: when to send it again, if the reply says so."""

    status: int
    body: bytes
    retry_after_s: float | None

    @property
    def is_refusal(self) -> bool:
        """Whether the server is busy or away, or a quota used up: not that the request is wrong."""
        return self.status in (429, 503, 529)

    def seconds_to_wait(self, backoff_s: float) -> float:
        """When to send a refused request again; backoff_s: where the reply does not say it."""
        return min(self.retry_after_s or backoff_s, LONGEST_WAIT_S)


SendRequest = Callable[[str, bytes], Awaitable[LineReply]]
"""Sends one body to one path."""


class UnknownKey(Exception):
    """The batch's API key is not one of the server's any more."""


def sender(app: FastAPI, key: str) -> SendRequest:
    """Sends requests to `app` as the key of this name; UnknownKey if there is none."""
    grant: Grant | None = app.state.keys.of_batch(key)
    if grant is None:
        raise UnknownKey(key)

    async def granted(scope: Scope, receive: Receive, send: Send) -> None:
        # A front of several bases replaces it by the same key's permissions for the base.
        await app({**scope, "state": {"grant": grant}}, receive, send)

    # An exception of the application is a reply of status 500, as it is for other clients.
    transport = httpx.ASGITransport(app=granted, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url=_URL, timeout=None)

    async def send(path: str, body: bytes) -> LineReply:
        reply = await client.post(path, content=body, headers={"content-type": "application/json"})
        wait = reply.headers.get("retry-after")
        return LineReply(reply.status_code, reply.content, None if wait is None else float(wait))

    return send


async def send_until_done(send: SendRequest, path: str, body: bytes) -> LineReply:
    """Send one request until the server does not refuse it.

    Where nothing ends it from outside, an adapter that cannot be had must not keep it for ever.
    """
    backoff, began = 1.0, time.monotonic()
    while (reply := await send(path, body)).is_refusal:
        if reply.status == _AWAY and time.monotonic() - began > LONGEST_OUTAGE_S:
            return reply
        await asyncio.sleep(reply.seconds_to_wait(backoff))
        backoff = min(2 * backoff, LONGEST_WAIT_S)
    return reply

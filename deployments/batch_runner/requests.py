"""Sends a batch's requests to an application in this process, under their key's permissions."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import httpx
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from deployments.ingress.access.keys import Grant

_URL = "http://batch"


class LineReply(NamedTuple):
    """The reply to one request; retry_after_s: when to send it again, if the reply says so."""

    status: int
    body: bytes
    retry_after_s: float | None


SendRequest = Callable[[str, bytes], Awaitable[LineReply]]
"""Sends one body to one path."""


# Replies that say that the server is busy or away, not that the request is wrong.
_RETRIED = frozenset({429, 503, 529})
_LONGEST_WAIT = 60.0


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
    """Send one request until the server is not too busy for it."""
    wait = 1.0
    while (reply := await send(path, body)).status in _RETRIED:
        await asyncio.sleep(min(reply.retry_after_s or wait, _LONGEST_WAIT))
        wait = min(2 * wait, _LONGEST_WAIT)
    return reply

"""Refuses headers that Ray Serve cannot decode; Serve would reply with 500.

Serve decodes some headers of every request, as UTF-8, before any route. So this middleware must run
before Serve: Serve calls `middlewares` when it starts a replica's HTTP server.
"""

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.ingress.http.error_responses import status_response

CALLBACK = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{__name__}:middlewares"}
"""Names `middlewares` for Serve, in the environment of a replica or of its Python proxy."""

# The headers that Serve decodes, in the form in which it compares names.
READ = frozenset({
    b"x_request_id", b"serve_multiplexed_model_id", b"x_request_timeout_seconds",
    b"x_request_disconnect_disabled", b"x_session_id", b"traceparent", b"tracestate",
})  # fmt: skip


class HeaderBytes:
    """Replies with 400 if such a header has other bytes than printable ASCII."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or reply with 400."""
        unreadable = [_shown(name) for name, value in scope.get("headers", ()) if _bad(name, value)]
        if scope["type"] == "http" and unreadable:
            message = f"the header `{unreadable[0]}` must be printable ASCII"
            await status_response(Request(scope), 400, message)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _bad(name: bytes, value: bytes) -> bool:
    if not name.isascii():
        return True
    if name.lower().replace(b"-", b"_") not in READ:
        return False
    return not all(0x20 <= byte < 0x7F for byte in value)


def _shown(name: bytes) -> str:
    return name.decode("ascii", "replace")


def middlewares() -> list[Middleware]:
    """The middleware that Serve runs before its own server."""
    return [Middleware(HeaderBytes)]

"""Refuses headers that Ray Serve could not read: it answers such a request with 500.

Serve reads some headers of every request before any route, as UTF-8. So this stands before Serve:
it calls `middlewares` when it starts a replica's HTTP server (its callback for the HTTP proxy).
"""

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.ingress.http.error_responses import status_response

CALLBACK = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{__name__}:middlewares"}
"""The variable by which Serve finds it, for the process of a replica or of its Python proxy."""

# By their names as Serve compares them.
READ = frozenset({
    b"x_request_id", b"serve_multiplexed_model_id", b"x_request_timeout_seconds",
    b"x_request_disconnect_disabled", b"x_session_id", b"traceparent", b"tracestate",
})  # fmt: skip


class HeaderBytes:
    """Answers 400 where such a header has other bytes than printable ASCII."""

    def __init__(self, app: ASGIApp) -> None:
        """Stand before `app`."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Look, and let it pass or answer."""
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
    """What Serve puts before its own server."""
    return [Middleware(HeaderBytes)]

"""Middleware that checks the API key before the request's body is read."""

from dataclasses import replace

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.contract import ErrorKind
from deployments.ingress.access.keys import Grant, Keys, api_key
from deployments.ingress.http.error_responses import error_response, route_path
from deployments.ingress.http.errors import RequestError
from deployments.ingress.pages.reference import OPEN_PATHS

# Load balancers have no key, and the pages are where a user enters one.
_OPEN = frozenset({"/", "/health", "/ping", "/playground"}) | OPEN_PATHS


class KeyGate:
    """Checks the key of every request, so that a new route is never open by mistake.

    It puts the caller's `Grant` into the request's state (`keys.grant_of`).
    """

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or reply with 401 or 429."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        # A batch's requests come from this process, with their grant; none can come by HTTP.
        given = scope.get("state", {}).get("grant")
        try:
            grant = given if isinstance(given, Grant) else self._grant(request)
            if not _reads(request):
                grant.quota.count_request()
        except RequestError as error:
            await error_response(request, error)(scope, receive, send)
            return
        # The server may use one state for all requests, so it is copied, not changed.
        state = {**scope.get("state", {}), "grant": grant}
        await self._app({**scope, "state": state}, receive, send)

    def _grant(self, request: Request) -> Grant:
        grant = self._keys.grant(api_key(request))
        if grant is None:
            if _reads(request) and route_path(request) in _OPEN:
                return Grant(patterns=())
            message = "no valid API key: send one as `Authorization: Bearer …` or `x-api-key`"
            raise RequestError(ErrorKind.UNAUTHORIZED, message)
        if grant.admin and not grant.known and self._keys.is_from_elsewhere(request):
            grant = replace(grant, admin=False)
        return grant


def _reads(request: Request) -> bool:
    return request.method in ("GET", "HEAD")

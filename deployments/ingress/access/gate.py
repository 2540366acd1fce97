"""Middleware that checks the API key before anything else of a request is read."""

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.contract import ErrorKind
from deployments.ingress.access.keys import Grant, Keys, bearer
from deployments.ingress.http.error_responses import error_response, route_path
from deployments.ingress.http.errors import RequestError
from deployments.ingress.pages.reference import OPEN_PATHS

# Balancers have no key, and pages must load before a key can be typed into them.
_OPEN = frozenset({"/", "/health", "/ping", "/playground"}) | OPEN_PATHS


class KeyGate:
    """Checks every route, so that a new route is closed until its caller has a key.

    It answers before a body is read, and leaves what the caller may do in the request's state.
    """

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401 or 429."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        try:
            grant = self._admit(request)
        except RequestError as error:
            await error_response(request, error)(scope, receive, send)
            return
        # A server may give all requests one state, so it is not written into.
        state = {**scope.get("state", {}), "grant": grant}
        await self._app({**scope, "state": state}, receive, send)

    def _admit(self, request: Request) -> Grant:
        given = self._keys.grant(bearer(request))
        reads = request.method in ("GET", "HEAD")
        if given is None:
            if reads and route_path(request) in _OPEN:
                return Grant(patterns=())
            message = "no valid API key: send one as `Authorization: Bearer …`"
            raise RequestError(ErrorKind.UNAUTHORIZED, message)
        if not reads:
            given.quota.count_request()
        return given

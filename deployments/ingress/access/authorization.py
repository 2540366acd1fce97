"""The caller's token for private adapters."""

from starlette.requests import Request

from deployments.ingress.access.keys import bearer, caller


def bearer_token(request: Request) -> str | None:
    """The hub's token: `x-hub-token`, else the bearer token where that is no API key of ours."""
    given = request.headers.get("x-hub-token", "").strip()
    if given:
        return given
    return None if caller(request).known else bearer(request)

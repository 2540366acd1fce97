"""The caller's token for private adapters."""

from starlette.requests import Request

# OpenAI's client cannot do without a key; these are what users of keyless servers write.
_PLACEHOLDERS = frozenset({"", "-", "empty", "none", "null", "dummy"})


def bearer_token(request: Request) -> str | None:
    """The token of `Authorization: Bearer …`, None without one or with a placeholder."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or token.lower() in _PLACEHOLDERS:
        return None
    return token

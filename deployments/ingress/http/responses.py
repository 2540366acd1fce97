"""JSON responses."""

import msgspec
from starlette.responses import Response

_encode = msgspec.json.Encoder().encode


def json_response(
    value: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A response with this value as JSON."""
    return Response(_encode(value), status, headers, media_type="application/json")

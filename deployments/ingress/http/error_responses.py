"""Error responses in the dialect of the request's route."""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from deployments.ingress.http.errors import (
    ERROR_SHAPES,
    LoraxError,
    OpenAIError,
    RequestError,
    invalid,
    lorax_error,
    openai_error,
    retry_headers,
)
from deployments.ingress.http.responses import json_response

_GENERATING = frozenset({"/", "/generate", "/generate_stream", "/invocations",
                         "/v1/completions", "/v1/chat/completions",
                         "/v1/responses", "/embed", "/v1/embeddings"})  # fmt: skip


def error_response(request: Request, error: RequestError, status: int | None = None) -> Response:
    """The error's status, body and headers; it is counted once."""
    _count(request, error)
    row = ERROR_SHAPES[error.kind]
    openai = speaks_openai(request)
    known = row.openai_status if openai else row.lorax_status
    body = openai_error(error) if openai else lorax_error(error)
    headers = retry_headers(error)
    if known == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(body, status or known, headers)


def status_response(
    request: Request, status: int, message: str, headers: Mapping[str, str] | None = None
) -> Response:
    """The response to an error of HTTP itself: no such route, wrong method, too long."""
    body: OpenAIError | LoraxError = {"error": message, "error_type": "invalid_request"}
    if speaks_openai(request):
        body = openai_error(invalid(message))
    return json_response(body, status, dict(headers or {}))


def speaks_openai(request: Request) -> bool:
    """Whether the path is one of OpenAI's."""
    return route_path(request).startswith("/v1/")


def route_path(request: Request) -> str:
    """The path without the prefix of a proxy."""
    root = request.scope.get("root_path", "")
    return str(request.scope["path"]).removeprefix(root)


def _count(request: Request, error: RequestError) -> None:
    """Count a request that was refused before its call of the driver."""
    if route_path(request) in _GENERATING and not error.counted:
        request.app.state.metrics.refused(ERROR_SHAPES[error.kind].metric)

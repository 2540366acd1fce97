"""Error responses in the dialect of the request's route."""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from deployments.ingress.http.errors import (
    ERROR_SHAPES,
    RequestError,
    anthropic_error,
    anthropic_status,
    invalid,
    lorax_error,
    openai_error,
    retry_headers,
)
from deployments.ingress.http.responses import json_response

_GENERATING = frozenset({"/", "/generate", "/generate_stream", "/invocations",
                         "/v1/completions", "/v1/chat/completions",
                         "/v1/responses", "/v1/messages", "/embed", "/v1/embeddings",
                         "/classify", "/classify_batch", "/v1/classify", "/pooling",
                         "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"})  # fmt: skip


def error_response(request: Request, error: RequestError, status: int | None = None) -> Response:
    """The error's status, body and headers; it is counted once."""
    _count(request, error)
    known, body = _written(request, error, status)
    headers = retry_headers(error)
    if known == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(body, status or known, headers)


def _written(request: Request, error: RequestError, status: int | None) -> tuple[int, object]:
    """The error's own status, and its body, which may name another `status`."""
    if speaks_anthropic(request):
        known = anthropic_status(error.kind)
        return known, anthropic_error(status or known, error.message, error.code)
    row = ERROR_SHAPES[error.kind]
    if speaks_openai(request):
        return row.openai_status, openai_error(error)
    return row.lorax_status, lorax_error(error)


def status_response(
    request: Request, status: int, message: str, headers: Mapping[str, str] | None = None
) -> Response:
    """The response to an error of HTTP itself: no such route, wrong method, too long."""
    body: object = {"error": message, "error_type": "invalid_request"}
    if speaks_anthropic(request):
        body = anthropic_error(status, message)
    elif speaks_openai(request):
        body = openai_error(invalid(message))
    return json_response(body, status, dict(headers or {}))


def speaks_anthropic(request: Request) -> bool:
    """Whether the path is one of Anthropic's."""
    path = route_path(request)
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def speaks_openai(request: Request) -> bool:
    """Whether the path is one of OpenAI's; so are those that both have."""
    return route_path(request).startswith("/v1/") and not speaks_anthropic(request)


def route_path(request: Request) -> str:
    """The path without the prefix of a proxy."""
    root = request.scope.get("root_path", "")
    return str(request.scope["path"]).removeprefix(root)


def _count(request: Request, error: RequestError) -> None:
    """Count a request that was refused before its call of the driver."""
    if route_path(request) in _GENERATING and not error.counted:
        request.app.state.metrics.refused(ERROR_SHAPES[error.kind].metric)

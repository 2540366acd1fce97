"""The HTTP application: both dialects over one driver. It knows nothing of Ray."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from deployments.contract import Driver, ErrorKind, ReplyAddress
from deployments.ingress import lorax, openai, playground, probes
from deployments.ingress.bodies import BodyLimit
from deployments.ingress.engine import Engine, IngressSettings
from deployments.ingress.errors import (
    SPELLINGS,
    RequestError,
    invalid,
    lorax_error,
    openai_error,
    retry_headers,
)
from deployments.ingress.frames import Mailbox
from deployments.ingress.replies import json_response
from deployments.ingress.sse import ClientGone

# Nobody reads it; it shows up in access logs.
_CLIENT_CLOSED_REQUEST = 499

_GENERATING = frozenset({"/", "/generate", "/generate_stream", "/invocations",
                         "/v1/completions", "/v1/chat/completions"})  # fmt: skip

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def build_app(
    driver: Driver,
    mailbox: Mailbox,
    reply_to: Callable[[], ReplyAddress],
    settings: IngressSettings,
    lifespan: Lifespan | None = None,
) -> FastAPI:
    """An ASGI application over `driver`.

    mailbox: token frames are to be given to its `deliver`, on the application's event loop.
    reply_to: where frames are taken, asked with each call. lifespan: entered before the first
    request is served, e.g. to bind that address.
    """
    engine = Engine(driver, mailbox, reply_to, settings)
    app = FastAPI(title="LoRay", version=settings.version, lifespan=lifespan)
    app.state.metrics = engine.metrics
    app.include_router(probes.routes(engine))
    app.include_router(lorax.routes(engine))
    app.include_router(openai.routes(engine))
    app.include_router(playground.routes())
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(
        CORSMiddleware, allow_origins=["*"], allow_methods=["GET", "POST"], allow_headers=["*"],
        expose_headers=["*"],
    )  # fmt: skip
    app.add_exception_handler(RequestError, _refused)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(Exception, _our_fault)
    return app


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(request, error)


async def _malformed(request: Request, error: Exception) -> Response:
    """A body that is no JSON or does not fit its schema: the first thing wrong with it."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return error_response(request, invalid("the body is not valid JSON"))
    field = ".".join(str(part) for part in first["loc"][1:])
    message = str(first["msg"]).removeprefix("Value error, ")
    named = invalid(f"`{field}`: {message}", field) if field else invalid(message)
    return error_response(request, named)


async def _http_error(request: Request, error: Exception) -> Response:
    """No such route, wrong method, unreadable body: the status stays, the body is ours."""
    assert isinstance(error, HTTPException)
    detail = str(error.detail)
    if _speaks_openai(request):
        body = openai_error(invalid(detail))
    else:
        body = {"error": detail, "error_type": "invalid_request"}
    return json_response(body, error.status_code, dict(error.headers or {}))


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _our_fault(request: Request, error: Exception) -> Response:
    """A defect; the server logs it, the client learns no more than that."""
    return error_response(request, RequestError(ErrorKind.GENERATION, "internal error"), 500)


def error_response(request: Request, error: RequestError, status: int | None = None) -> Response:
    """An error in the dialect of the route that was asked."""
    _count(request, error)
    row = SPELLINGS[error.kind]
    known = row.openai_status if _speaks_openai(request) else row.lorax_status
    body = openai_error(error) if _speaks_openai(request) else lorax_error(error)
    return json_response(body, status or known, retry_headers(error))


def _count(request: Request, error: RequestError) -> None:
    """Count a request that was refused before the driver was asked."""
    if _path(request) in _GENERATING and not error.counted:
        request.app.state.metrics.refused(SPELLINGS[error.kind].metric)


def _speaks_openai(request: Request) -> bool:
    """Whether the path, without the prefix that a proxy may have added, is one of OpenAI's."""
    return _path(request).startswith("/v1/")


def _path(request: Request) -> str:
    root = request.scope.get("root_path", "")
    return str(request.scope["path"]).removeprefix(root)

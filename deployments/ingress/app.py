"""The HTTP application: all dialects over one driver. It does not use Ray."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from deployments.contract import ErrorKind, ReplyAddress
from deployments.driver_interface import Driver
from deployments.ingress import embeddings
from deployments.ingress.access.gate import KeyGate
from deployments.ingress.access.keys import Keys
from deployments.ingress.admin import adapters as control
from deployments.ingress.admin import probes, pushes, sleeping
from deployments.ingress.anthropic import routes as anthropic
from deployments.ingress.batches.store import BatchStore
from deployments.ingress.generation.draining import DrainGate, ReplicaDrain
from deployments.ingress.generation.engine import EngineClient, IngressSettings
from deployments.ingress.generation.frames import RequestInboxes
from deployments.ingress.http.bodies import BodyLimit, HeadAsGet, HeaderLimit
from deployments.ingress.http.error_responses import error_response, status_response
from deployments.ingress.http.errors import RequestError
from deployments.ingress.http.malformed import not_json, validation_message
from deployments.ingress.http.sse import ClientGone
from deployments.ingress.lorax import routes as lorax
from deployments.ingress.openai import batches, files, responses
from deployments.ingress.openai import routes as openai
from deployments.ingress.openapi.document import documented
from deployments.ingress.pages import playground, reference
from deployments.ingress.scores import routes as scores
from deployments.observability.lorax_metrics import RequestMetrics

# For access logs only: the client has left.
_CLIENT_CLOSED_REQUEST = 499
# LoRAX's message, which is axum's.
_NO_JSON_TYPE = "Expected request with `Content-Type: application/json`"

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def build_app(
    driver: Driver,
    inboxes: RequestInboxes,
    reply_to: Callable[[], ReplyAddress],
    settings: IngressSettings,
    lifespan: Lifespan | None = None,
    metrics: RequestMetrics | None = None,
    wake: Callable[[], None] = lambda: None,
) -> FastAPI:
    """An ASGI application over `driver`.

    inboxes: gets token frames by `deliver`, on the application's event loop.
    reply_to: returns the address for frames; called with each call of the driver.
    lifespan: entered before the first request, e.g. to bind that address.
    metrics: of requests, shared with other applications; None: of its own.
    wake: called when the runner of batches is to look at them.
    """
    engine = EngineClient(driver, inboxes, reply_to, settings, metrics)
    app = FastAPI(
        title="LoRay",
        version=settings.version,
        lifespan=_closing(engine, lifespan),
        docs_url=None,
        redoc_url=None,
    )
    app.state.engine = engine
    app.state.metrics = engine.metrics
    app.state.drain = ReplicaDrain(engine)
    app.state.renderer = engine.templates.renderer
    page = playground.Page()
    # Serve and FastAPI compare a request with one route after another, so the busiest are first.
    app.include_router(openai.routes(engine))
    app.include_router(lorax.routes(engine))
    app.include_router(anthropic.routes(engine))
    app.include_router(probes.routes(engine, page))
    app.include_router(control.routes(engine))
    app.include_router(pushes.routes(engine))
    app.include_router(sleeping.routes(engine))
    app.include_router(responses.routes(engine))
    app.include_router(embeddings.routes(engine))
    app.include_router(scores.routes(engine))
    store = BatchStore(settings.batches)
    app.state.batches = store
    app.include_router(files.routes(store))
    app.include_router(batches.routes(store, wake))
    app.include_router(playground.routes(page))
    app.include_router(reference.routes(app))
    app.openapi = documented(app)  # type: ignore[method-assign]
    _guard(app, settings)
    app.add_exception_handler(RequestError, _refused)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(Exception, _internal_error)
    return app


def _closing(engine: EngineClient, lifespan: Lifespan | None) -> Lifespan:
    """The lifespan, with the begin and the end of the engine's own processes."""

    @asynccontextmanager
    async def whole(app: FastAPI) -> AsyncIterator[None]:
        async with lifespan(app) if lifespan is not None else nullcontext():
            engine.read_ahead()
            try:
                yield
            finally:
                await engine.templates.close()
                await engine.compiler.close()

    return whole


def _guard(app: FastAPI, settings: IngressSettings) -> None:
    """Add the middleware; the last one runs first."""
    config = settings.api
    app.add_middleware(
        BodyLimit,
        max_bytes=config.max_body_bytes,
        max_open_bytes=config.max_open_body_bytes,
        max_depth=config.max_json_depth,
        max_objects=config.max_json_objects,
        seconds=config.body_timeout_s,
        streamed=frozenset({pushes.PATH, files.PATH}),
    )
    # The innermost is the body's limit: a refused request must not have its body read.
    keys = Keys(
        config,
        settings.default_source,
        settings.clock,
        settings.replicas,
        loopback=settings.loopback,
    )
    app.state.keys = keys
    app.add_middleware(KeyGate, keys=keys)
    app.add_middleware(
        HeaderLimit, max_bytes=config.max_header_bytes, max_headers=config.max_headers
    )
    app.add_middleware(DrainGate, drain=app.state.drain)
    app.add_middleware(HeadAsGet)
    if config.cors_allow_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_allow_origin,
            allow_methods=config.cors_allow_method,
            allow_headers=config.cors_allow_header,
            expose_headers=config.cors_expose_header,
            allow_credentials=config.cors_allow_credentials,
        )


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(request, error)


async def _malformed(request: Request, error: Exception) -> Response:
    """The reply to a body that is not JSON, or to one or a query that does not fit its schema."""
    assert isinstance(error, RequestValidationError)
    if isinstance(error.body, bytes):
        return status_response(request, 415, _NO_JSON_TYPE)
    found = error.errors()
    faults = [{**fault, "loc": fault["loc"][1:]} for fault in found]
    if found[0]["loc"][0] == "query":
        return error_response(request, validation_message(faults, dict(request.query_params)))
    if faults[0]["type"] == "json_invalid":
        return error_response(request, not_json(faults[0]))
    return error_response(request, validation_message(faults, error.body))


async def _http_error(request: Request, error: Exception) -> Response:
    """The reply to an unknown route, a wrong method or an unreadable body; keeps the status."""
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, ValueError | RecursionError):
        # Not UTF-8, or a number that is too long.
        return error_response(request, not_json())
    return status_response(request, error.status_code, str(error.detail), error.headers)


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _internal_error(request: Request, error: Exception) -> Response:
    """The reply to an unexpected exception. The server logs it; the client gets no details."""
    return error_response(request, RequestError(ErrorKind.GENERATION, "internal error"), 500)

"""Routes for monitoring: health, start-up and metrics."""

import asyncio
import uuid

from fastapi import APIRouter, Request
from starlette.responses import Response

from configs.wire.sampling import Pooling, Sampling, Stopping
from configs.wire.tasks import TaskKind
from deployments.contract import EngineInfo, GenerateRequest, SequenceRequest
from deployments.ingress.access.keys import require
from deployments.ingress.generation.engine import EngineClient, GenerationJob
from deployments.ingress.generation.replies import collect
from deployments.ingress.http.errors import RequestError
from deployments.ingress.http.responses import json_response
from deployments.ingress.pages.playground import Page, accepts_html
from deployments.observability import vllm_metrics
from deployments.observability.lorax_metrics import CONTENT_TYPE

MEASURED = "loray.measured"
"""The key of a request's scope with the engines of all bases that /metrics is about."""

_PROMPT = "Hello"
_POOLINGS = {
    TaskKind.GENERATE: Pooling.NONE,
    TaskKind.CLASSIFY: Pooling.SCORE,
    TaskKind.EMBED: Pooling.MEAN,
}


def routes(engine: EngineClient, page: Page) -> APIRouter:
    """Health and start-up of the engine, and metrics of this replica.

    page: for browsers at /; other clients get the health there.
    """
    router = APIRouter()

    @router.get("/")
    async def root(request: Request) -> Response:
        return page.response() if accepts_html(request) else await health()

    @router.get("/health")
    @router.get("/ping")
    async def health() -> Response:
        info = await _info(engine)
        if info is not None and info.healthy:
            if info.asleep:
                return json_response({"status": "sleeping"})
            return Response(media_type="text/plain")
        return json_response({"error": "unhealthy", "error_type": "healthcheck"}, 503)

    @router.get("/startup")
    async def startup() -> Response:
        try:
            await _generate(engine)
        except RequestError as error:
            body = {"error": error.message, "error_type": "failed healthcheck"}
            return json_response(body, 500)
        return Response(media_type="text/plain")

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        require(request)
        if "application/json" in request.headers.get("accept", ""):
            return json_response(engine.metrics.total.json())
        engines = request.scope.get(MEASURED, (engine,))
        loads = await asyncio.gather(*(each.loads.now() for each in engines))
        bases = zip(loads, (each.metrics.families() for each in engines), strict=True)
        text = engine.metrics.total.text() + vllm_metrics.text(list(bases))
        return Response(text, media_type=CONTENT_TYPE)

    return router


async def _info(engine: EngineClient) -> EngineInfo | None:
    """What is served; None if no driver answers."""
    try:
        return await engine.info()
    except RequestError:
        return None


async def _generate(engine: EngineClient) -> None:
    """Generate a greedy token with the base model, through the queue of all requests.

    One that does not generate does what it is for.
    """
    served = await engine.served()
    ids = await served.tokenizer.encode(_PROMPT)
    pooling = _POOLINGS[served.info.task.task]
    stopping = Stopping(int(pooling is Pooling.NONE))
    sequence = SequenceRequest(ids, Sampling(pooling=pooling), stopping)
    request = GenerateRequest(f"startup-{uuid.uuid4().hex}", [sequence])
    job = GenerationJob(request, [], keep_stops=True, per_token=False, characters=len(_PROMPT))
    await collect(engine, job, job.detokenizers(served.tokenizer))

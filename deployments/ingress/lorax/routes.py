"""LoRAX's native routes: /, /generate, /generate_stream, /invocations, /tokenize, /info."""

import asyncio
from collections.abc import Sequence
from typing import TypedDict

from fastapi import APIRouter, Request
from starlette.responses import Response

from configs.wire.tasks import TaskKind
from deployments.contract import AdapterInfo, EngineInfo
from deployments.ingress.access.keys import visible
from deployments.ingress.generation.engine import EngineClient
from deployments.ingress.generation.replies import FinishedCall, stream, whole
from deployments.ingress.http.errors import lorax_error
from deployments.ingress.http.responses import json_response
from deployments.ingress.lorax.jobs import job_of
from deployments.ingress.lorax.replies import LoraxWriter
from deployments.ingress.lorax.schema import (
    CompatGenerateBody,
    GenerateRequestBody,
    TokenizeBody,
    check_characters,
)
from deployments.ingress.text.tokenizer import Slice

_PIPELINES = {
    TaskKind.GENERATE: "text-generation",
    TaskKind.CLASSIFY: "text-classification",
    TaskKind.EMBED: "feature-extraction",
}


class TextSlice(TypedDict):
    """A token and its offsets in the text, in characters."""

    id: int
    text: str
    start: int
    stop: int


class InfoReply(TypedDict):
    """LoRAX's fields, then this server's; adapters: those that the caller may use."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    model_device_type: str
    model_pipeline_tag: str
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_length: int
    max_total_tokens: int
    max_batch_total_tokens: int
    version: str
    model_name: str
    chosen: dict[str, str]
    adapters: list[AdapterInfo]


def routes(engine: EngineClient) -> APIRouter:
    """All native routes over this engine."""
    router = APIRouter()

    @router.post("/")
    @router.post("/invocations")
    async def compat_generate(request: Request, body: CompatGenerateBody) -> Response:
        return await _reply(engine, request, body, body.stream, listed=True)

    @router.post("/generate")
    async def generate(request: Request, body: GenerateRequestBody) -> Response:
        return await _reply(engine, request, body, streams=False)

    @router.post("/generate_stream")
    async def generate_stream(request: Request, body: GenerateRequestBody) -> Response:
        return await _reply(engine, request, body, streams=True)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Response:
        info, tokenizer = await engine.served()
        check_characters(body.inputs, info)
        slices = await tokenizer.slices(body.inputs, body.add_special_tokens)
        return await asyncio.to_thread(_tokens, slices)

    @router.get("/info")
    async def info(request: Request) -> Response:
        return json_response(_info(visible(request, await engine.info()), engine))

    return router


async def _reply(
    engine: EngineClient,
    request: Request,
    body: GenerateRequestBody,
    streams: bool,
    listed: bool = False,
) -> Response:
    """Run a request and reply; listed: a whole reply is a list of one object."""
    job = await job_of(engine, request, body, streams)
    writer = LoraxWriter(body, job.request.sequences, (await engine.served()).tokenizer)
    if streams:
        return await stream(request, engine, job, writer.chunks, lorax_error)

    def complete(result: FinishedCall) -> object:
        reply = writer.body(result)
        return [reply] if listed else reply

    return await whole(request, engine, job, complete)


def _tokens(slices: Sequence[Slice]) -> Response:
    """The reply of /tokenize. It may be very long, so a thread makes it."""
    return json_response([token._asdict() for token in slices])


def _info(info: EngineInfo, engine: EngineClient) -> InfoReply:
    settings = engine.settings
    return {
        "model_id": info.model_id,
        "model_sha": info.model_revision,
        "model_dtype": info.dtype,
        "model_device_type": info.device,
        "model_pipeline_tag": _PIPELINES[info.task.task],
        "max_concurrent_requests": info.max_running + info.max_queued,
        "max_best_of": settings.max_best_of,
        "max_stop_sequences": settings.max_stop_sequences,
        "max_input_length": info.max_input_tokens,
        "max_total_tokens": info.max_total_tokens,
        "max_batch_total_tokens": info.max_batch_total_tokens,
        "version": settings.version,
        "model_name": info.model_name,
        "chosen": info.startup_info,
        "adapters": info.adapters,
    }

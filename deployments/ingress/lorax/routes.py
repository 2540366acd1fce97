"""LoRAX's native routes: /, /generate, /generate_stream, /invocations, /tokenize, /info."""

import asyncio
import secrets
import time
import uuid
from collections.abc import Sequence
from typing import TypedDict

from fastapi import APIRouter, Request
from starlette.responses import Response

from configs.wire.adapters import AdapterReference, AdapterSource
from configs.wire.sampling import Stopping
from deployments.contract import AdapterInfo, EngineInfo, GenerateRequest, SequenceRequest
from deployments.ingress.access.keys import hub_token, visible
from deployments.ingress.adapter_names.merges import requested_adapter
from deployments.ingress.adapter_names.references import parse_source
from deployments.ingress.generation.choices import spread_seed
from deployments.ingress.generation.engine import EngineClient, GenerationJob, stop_ids
from deployments.ingress.generation.prompt_replies import with_prompt_logprobs
from deployments.ingress.generation.replies import FinishedCall, stream, whole
from deployments.ingress.http.errors import invalid, lorax_error
from deployments.ingress.http.responses import json_response
from deployments.ingress.lorax.replies import LoraxWriter
from deployments.ingress.lorax.schema import (
    CompatGenerateBody,
    GenerateParameters,
    GenerateRequestBody,
    TokenizeBody,
    check,
    check_characters,
    check_known,
    check_lengths,
    input_limit,
    sampling,
    truncated,
)
from deployments.ingress.structured.constraints import UNCONSTRAINED, check_endings
from deployments.ingress.text.tokenizer import Slice


class TextSlice(TypedDict):
    """A token and its offsets in the text, in characters."""

    id: int
    text: str
    start: int
    stop: int


class InfoReply(TypedDict):
    """LoRAX's fields, then ours; adapters: those that the caller may use."""

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

    @router.post("/classify")
    @router.post("/classify_batch")
    async def classify() -> Response:
        raise invalid("Text generation models don't support classification")

    return router


async def _reply(
    engine: EngineClient,
    request: Request,
    body: GenerateRequestBody,
    streams: bool,
    listed: bool = False,
) -> Response:
    """Check, run, answer; `listed` wraps a whole reply in a list of one."""
    job = await _job(engine, request, body, streams)
    writer = LoraxWriter(body, job.request.sequences, (await engine.served()).tokenizer)
    if streams:
        return await stream(request, engine, job, writer.chunks, lorax_error)

    def complete(result: FinishedCall) -> object:
        reply = writer.body(result)
        return [reply] if listed else reply

    return await whole(request, engine, job, complete)


async def _job(
    engine: EngineClient, request: Request, body: GenerateRequestBody, streams: bool
) -> GenerationJob:
    """The driver's request, once everything was checked."""
    started = time.monotonic()
    given = body.settled
    check(body.inputs, given, engine.settings, streams)
    info, tokenizer = await engine.served()
    limit = input_limit(given, info)
    if limit is None:
        check_characters(body.inputs, info)
    ids = truncated(await tokenizer.encode(body.inputs, limit=limit), given, info)
    check_known(ids, info)
    stopping = Stopping(
        max_new_tokens=check_lengths(len(ids), given.max_new_tokens, info),
        stop_token_ids=stop_ids(info, given.ignore_eos_token),
    )
    format = given.response_format
    constraint = format.constraint if format is not None else UNCONSTRAINED
    constraint = await engine.compiler.compiled(constraint, info)
    check_endings(constraint, given.ignore_eos_token, 0)
    seed = secrets.randbits(63) if given.seed is None else given.seed
    per_token = streams or given.detailed
    logprobs = given.return_k_alternatives or 0 if per_token else -1
    choices = given.best_of or 1
    if choices > 1:
        logprobs = max(0, logprobs)
    sequences = [
        SequenceRequest(
            ids,
            sampling(given, spread_seed(seed, choice), logprobs, constraint.json_schema),
            stopping,
        )
        for choice in range(choices)
    ]
    if given.decoder_input_details:
        sequences[0] = with_prompt_logprobs(sequences[0], 0)
    return GenerationJob(
        request=GenerateRequest(
            id=f"gen-{uuid.uuid4().hex}",
            sequences=sequences,
            adapter=_adapter(given, info, engine.settings.default_source),
            api_token=given.api_token or hub_token(request),
        ),
        stops=given.stop,
        keep_stops=True,
        per_token=per_token,
        characters=len(body.inputs),
        choices=choices,
        started=started,
    )


def _adapter(
    given: GenerateParameters, info: EngineInfo, default_source: AdapterSource
) -> AdapterReference | None:
    """The adapter or the merge that the request names, None for the base model."""
    source = parse_source(given.adapter_source) if given.adapter_source else default_source
    return requested_adapter(given.adapter_id or "", given.merged_adapters, info, source)


def _tokens(slices: Sequence[Slice]) -> Response:
    """The reply of /tokenize, which may be very long."""
    return json_response([token._asdict() for token in slices])


def _info(info: EngineInfo, engine: EngineClient) -> InfoReply:
    """LoRAX's fields by LoRAX's names, and what this server adds to them."""
    settings = engine.settings
    return {
        "model_id": info.model_id,
        "model_sha": info.model_revision,
        "model_dtype": info.dtype,
        "model_device_type": info.device,
        "model_pipeline_tag": "text-generation",
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

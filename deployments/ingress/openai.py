"""OpenAI's routes: /v1/completions, /v1/chat/completions, /v1/models."""

import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import Response

from configs.sampling import Sampling, Stopping
from deployments.contract import EngineInfo, ErrorKind, GenerateRequest, SequenceRequest
from deployments.ingress.authorization import bearer_token
from deployments.ingress.engine import Engine, IngressSettings, Job, Served, stop_ids
from deployments.ingress.errors import RequestError, invalid, openai_error
from deployments.ingress.openai_replies import (
    ChatWriter,
    CompletionWriter,
    Envelope,
    Writer,
    usage_of,
)
from deployments.ingress.openai_schema import ChatBody, CompletionBody
from deployments.ingress.references import listed_name, model_reference, parse_source
from deployments.ingress.replies import Running, Whole, json_response, stream, whole
from deployments.ingress.sse import DONE
from deployments.ingress.text import Text

_DEFAULT_MAX_TOKENS = 16
# Spreads the seeds of one prompt's choices, so that seed 1's second is not seed 2's first.
_SEED_STRIDE = 0x9E3779B97F4A7C15

Body = CompletionBody | ChatBody


def routes(engine: Engine) -> APIRouter:
    """All OpenAI routes over this engine."""
    router = APIRouter(prefix="/v1")
    created = int(time.time())

    @router.post("/completions")
    async def completions(request: Request, body: CompletionBody) -> Response:
        started = time.monotonic()
        _check(body, engine.settings)
        served = await engine.served()
        prompts = await _prompts(body, served.text)
        job = _job(engine, served.info, body, prompts, _Caller(request, started))
        echo = [text for text, _ in prompts for _ in range(body.choices)] if body.echo else ()
        writer = CompletionWriter(_envelope("cmpl", body, served), echo)
        return await _reply(request, engine, job, body, writer)

    @router.post("/chat/completions")
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        started = time.monotonic()
        _check(body, engine.settings)
        served = await engine.served()
        variables = {
            **body.chat_template_kwargs, "add_generation_prompt": body.add_generation_prompt,
        }  # fmt: skip
        prompt = await served.text.encode_chat(body.rendered_messages(), variables)
        job = _job(engine, served.info, body, [prompt], _Caller(request, started))
        return await _reply(
            request, engine, job, body, ChatWriter(_envelope("chatcmpl", body, served))
        )

    @router.get("/models")
    async def models() -> Response:
        return json_response(
            {"object": "list", "data": _models(await engine.info(), engine, created)}
        )

    @router.get("/models/{id:path}")
    async def model(id: str) -> Response:
        info = await engine.info()
        wanted = info.model_name if id == info.model_id else id
        for known in _models(info, engine, created):
            if known["id"] == wanted:
                return json_response(known)
        raise RequestError(ErrorKind.ADAPTER_NOT_FOUND, f"the model `{id}` is not known here")

    return router


@dataclass(frozen=True)
class _Caller:
    """Who asked, and when."""

    request: Request
    started: float


async def _reply(
    request: Request, engine: Engine, job: Job, body: Body, writer: Writer
) -> Response:
    """Run a job and write it."""
    sequences = job.request.sequences

    async def chunks(running: Running) -> AsyncGenerator[bytes, None]:
        opening = b"".join([writer.first_chunk(index) for index in range(len(sequences))])
        async for batch in running.events():
            written = opening + b"".join([writer.chunks(event) for event in batch])
            opening = b""
            if written:
                yield written
        completion = running.call.completion
        assert completion is not None, "the events ended before the call"
        generated = sum(transcript.num_tokens for transcript in running.transcripts)
        usage = usage_of(sequences, body.choices, generated, completion)
        yield (writer.usage_chunk(usage) if body.includes_usage else b"") + DONE

    def complete(result: Whole) -> object:
        generated = sum(choice.num_tokens for choice in result.choices)
        usage = usage_of(sequences, body.choices, generated, result.completion)
        return writer.body(result.choices, usage)

    if body.stream:
        return await stream(request, engine, job, chunks, openai_error)
    return await whole(request, engine, job, complete)


def _envelope(prefix: str, body: Body, served: Served) -> Envelope:
    return Envelope(
        id=f"{prefix}-{uuid.uuid4().hex}",
        model=body.model,
        text=served.text,
        num_logprobs=body.num_logprobs,
        includes_usage=body.includes_usage,
    )


def _models(info: EngineInfo, engine: Engine, created: int) -> list[dict[str, object]]:
    """The base model first, then the adapters that the engine knows."""
    source = engine.settings.default_source
    base = _model(info.model_name, created, info.model_id, None)
    adapters = [
        _model(listed_name(adapter, source), created, adapter.id, info.model_name)
        for adapter in info.adapters
    ]
    return [{**base, "max_model_len": info.max_total_tokens}, *adapters]


def _model(id: str, created: int, root: str, parent: str | None) -> dict[str, object]:
    return {
        "id": id,
        "object": "model",
        "created": created,
        "owned_by": "loray",
        "root": root,
        "parent": parent,
    }

"""OpenAI's routes: /v1/completions, /v1/chat/completions, /v1/models."""

import time
import uuid
from datetime import UTC, datetime

from fastapi import APIRouter, Request
from starlette.responses import Response

from deployments.contract import EngineInfo, ErrorKind
from deployments.ingress.access.keys import visible
from deployments.ingress.adapter_names.references import listed_name
from deployments.ingress.generation.engine import EngineClient, GenerationJob, ServedModel
from deployments.ingress.generation.prompt_replies import Prompt, starts_of
from deployments.ingress.http.errors import RequestError
from deployments.ingress.http.responses import json_response
from deployments.ingress.openai.pages import models_page
from deployments.ingress.openai.replies import (
    CompletionWriter,
    Envelope,
)
from deployments.ingress.openai.reply_types import ModelReply
from deployments.ingress.openai.tool_replies import chat_writer
from deployments.ingress.requests.answers import answer
from deployments.ingress.requests.chat import chat
from deployments.ingress.requests.jobs import (
    Body,
    Caller,
    adapter_of,
    check,
    checked_ids,
    job_of,
    prompt_limit,
)
from deployments.ingress.requests.restrictions import restricted
from deployments.ingress.requests.schema import ChatBody, CompletionBody
from deployments.ingress.requests.truncation import cut, encoded


def routes(engine: EngineClient) -> APIRouter:
    """All OpenAI routes over this engine."""
    router = APIRouter(prefix="/v1")
    created = int(time.time())

    @router.post("/completions")
    async def completions(request: Request, body: CompletionBody) -> Response:
        caller = Caller.of(request)
        check(body, engine.settings)
        served = await engine.served()
        prompts = await _prompts(body, served)
        constraint = await engine.compiler.compiled(await body.constraint(), served.info)
        adapter = adapter_of(body, served.info, engine.settings.default_source)
        job = job_of(body, prompts, adapter, served.info, caller, constraint)
        job = await restricted(job, body, served)
        echo = [prompt for prompt in prompts for _ in range(body.choices)]
        writer = CompletionWriter(_envelope("cmpl", body, served, job), echo if body.echo else ())
        return await answer(request, engine, job, writer, bool(body.stream), body.choices)

    @router.post("/chat/completions")
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        caller = Caller.of(request)
        check(body, engine.settings)
        served = await engine.served()
        chat_job = await chat(body, engine, served, caller)
        writer = chat_writer(_envelope("chatcmpl", body, served, chat_job.job), chat_job.answers)
        return await answer(request, engine, chat_job.job, writer, bool(body.stream), body.choices)

    @router.get("/models")
    async def models(request: Request) -> Response:
        info = visible(request, await engine.info())
        return json_response(models_page(_models(info, engine, created)))

    @router.get("/models/{id:path}")
    async def model(request: Request, id: str) -> Response:
        info = visible(request, await engine.info())
        name = info.model_name if id == info.model_id else id
        for each in _models(info, engine, created):
            if each["id"] == name:
                return json_response(each)
        raise RequestError(ErrorKind.ADAPTER_NOT_FOUND, f"there is no model `{id}`")

    return router


async def _prompts(body: CompletionBody, served: ServedModel) -> list[Prompt]:
    """Each prompt as text (for echo) and as ids; checks all lengths before it encodes any."""
    limit = prompt_limit(served.info, "prompt")
    for given in body.prompt:
        if isinstance(given, str) and body.truncate_prompt_tokens is None:
            served.tokenizer.check_length(given, limit)
    return [
        await _text_prompt(given, body, served)
        if isinstance(given, str)
        else _ids_prompt(given, body, served)
        for given in body.prompt
    ]


async def _text_prompt(given: str, body: CompletionBody, served: ServedModel) -> Prompt:
    info, tokenizer = served
    specials = body.add_special_tokens is not False
    ids = await encoded(given, body, served, specials, "prompt")
    # A prompt that is too long is refused later, with the length of the answer in the message.
    if not body.echo or body.logprobs is None or len(ids) > info.max_total_tokens:
        return Prompt(given, ids)
    return Prompt(given, ids, starts_of(await tokenizer.slices(given, specials)))


def _ids_prompt(given: list[int], body: CompletionBody, served: ServedModel) -> Prompt:
    info, tokenizer = served
    shown = body.echo and len(checked_ids(given, info)) <= info.max_total_tokens
    return Prompt(tokenizer.decode(given) if shown else "", cut(given, body, info))


def _envelope(prefix: str, body: Body, served: ServedModel, job: GenerationJob) -> Envelope:
    return Envelope(
        id=f"{prefix}-{uuid.uuid4().hex}",
        model=body.model,
        tokenizer=served.tokenizer,
        num_logprobs=body.num_logprobs,
        num_prompt_logprobs=-1 if body.prompt_logprobs is None else body.prompt_logprobs,
        includes_usage=body.includes_usage,
        prompts=_prompt_ids(job) if body.return_token_ids else None,
    )


def _prompt_ids(job: GenerationJob) -> list[list[int]]:
    """The tokens of each choice's prompt."""
    return [list(sequence.prompt) for sequence in job.request.sequences]


def _models(info: EngineInfo, engine: EngineClient, created: int) -> list[ModelReply]:
    """The base model first, then the adapters."""
    source = engine.settings.default_source
    base = _model(info.model_name, created, info.model_id, None)
    adapters = [
        _model(listed_name(adapter, source), created, adapter.id, info.model_name)
        for adapter in info.adapters
    ]
    return [{**base, "max_model_len": info.max_total_tokens}, *adapters]


def _model(id: str, created: int, root: str, parent: str | None) -> ModelReply:
    return {
        "id": id,
        "object": "model",
        "created": created,
        "owned_by": "loray",
        "root": root,
        "parent": parent,
        "type": "model",
        "display_name": id,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "lifecycle": "active",
    }

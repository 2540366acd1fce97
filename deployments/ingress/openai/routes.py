"""OpenAI's routes: /v1/completions, /v1/chat/completions, /v1/models."""

import time
import uuid
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from starlette.responses import Response

from deployments.contract import EngineInfo, ErrorKind
from deployments.ingress.access.keys import caller as grant_of
from deployments.ingress.access.keys import hub_token, visible
from deployments.ingress.adapter_names.references import listed_name
from deployments.ingress.generation.choices import best_first
from deployments.ingress.generation.engine import EngineClient, GenerationJob, ServedModel
from deployments.ingress.generation.prompt_replies import Prompt
from deployments.ingress.generation.replies import Choice, FinishedCall, RunningCall, stream, whole
from deployments.ingress.http.errors import RequestError, openai_error
from deployments.ingress.http.responses import json_response
from deployments.ingress.http.sse import DONE
from deployments.ingress.openai.chat import chat
from deployments.ingress.openai.jobs import (
    Body,
    Caller,
    check,
    checked_ids,
    job_of,
    prompt_limit,
)
from deployments.ingress.openai.replies import (
    CompletionWriter,
    Envelope,
    ReplyWriter,
    usage_of,
)
from deployments.ingress.openai.reply_types import ModelReply, ModelsReply
from deployments.ingress.openai.schema import ChatBody, CompletionBody


def routes(engine: EngineClient) -> APIRouter:
    """All OpenAI routes over this engine."""
    router = APIRouter(prefix="/v1")
    created = int(time.time())

    @router.post("/completions")
    async def completions(request: Request, body: CompletionBody) -> Response:
        caller = Caller(hub_token(request))
        check(body, engine.settings)
        served = await engine.served()
        prompts = await _prompts(body, served)
        constraint = await engine.compiler.compiled(await body.constraint(), served.info)
        job = job_of(body, prompts, served, engine.settings, caller, constraint)
        echo = [prompt for prompt in prompts for _ in range(body.choices)]
        writer = CompletionWriter(_envelope("cmpl", body, served), echo if body.echo else ())
        return await _reply(request, engine, job, body, writer)

    @router.post("/chat/completions")
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        caller = Caller(hub_token(request), grant=grant_of(request))
        check(body, engine.settings)
        served = await engine.served()
        chat_job = await chat(body, engine, served, caller)
        writer = chat_job.writer(_envelope("chatcmpl", body, served))
        return await _reply(request, engine, chat_job.job, body, writer)

    @router.get("/models")
    async def models(request: Request) -> Response:
        info = visible(request, await engine.info())
        reply: ModelsReply = {"object": "list", "data": _models(info, engine, created)}
        return json_response(reply)

    @router.get("/models/{id:path}")
    async def model(request: Request, id: str) -> Response:
        info = visible(request, await engine.info())
        wanted = info.model_name if id == info.model_id else id
        for known in _models(info, engine, created):
            if known["id"] == wanted:
                return json_response(known)
        raise RequestError(ErrorKind.ADAPTER_NOT_FOUND, f"the model `{id}` is not known here")

    return router


async def _prompts(body: CompletionBody, served: ServedModel) -> list[Prompt]:
    """Each prompt as text (for echo) and as ids; all must fit before one is read."""
    limit = prompt_limit(served.info, "prompt")
    for given in body.prompt:
        if isinstance(given, str):
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
    ids = await tokenizer.encode(given, specials, prompt_limit(info, "prompt"))
    # Prompts that are too long are refused later, by an error that names the answer's length too.
    if not body.echo or body.logprobs is None or len(ids) > info.max_total_tokens:
        return Prompt(given, ids)
    return Prompt(given, ids, [each.start for each in await tokenizer.slices(given, specials)])


def _ids_prompt(given: list[int], body: CompletionBody, served: ServedModel) -> Prompt:
    info, tokenizer = served
    shown = body.echo and len(checked_ids(given, info)) <= info.max_total_tokens
    return Prompt(tokenizer.decode(given) if shown else "", given)


async def _reply(
    request: Request, engine: EngineClient, job: GenerationJob, body: Body, writer: ReplyWriter
) -> Response:
    """Run a job and write it."""
    sequences = job.request.sequences

    async def chunks(running: RunningCall) -> AsyncGenerator[bytes, None]:
        opening = b"".join([writer.first_chunk(index) for index in range(len(sequences))])
        async for batch in running.events():
            written = opening + b"".join([writer.chunks(event) for event in batch])
            opening = b""
            if written:
                yield written
        completion = running.call.completion
        assert completion is not None, "the events ended before the call"
        generated = sum(detokenizer.num_tokens for detokenizer in running.detokenizers)
        usage = usage_of(sequences, job.choices, generated, completion)
        yield (writer.usage_chunk(usage) if body.includes_usage else b"") + DONE

    def complete(result: FinishedCall) -> object:
        generated = sum(choice.num_tokens for choice in result.choices)
        usage = usage_of(sequences, job.choices, generated, result.completion)
        return writer.body(_shown(result, body), usage)

    if body.stream:
        return await stream(request, engine, job, chunks, openai_error)
    return await whole(request, engine, job, complete)


def _shown(result: FinishedCall, body: Body) -> list[Choice]:
    """The choices that the client is shown: of each prompt's candidates the best, best first."""
    if body.candidates == body.choices:
        return result.choices
    shown = []
    for start in range(0, len(result.choices), body.candidates):
        own = slice(start, start + body.candidates)
        candidates = result.choices[own]
        counts = [candidate.num_tokens for candidate in candidates]
        order = best_first(result.completion.sequences[own], counts)
        shown += [candidates[index] for index in order[: body.choices]]
    return shown


def _envelope(prefix: str, body: Body, served: ServedModel) -> Envelope:
    return Envelope(
        id=f"{prefix}-{uuid.uuid4().hex}",
        model=body.model,
        tokenizer=served.tokenizer,
        num_logprobs=body.num_logprobs,
        num_prompt_logprobs=-1 if body.prompt_logprobs is None else body.prompt_logprobs,
        includes_usage=body.includes_usage,
    )


def _models(info: EngineInfo, engine: EngineClient, created: int) -> list[ModelReply]:
    """The base model first, then the adapters that the engine knows."""
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
    }

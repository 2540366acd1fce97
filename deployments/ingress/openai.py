"""OpenAI's routes: /v1/completions, /v1/chat/completions, /v1/models."""

import time
import uuid
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from starlette.responses import Response

from deployments.contract import EngineInfo, ErrorKind
from deployments.ingress.authorization import bearer_token
from deployments.ingress.choices import best_first
from deployments.ingress.engine import Engine, Job, Served
from deployments.ingress.errors import RequestError, openai_error
from deployments.ingress.openai_jobs import Body, Caller, Prompt, check, job_of
from deployments.ingress.openai_replies import (
    ChatWriter,
    CompletionWriter,
    Envelope,
    Writer,
    usage_of,
)
from deployments.ingress.openai_schema import ChatBody, CompletionBody
from deployments.ingress.references import listed_name
from deployments.ingress.replies import Choice, Running, Whole, json_response, stream, whole
from deployments.ingress.sse import DONE
from deployments.ingress.text import Text


def routes(engine: Engine) -> APIRouter:
    """All OpenAI routes over this engine."""
    router = APIRouter(prefix="/v1")
    created = int(time.time())

    @router.post("/completions")
    async def completions(request: Request, body: CompletionBody) -> Response:
        caller = Caller(bearer_token(request))
        check(body, engine.settings)
        served = await engine.served()
        prompts = await _prompts(body, served.text)
        job = await job_of(body, prompts, served, engine.settings, caller)
        echo = [prompt.text for prompt in prompts for _ in range(body.choices)]
        writer = CompletionWriter(_envelope("cmpl", body, served), echo if body.echo else ())
        return await _reply(request, engine, job, body, writer)

    @router.post("/chat/completions")
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        caller = Caller(bearer_token(request))
        check(body, engine.settings)
        served = await engine.served()
        variables = {
            **body.chat_template_kwargs, "add_generation_prompt": body.add_generation_prompt,
        }  # fmt: skip
        prompt = Prompt(*await served.text.encode_chat(body.rendered_messages(), variables))
        job = await job_of(body, [prompt], served, engine.settings, caller)
        writer = ChatWriter(_envelope("chatcmpl", body, served))
        return await _reply(request, engine, job, body, writer)

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


async def _prompts(body: CompletionBody, text: Text) -> list[Prompt]:
    """Each prompt as text (for echo) and as ids."""
    prompts = []
    for given in body.prompt:
        if isinstance(given, str):
            prompts.append(Prompt(given, await text.encode(given)))
        else:
            prompts.append(Prompt(text.decode(given) if body.echo else "", given))
    return prompts


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
        usage = usage_of(sequences, job.choices, generated, completion)
        yield (writer.usage_chunk(usage) if body.includes_usage else b"") + DONE

    def complete(result: Whole) -> object:
        generated = sum(choice.num_tokens for choice in result.choices)
        usage = usage_of(sequences, job.choices, generated, result.completion)
        return writer.body(_shown(result, body), usage)

    if body.stream:
        return await stream(request, engine, job, chunks, openai_error)
    return await whole(request, engine, job, complete)


def _shown(result: Whole, body: Body) -> list[Choice]:
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

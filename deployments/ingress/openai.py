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


def _check(body: Body, settings: IngressSettings) -> None:
    """Everything that can be refused without the tokens."""
    body.refuse_unbuilt()
    if body.choices > settings.max_choices:
        raise invalid(f"`n` must be at most {settings.max_choices}, got {body.choices}", "n")
    stops = body.stops
    if len(stops) > settings.max_stop_sequences:
        message = f"`stop` supports up to {settings.max_stop_sequences} strings, got {len(stops)}"
        raise invalid(message, "stop")
    if not all(stops):
        raise invalid("`stop` strings cannot be empty", "stop")
    if body.num_logprobs > settings.max_logprobs:
        param = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
        message = f"`{param}` must be at most {settings.max_logprobs}, got {body.num_logprobs}"
        raise invalid(message, param)
    if isinstance(body, ChatBody) and body.top_logprobs is not None and not body.logprobs:
        raise invalid("`top_logprobs` needs `logprobs` to be true", "top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise invalid("`stream_options` is only for streams", "stream_options")
    if isinstance(body, CompletionBody):
        _check_prompts(body, settings)


def _check_prompts(body: CompletionBody, settings: IngressSettings) -> None:
    prompts = body.prompt
    if not prompts or not all(prompts):
        raise invalid("`prompt` cannot be empty", "prompt")
    if len(prompts) * body.choices > settings.max_sequences:
        raise invalid(
            f"{len(prompts)} prompts times {body.choices} choices are more than "
            f"{settings.max_sequences} sequences",
            "prompt",
        )


async def _prompts(body: CompletionBody, text: Text) -> list[tuple[str, list[int]]]:
    """Each prompt as text (for echo) and as ids."""
    prompts = []
    for prompt in body.prompt:
        if isinstance(prompt, str):
            prompts.append((prompt, await text.encode(prompt)))
        else:
            prompts.append((text.decode(prompt) if body.echo else "", prompt))
    return prompts


def _job(
    engine: Engine,
    info: EngineInfo,
    body: Body,
    prompts: Sequence[tuple[str, list[int]]],
    caller: _Caller,
) -> Job:
    """The driver's request: for each prompt its choices, in order."""
    default_source = engine.settings.default_source
    if body.adapter_source is not None:
        default_source = parse_source(body.adapter_source)
    seed = secrets.randbits(63) if body.seed is None else body.seed
    sequences = [
        SequenceRequest(ids, _sampling(body, seed + choice * _SEED_STRIDE), stopping)
        for _, ids in prompts
        for stopping in [_stopping(body, len(_checked_ids(ids, info)), info)]
        for choice in range(body.choices)
    ]
    request = GenerateRequest(
        id=f"req-{uuid.uuid4().hex}",
        sequences=sequences,
        adapter=model_reference(body.model, info, default_source),
        api_token=body.api_token or bearer_token(caller.request),
    )
    return Job(
        request=request,
        stops=body.stops,
        keep_stops=False,
        per_token=body.num_logprobs >= 0,
        characters=sum(len(text) for text, _ in prompts),
        started=caller.started,
    )


def _sampling(body: Body, seed: int) -> Sampling:
    temperature = 1.0 if body.temperature is None else body.temperature
    greedy = temperature == 0
    return Sampling(
        temperature=temperature,
        top_k=0 if greedy else max(0, body.top_k or 0),
        top_p=1.0 if greedy or body.top_p is None else body.top_p,
        seed=seed % 2**64,
        logprobs=body.num_logprobs,
    )


def _stopping(body: Body, num_prompt: int, info: EngineInfo) -> Stopping:
    """When to end; refuses what cannot fit, with the numbers."""
    param = "messages" if isinstance(body, ChatBody) else "prompt"
    left = info.max_total_tokens - num_prompt
    wanted = _wanted_tokens(body)
    default = left if isinstance(body, ChatBody) else min(_DEFAULT_MAX_TOKENS, left)
    limit = max(1, default) if wanted is None else wanted
    if limit > left:
        raise invalid(
            f"This model's maximum context length is {info.max_total_tokens} tokens. However, "
            f"you requested {num_prompt + limit} tokens ({num_prompt} in the {param}, {limit} in "
            f"the completion). Please reduce the length of the {param} or completion.",
            param,
            "context_length_exceeded",
        )
    if num_prompt > info.max_input_tokens:
        message = f"`{param}` has {num_prompt} tokens; at most {info.max_input_tokens} are allowed"
        raise invalid(message, param, "context_length_exceeded")
    shortest = body.min_tokens or 0
    if shortest > limit:
        raise invalid(f"`min_tokens` ({shortest}) is more than max_tokens ({limit})", "min_tokens")
    return Stopping(limit, stop_ids(info, body.ignore_eos), shortest)


def _wanted_tokens(body: Body) -> int | None:
    newer = body.max_completion_tokens if isinstance(body, ChatBody) else None
    return body.max_tokens if newer is None else newer


def _checked_ids(ids: list[int], info: EngineInfo) -> list[int]:
    """The ids of a prompt, refused if there are none or if the model does not know one."""
    if not ids:
        raise invalid("the prompt has no tokens", "prompt")
    if min(ids) < 0 or max(ids) >= info.vocab_size:
        raise invalid(f"token ids must be in [0, {info.vocab_size})", "prompt")
    return ids


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

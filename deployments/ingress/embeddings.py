"""Embeddings of a causal model's hidden states: OpenAI's /v1/embeddings and LoRAX's /embed."""

import base64
import math
import struct
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, field_validator
from starlette.responses import Response

from configs.embeddings import EmbeddingsConfig
from configs.wire.adapters import AdapterReference, AdapterSource
from configs.wire.sampling import Pooling, Sampling, Stopping
from deployments.contract import Completion, EngineInfo, GenerateRequest, SequenceRequest
from deployments.ingress.access.keys import hub_token
from deployments.ingress.adapter_names.merges import MergedAdapters, check_merge, requested_adapter
from deployments.ingress.generation.engine import EngineClient, GenerationJob, IngressSettings
from deployments.ingress.generation.replies import FinishedCall, whole
from deployments.ingress.http.errors import RequestError, invalid
from deployments.ingress.http.unicode import Unicode
from deployments.ingress.lorax.jobs import adapter_of
from deployments.ingress.lorax.schema import (
    GenerateParameters,
    GenerateRequestBody,
    check_adapters,
    check_known,
    check_lengths,
    input_limit,
)
from deployments.ingress.requests.jobs import checked_ids
from deployments.ingress.requests.request_fields import REFUSED_EMBEDDINGS, refuse_others
from deployments.ingress.requests.schema import PromptInput, prompts_of
from deployments.ingress.text.tokenizer import Limit, ModelTokenizer

Vector = tuple[float, ...]


class EmbeddingReply(TypedDict):
    """One input's embedding: numbers, or the base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: Vector | str


class EmbeddingUsage(TypedDict):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsReply(TypedDict):
    """Embeddings in the order of the inputs."""

    object: Literal["list"]
    data: list[EmbeddingReply]
    model: str
    usage: EmbeddingUsage


class EmbedReply(TypedDict):
    """The embedding of one text."""

    embeddings: Vector


class EmbeddingsBody(BaseModel):
    """POST /v1/embeddings, with this server's `pooling` and `normalize` and LoRAX's parameters."""

    model_config = ConfigDict(frozen=True, extra="allow")

    model: Unicode = Field(max_length=1024)
    input: list[str | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: Unicode | None = None
    pooling: Literal["mean", "last"] | None = None
    normalize: bool | None = None
    adapter_source: Unicode | None = None
    merged_adapters: MergedAdapters | None = None
    api_token: Unicode | None = None
    cache_salt: Unicode | None = Field(None, min_length=1)
    parameters: GenerateParameters | None = None

    @field_validator("input", mode="plain", json_schema_input_type=PromptInput)
    @classmethod
    def _inputs(cls, given: object) -> list[str | list[int]]:
        return prompts_of(given)


@dataclass(frozen=True)
class _Parsed:
    """A checked request of either route."""

    inputs: Sequence[list[int]]
    characters: int
    adapter: AdapterReference | None
    api_token: str | None
    started: float
    cache_salt: str = ""


def routes(engine: EngineClient) -> APIRouter:
    """Both routes over this engine."""
    router = APIRouter()
    defaults = engine.settings.embeddings

    @router.post("/v1/embeddings")
    async def embeddings(request: Request, body: EmbeddingsBody) -> Response:
        parsed = await _parsed_openai(request, body, engine)
        config = EmbeddingsConfig(
            pooling=Pooling(body.pooling or defaults.pooling),
            normalize=defaults.normalize if body.normalize is None else body.normalize,
        )

        def complete(result: FinishedCall) -> object:
            vectors = _vectors(result.completion, config)
            return _reply(body, vectors, sum(len(ids) for ids in parsed.inputs))

        return await whole(request, engine, _job(parsed, config), complete)

    @router.post("/embed")
    async def embed(request: Request, body: GenerateRequestBody) -> Response:
        parsed = await _parsed_lorax(request, body, engine)

        def complete(result: FinishedCall) -> EmbedReply:
            return {"embeddings": _vectors(result.completion, defaults)[0]}

        return await whole(request, engine, _job(parsed, defaults), complete)

    return router


async def _parsed_openai(request: Request, body: EmbeddingsBody, engine: EngineClient) -> _Parsed:
    started = time.monotonic()
    _check(body, engine.settings)
    info, text = await engine.served()
    limit = _limit(info)
    for given in body.input:
        if isinstance(given, str):
            text.check_length(given, limit)
    token = body.parameters.api_token if body.parameters is not None else None
    return _Parsed(
        inputs=[_checked(await _ids(given, text, limit), info) for given in body.input],
        characters=sum(len(given) for given in body.input if isinstance(given, str)),
        adapter=_adapter_of(body, info, engine.settings.default_source),
        api_token=body.api_token or token or hub_token(request),
        started=started,
        cache_salt=body.cache_salt or "",
    )


def _adapter_of(
    body: EmbeddingsBody, info: EngineInfo, default_source: AdapterSource
) -> AdapterReference | None:
    """The adapter that LoRAX's parameters name; if they name none, the one of `model`."""
    given = body.parameters
    if given is not None and (given.adapter_id or given.merged_adapters is not None):
        return adapter_of(given, info, default_source)
    merged = body.merged_adapters
    return requested_adapter(body.model, body.adapter_source, merged, info, default_source)


async def _parsed_lorax(
    request: Request, body: GenerateRequestBody, engine: EngineClient
) -> _Parsed:
    """Parse as for /generate; parameters of sampling have no effect."""
    started, given = time.monotonic(), body.given
    check_adapters(given)
    info, text = await engine.served()
    adapter = adapter_of(given, info, engine.settings.default_source)
    limit = input_limit(GenerateParameters(), info)
    ids = await text.encode(body.inputs, limit=limit) if body.inputs else []
    check_known(ids, info)
    check_lengths(len(ids), 0, info)
    return _Parsed(
        inputs=[ids],
        characters=len(body.inputs),
        adapter=adapter,
        api_token=given.api_token or hub_token(request),
        started=started,
    )


def _check(body: EmbeddingsBody, settings: IngressSettings) -> None:
    """Refuse what can be refused before the inputs are encoded."""
    refuse_others(body.model_extra, REFUSED_EMBEDDINGS)
    if body.parameters is not None:
        check_adapters(body.parameters)
    check_merge(body.merged_adapters)
    if body.dimensions is not None:
        message = "`dimensions` is not supported: embeddings are as wide as the model's states"
        raise invalid(message, "dimensions", "unsupported_parameter")
    if not body.input or not all(body.input):
        raise invalid("`input` cannot be empty", "input")
    if len(body.input) > settings.max_sequences:
        message = (
            f"`input` has {len(body.input)} entries; at most {settings.max_sequences} are served"
        )
        raise invalid(message, "input")


def _limit(info: EngineInfo) -> Limit:
    def refusal(size: str) -> RequestError:
        message = f"`input` has {size}; at most {info.max_input_tokens} tokens are allowed"
        return invalid(message, "input", "context_length_exceeded")

    return Limit(info.max_input_tokens, refusal)


async def _ids(given: str | list[int], text: ModelTokenizer, limit: Limit) -> list[int]:
    return await text.encode(given, limit=limit) if isinstance(given, str) else given


def _checked(ids: list[int], info: EngineInfo) -> list[int]:
    """The ids of one input; refuses none, unknown ones, and too many."""
    if len(ids) > info.max_input_tokens:
        raise _limit(info).refusal(f"{len(ids)} tokens")
    return checked_ids(ids, info, "input")


def _job(parsed: _Parsed, config: EmbeddingsConfig) -> GenerationJob:
    """The job: sequences that generate no token."""
    sampling, stopping = Sampling(pooling=config.pooling), Stopping(0)
    request = GenerateRequest(
        id=f"emb-{uuid.uuid4().hex}",
        sequences=[SequenceRequest(ids, sampling, stopping) for ids in parsed.inputs],
        adapter=parsed.adapter,
        api_token=parsed.api_token,
    )
    return GenerationJob(
        request=request,
        stops=(),
        keep_stops=False,
        per_token=False,
        characters=parsed.characters,
        cache_salt=parsed.cache_salt,
        started=parsed.started,
    )


def _vectors(completion: Completion, config: EmbeddingsConfig) -> list[Vector]:
    """The embeddings, in order; refuses a model whose code returns no hidden states."""
    vectors: list[Vector] = []
    for outcome in completion.sequences:
        if not outcome.embedding:
            raise invalid("this model cannot embed: its code returns no hidden states", "model")
        vector = struct.unpack(f"<{len(outcome.embedding) // 4}f", outcome.embedding)
        length = math.hypot(*vector) if config.normalize else 1.0
        vectors.append(tuple(value / length for value in vector) if length else vector)
    return vectors


def _reply(body: EmbeddingsBody, vectors: Sequence[Vector], num_tokens: int) -> EmbeddingsReply:
    data: list[EmbeddingReply] = [
        {"object": "embedding", "index": index, "embedding": _written(vector, body.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    usage: EmbeddingUsage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": body.model, "usage": usage}


def _written(vector: Vector, encoding: str | None) -> Vector | str:
    if encoding == "base64":
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
    return vector

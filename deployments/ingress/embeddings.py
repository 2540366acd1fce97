"""Embeddings of a causal model's hidden states: OpenAI's /v1/embeddings and LoRAX's /embed."""

import base64
import math
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypedDict

from fastapi import APIRouter, Request
from pydantic import Field, field_validator
from starlette.responses import Response

from configs.embeddings import EmbeddingsConfig
from configs.wire.sampling import Pooling
from deployments.contract import Completion, EngineInfo, ErrorKind
from deployments.ingress.access.keys import hub_token
from deployments.ingress.generation.engine import EngineClient
from deployments.ingress.generation.replies import FinishedCall, whole
from deployments.ingress.http.body_values import Integer
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
from deployments.ingress.prompts import (
    EncodedPrompt,
    PromptBody,
    PromptRequest,
    characters_of,
    check_body,
    encoded,
    prompt_request,
)
from deployments.ingress.requests.request_fields import REFUSED_EMBEDDINGS
from deployments.ingress.requests.schema import PromptInput, prompts_of

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


class EmbeddingsBody(PromptBody):
    """POST /v1/embeddings, with this server's `pooling` and `normalize` and LoRAX's parameters."""

    model: Unicode = Field(max_length=1024)
    input: list[str | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Integer | None = None
    pooling: Literal["mean", "last"] | None = None
    normalize: bool | None = None

    @field_validator("input", mode="plain", json_schema_input_type=PromptInput)
    @classmethod
    def _inputs(cls, given: object) -> list[str | list[int]]:
        return prompts_of(given)


@dataclass(frozen=True)
class Embedder:
    """How prompts become embeddings. normalize: scale each to the length 1."""

    pooling: Pooling
    normalize: bool

    @classmethod
    def of(cls, info: EngineInfo, defaults: EmbeddingsConfig) -> "Embedder":
        """As the model says, or else the server's settings."""
        own = info.task
        if own.pooling is Pooling.NONE:
            return cls(defaults.pooling, defaults.normalize)
        return cls(own.pooling, own.normalize)

    def vectors(self, completion: Completion) -> list[Vector]:
        """The embeddings, in order; refuses a model whose code returns no hidden states."""
        vectors: list[Vector] = []
        for outcome in completion.sequences:
            if not outcome.embedding:
                raise invalid("this model cannot embed: its code returns no hidden states", "model")
            vector = numbers(outcome.embedding)
            length = math.hypot(*vector) if self.normalize else 1.0
            vectors.append(tuple(value / length for value in vector) if length else vector)
        return vectors


def routes(engine: EngineClient) -> APIRouter:
    """Both routes over this engine."""
    router = APIRouter()
    defaults = engine.settings.embeddings

    @router.post("/v1/embeddings")
    async def embeddings(request: Request, body: EmbeddingsBody) -> Response:
        _check(body)
        prompts = partial(encoded, body.input, engine)
        parsed = await prompt_request(request, body, engine, prompts, characters_of(body.input))
        own = Embedder.of((await engine.served()).info, defaults)
        embedder = Embedder(
            pooling=Pooling(body.pooling or own.pooling),
            normalize=own.normalize if body.normalize is None else body.normalize,
        )

        def complete(result: FinishedCall) -> object:
            return _reply(body, embedder.vectors(result.completion), parsed.num_tokens)

        return await whole(request, engine, parsed.job(embedder.pooling, "emb"), complete)

    @router.post("/embed")
    async def embed(request: Request, body: GenerateRequestBody) -> Response:
        parsed = await lorax_request(request, body, engine)
        embedder = Embedder.of((await engine.served()).info, defaults)

        def complete(result: FinishedCall) -> EmbedReply:
            return {"embeddings": embedder.vectors(result.completion)[0]}

        return await whole(request, engine, parsed.job(embedder.pooling, "emb"), complete)

    return router


async def lorax_request(
    request: Request, body: GenerateRequestBody, engine: EngineClient
) -> PromptRequest:
    """Parse as for /generate; parameters of sampling have no effect."""
    started, given = time.monotonic(), body.given
    check_adapters(given)
    info, text = await engine.served()
    adapter = adapter_of(given, info, engine.settings.default_source)
    limit = input_limit(GenerateParameters(), info)
    ids = await text.encode(body.inputs, limit=limit) if body.inputs else []
    check_known(ids, info)
    check_lengths(len(ids), 0, info)
    return PromptRequest(
        inputs=[EncodedPrompt(ids)],
        characters=len(body.inputs),
        adapter=adapter,
        api_token=given.api_token or hub_token(request),
        started=started,
    )


def _check(body: EmbeddingsBody) -> None:
    """Refuse what can be refused before the inputs are encoded."""
    check_body(body, REFUSED_EMBEDDINGS)
    if body.dimensions is not None:
        message = "`dimensions` is not supported: embeddings are as wide as the model's states"
        raise invalid(message, "dimensions", "unsupported_parameter")


def numbers(data: bytes) -> Vector:
    """The numbers of little-endian float32; refuses NaN and infinity, which JSON has not."""
    found = struct.unpack(f"<{len(data) // 4}f", data)
    if not math.isfinite(sum(found)):
        raise RequestError(
            ErrorKind.GENERATION,
            "the model's numbers for this input are not finite (NaN or infinity): are the "
            "adapter's weights too large, or is engine.model.dtype too narrow for the model?",
        )
    return found


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

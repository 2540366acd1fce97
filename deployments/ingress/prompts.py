"""Requests about prompts alone, for embeddings and scores: their inputs, adapters and jobs."""

import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import ConfigDict, Field
from starlette.requests import Request

from configs.architectures.classifiers import up_to_score
from configs.wire.adapters import AdapterReference
from configs.wire.sampling import Pooling, Sampling, Stopping
from deployments.contract import EngineInfo, GenerateRequest, SequenceRequest
from deployments.ingress.access.keys import hub_token
from deployments.ingress.adapter_names.merges import MergedAdapters, check_merge, requested_adapter
from deployments.ingress.generation.engine import EngineClient, GenerationJob, IngressSettings
from deployments.ingress.http.body_values import Typed
from deployments.ingress.http.errors import RequestError, invalid
from deployments.ingress.http.unicode import Unicode
from deployments.ingress.lorax.jobs import adapter_of
from deployments.ingress.lorax.schema import GenerateParameters, check_adapters
from deployments.ingress.requests.jobs import checked_ids
from deployments.ingress.requests.request_fields import RefusedField, refuse_others
from deployments.ingress.text.tokenizer import Limit, ModelTokenizer


class PromptBody(Typed):
    """The fields that name a model or an adapter; `parameters` are LoRAX's."""

    model_config = ConfigDict(frozen=True, extra="allow")

    model: Unicode = Field("", max_length=1024)
    user: Unicode | None = None
    adapter_source: Unicode | None = None
    merged_adapters: MergedAdapters | None = None
    api_token: Unicode | None = None
    cache_salt: Unicode | None = Field(None, min_length=1)
    parameters: GenerateParameters | None = None


class EncodedPrompt(NamedTuple):
    """One prompt; second_at: where the second of two texts begins, 0 if it is one text."""

    ids: list[int]
    second_at: int = 0


@dataclass(frozen=True)
class PromptRequest:
    """A checked request: its prompts, and what they are computed with."""

    inputs: Sequence[EncodedPrompt]
    characters: int
    adapter: AdapterReference | None
    api_token: str | None
    started: float
    cache_salt: str = ""

    @property
    def num_tokens(self) -> int:
        """How many tokens all prompts have."""
        return sum(len(prompt.ids) for prompt in self.inputs)

    def job(self, pooling: Pooling, prefix: str, pad: int | None = None) -> GenerationJob:
        """The job: sequences that generate no token.

        prefix: of the request's id. pad: the token that a decoder's classification head passes
        over where it ends a prompt.
        """
        stopping = Stopping(0)
        request = GenerateRequest(
            id=f"{prefix}-{uuid.uuid4().hex}",
            sequences=[
                SequenceRequest(
                    up_to_score(ids, pad) if pooling is Pooling.SCORE else ids,
                    Sampling(pooling=pooling, second_at=second_at),
                    stopping,
                )
                for ids, second_at in self.inputs
            ],
            adapter=self.adapter,
            api_token=self.api_token,
        )
        return GenerationJob(
            request=request,
            stops=(),
            keep_stops=False,
            per_token=False,
            characters=self.characters,
            cache_salt=self.cache_salt,
            started=self.started,
        )


def check_body(body: PromptBody, refused: Mapping[str, RefusedField]) -> None:
    """Refuse what can be refused of a body before its inputs are looked at."""
    refuse_others(body.model_extra, refused)
    if body.parameters is not None:
        check_adapters(body.parameters)
    check_merge(body.merged_adapters)


def check_count(count: int, settings: IngressSettings, param: str) -> None:
    """Refuse more inputs than one request may have."""
    if count > settings.max_sequences:
        message = f"`{param}` has {count} entries; at most {settings.max_sequences} are served"
        raise invalid(message, param)


def input_limit(info: EngineInfo, param: str = "input") -> Limit:
    """How many tokens one input may have."""

    def refusal(size: str) -> RequestError:
        message = f"`{param}` has {size}; at most {info.max_input_tokens} tokens are allowed"
        return invalid(message, param, "context_length_exceeded")

    return Limit(info.max_input_tokens, refusal)


async def encoded(
    inputs: Sequence[str | list[int]],
    engine: EngineClient,
    param: str = "input",
    count: int | None = None,
) -> list[EncodedPrompt]:
    """The prompts of inputs; refuses empty ones, unknown ids, and too many of either.

    count: of what the client sent, where it is not the inputs' own.
    """
    if not inputs or not all(inputs):
        raise invalid(f"`{param}` cannot be empty", param)
    check_count(len(inputs) if count is None else count, engine.settings, param)
    info, text = await engine.served()
    limit = input_limit(info, param)
    for given in inputs:
        if isinstance(given, str):
            text.check_length(given, limit)
    return [EncodedPrompt(checked(await _ids(given, text, limit), info, param)) for given in inputs]


async def encoded_pairs(
    pairs: Sequence[tuple[str, str]], engine: EngineClient, param: str
) -> list[EncodedPrompt]:
    """The prompts of pairs of texts, as the tokenizer joins them; refuses as `encoded` does."""
    check_count(len(pairs), engine.settings, param)
    info, text = await engine.served()
    limit = input_limit(info, param)
    for pair in pairs:
        if not all(pair):
            raise invalid(f"`{param}` cannot be empty", param)
        for each in pair:
            text.check_length(each, limit)
    prompts = [EncodedPrompt(*await text.encode_pair(*pair)) for pair in pairs]
    for prompt in prompts:
        checked(prompt.ids, info, param)
    return prompts


async def _ids(given: str | list[int], text: ModelTokenizer, limit: Limit) -> list[int]:
    return await text.encode(given, limit=limit) if isinstance(given, str) else given


def checked(ids: list[int], info: EngineInfo, param: str) -> list[int]:
    """The ids of one input; refuses none, unknown ones, and too many."""
    if len(ids) > info.max_input_tokens:
        raise input_limit(info, param).refusal(f"{len(ids)} tokens")
    return checked_ids(ids, info, param)


async def prompt_request(
    request: Request,
    body: PromptBody,
    engine: EngineClient,
    inputs: Callable[[], Awaitable[Sequence[EncodedPrompt]]],
    characters: int,
) -> PromptRequest:
    """A request with the prompts that `inputs` encodes, over what the body names."""
    started = time.monotonic()
    info = (await engine.served()).info
    given, source = body.parameters, engine.settings.default_source
    if given is not None and (given.adapter_id or given.merged_adapters is not None):
        adapter = adapter_of(given, info, source)
    else:
        named = body.adapter_source, body.merged_adapters
        adapter = requested_adapter(body.model, *named, info, source)
    token = given.api_token if given is not None else None
    return PromptRequest(
        inputs=await inputs(),
        characters=characters,
        adapter=adapter,
        api_token=body.api_token or token or hub_token(request),
        started=started,
        cache_salt=body.cache_salt or "",
    )


def characters_of(inputs: Sequence[str | list[int]]) -> int:
    """How many characters the texts among inputs have."""
    return sum(len(given) for given in inputs if isinstance(given, str))

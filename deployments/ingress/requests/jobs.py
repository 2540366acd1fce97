"""Makes jobs from OpenAI's requests: checks, sampling, stopping."""

import secrets
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request

from configs.wire.adapters import AdapterReference, AdapterSource
from configs.wire.sampling import Stopping
from deployments.contract import EngineInfo, GenerateRequest, SequenceRequest
from deployments.ingress.access.keys import Grant, grant_of, hub_token
from deployments.ingress.adapter_names.merges import check_merge, requested_adapter
from deployments.ingress.generation.choices import spread_seed
from deployments.ingress.generation.engine import (
    GenerationJob,
    IngressSettings,
    stop_ids,
)
from deployments.ingress.generation.prompt_replies import Prompt, with_prompt_logprobs
from deployments.ingress.http.errors import RequestError, invalid
from deployments.ingress.requests.schema import ChatBody, CompletionBody
from deployments.ingress.structured.constraints import Constraint, check_endings
from deployments.ingress.text.tokenizer import Limit

_DEFAULT_MAX_TOKENS = 16

Body = CompletionBody | ChatBody


@dataclass(frozen=True)
class Caller:
    """The caller of one request.

    token: for private adapters.
    grant: the permissions of its API key.
    started: when the request arrived, in seconds of a monotonic clock.
    """

    token: str | None
    grant: Grant
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, request: Request) -> "Caller":
        """The caller of a request that has just arrived."""
        return cls(hub_token(request), grant_of(request))


def check(body: Body, settings: IngressSettings) -> None:
    """Refuse what can be refused before the prompts are encoded."""
    body.refuse_unsupported()
    check_merge(body.merged_adapters)
    stops = body.stops
    if len(stops) > settings.max_stop_sequences:
        message = f"`stop` supports up to {settings.max_stop_sequences} strings, got {len(stops)}"
        raise invalid(message, "stop")
    if not all(0 < len(stop) <= settings.max_stop_length for stop in stops):
        message = f"`stop` strings must have 1 to {settings.max_stop_length} characters"
        raise invalid(message, "stop")
    _check_text(body)
    _check_choices(body, settings)
    _check_logprobs(body, settings)
    if body.stream_options is not None and not body.stream:
        raise invalid("`stream_options` is only for streams", "stream_options")
    _check_prompt_logprobs(body, settings)
    if isinstance(body, CompletionBody):
        _check_prompts(body, settings)


def _check_text(body: Body) -> None:
    """Refuse fields about the text that contradict each other."""
    if body.truncation_side is not None and body.truncate_prompt_tokens is None:
        raise invalid("`truncation_side` needs `truncate_prompt_tokens`", "truncation_side")
    if body.truncate_prompt_tokens == 0:
        raise invalid("`truncate_prompt_tokens` must be -1 or at least 1", "truncate_prompt_tokens")
    if isinstance(body, CompletionBody) and body.echo and body.truncate_prompt_tokens is not None:
        raise invalid("`echo` cannot be combined with `truncate_prompt_tokens`", "echo")
    if body.detokenize is not False:
        return
    with_tools = isinstance(body, ChatBody) and body.toolbox is not None
    if body.stops or with_tools:
        found = "`stop`" if body.stops else "`tools`: they are found in the text"
        raise invalid(f"`detokenize: false` cannot be combined with {found}", "detokenize")


def _check_choices(body: Body, settings: IngressSettings) -> None:
    if body.choices > settings.max_choices:
        raise invalid(f"`n` must be at most {settings.max_choices}, got {body.choices}", "n")
    if isinstance(body, ChatBody) or body.best_of is None:
        return
    if body.best_of < body.choices:
        raise invalid(f"`best_of` ({body.best_of}) is less than n ({body.choices})", "best_of")
    if body.best_of > settings.max_choices:
        message = f"`best_of` must be at most {settings.max_choices}, got {body.best_of}"
        raise invalid(message, "best_of")
    if body.stream and body.best_of > body.choices:
        raise invalid("`best_of` above n cannot be streamed", "best_of")


def _check_logprobs(body: Body, settings: IngressSettings) -> None:
    if body.num_logprobs > settings.max_logprobs:
        param = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
        message = f"`{param}` must be at most {settings.max_logprobs}, got {body.num_logprobs}"
        raise invalid(message, param)
    if isinstance(body, ChatBody) and body.top_logprobs is not None and not body.logprobs:
        raise invalid("`top_logprobs` needs `logprobs` to be true", "top_logprobs")


def _check_prompt_logprobs(body: Body, settings: IngressSettings) -> None:
    """Refuse unsupported prompt logprobs, and requests for no token at all."""
    num_top = body.num_prompt_logprobs
    param = "prompt_logprobs" if body.prompt_logprobs is not None else "echo"
    if num_top > settings.max_logprobs:
        message = f"`{param}` must be at most {settings.max_logprobs}, got {num_top}"
        raise invalid(message, param)
    if num_top >= 0 and body.stream:
        raise invalid("logprobs of the prompt cannot be streamed", param)
    if body.max_tokens != 0:
        return
    if not isinstance(body, CompletionBody) or (num_top < 0 and not body.echo):
        message = "`max_tokens` must be at least 1 unless `echo` or `prompt_logprobs` is set"
        raise invalid(message, "max_tokens")


def _check_prompts(body: CompletionBody, settings: IngressSettings) -> None:
    prompts = body.prompt
    if not prompts or not all(prompts):
        raise invalid("`prompt` cannot be empty", "prompt")
    if len(prompts) * body.candidates > settings.max_sequences:
        raise invalid(
            f"{len(prompts)} prompts times {body.candidates} choices are more than "
            f"{settings.max_sequences} sequences",
            "prompt",
        )


def adapter_of(
    body: Body, info: EngineInfo, default_source: AdapterSource
) -> AdapterReference | None:
    """The adapter or the merge that the request names; None for the base model."""
    return requested_adapter(
        body.model, body.adapter_source, body.merged_adapters, info, default_source
    )


def job_of(
    body: Body,
    prompts: Sequence[Prompt],
    adapter: AdapterReference | None,
    info: EngineInfo,
    caller: Caller,
    constraint: Constraint,
) -> GenerationJob:
    """The job: for each prompt its candidates, in order."""
    check_endings(constraint, _ignores_end(body), body.min_tokens or 0)
    body = _with_defaults(body, info)
    seed = secrets.randbits(63) if body.seed is None else body.seed
    sequences = [
        SequenceRequest(
            prompt.ids, body.sampling(spread_seed(seed, i), stopping, constraint), stopping
        )
        for prompt in prompts
        for stopping in [_stopping(body, len(checked_ids(prompt.ids, info)), info)]
        for i in range(body.candidates)
    ]
    if body.num_prompt_logprobs >= 0:
        # Once for each prompt: its candidates share it.
        for i in range(0, len(sequences), body.candidates):
            sequences[i] = with_prompt_logprobs(sequences[i], body.num_prompt_logprobs)
    for name, ids in (("logit_bias", body.logit_bias), ("stop_token_ids", body.stop_token_ids)):
        check_known(name, ids or (), info)
    request = GenerateRequest(
        id=f"req-{uuid.uuid4().hex}",
        sequences=sequences,
        adapter=adapter,
        api_token=body.api_token or caller.token,
    )
    shown = (body.stop_token_ids or ()) if body.include_stop_str_in_output else ()
    return GenerationJob(
        request=request,
        stops=body.stops,
        keep_stops=bool(body.include_stop_str_in_output),
        visible_stop_ids=frozenset(shown),
        detokenize=body.detokenize is not False,
        per_token=body.num_logprobs >= 0 or bool(body.return_token_ids),
        characters=sum(len(prompt.text) for prompt in prompts),
        choices=body.candidates,
        cache_salt=body.cache_salt or "",
        started=caller.started,
    )


def _with_defaults(body: Body, info: EngineInfo) -> Body:
    """The request, with the server's sampling where it leaves its own out."""
    given = info.sampling_defaults.items()
    left_out = {name: value for name, value in given if getattr(body, name) is None}
    return body.model_copy(update=left_out) if left_out else body


def _stopping(body: Body, num_prompt: int, info: EngineInfo) -> Stopping:
    """When the sequence ends; refuses what exceeds the model's context."""
    param = "messages" if isinstance(body, ChatBody) else "prompt"
    left = info.max_total_tokens - num_prompt
    requested = requested_tokens(body)
    default = left if isinstance(body, ChatBody) else min(_DEFAULT_MAX_TOKENS, left)
    limit = max(1, default) if requested is None else requested
    if body.fills_context and left > 0:
        limit = min(limit, left)
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
    ends = stop_ids(info, _ignores_end(body))
    # In order, unlike a set: equal requests must make equal plans.
    return Stopping(limit, tuple(dict.fromkeys([*ends, *(body.stop_token_ids or ())])), shortest)


def _ignores_end(body: Body) -> bool:
    return bool(body.ignore_eos or body.ignore_eos_token)


def requested_tokens(body: Body) -> int | None:
    """The most tokens of an answer that the client wants; None for no limit of its own."""
    newer = body.max_completion_tokens if isinstance(body, ChatBody) else None
    return body.max_tokens if newer is None else newer


def prompt_limit(info: EngineInfo, param: str) -> Limit:
    """How many tokens a prompt may have; `_stopping` adds the answer's later."""

    def refusal(size: str) -> RequestError:
        return invalid(
            f"This model's maximum context length is {info.max_total_tokens} tokens. However, "
            f"your {param} has {size}, which cannot fit. "
            f"Please reduce the length of the {param}.",
            param,
            "context_length_exceeded",
        )

    return Limit(min(info.max_input_tokens, info.max_total_tokens), refusal)


def checked_ids(ids: list[int], info: EngineInfo, param: str = "prompt") -> list[int]:
    """The ids; refuses none at all, and ids that the model does not have."""
    if not ids:
        raise invalid(f"`{param}` has no tokens", param)
    if min(ids) < 0:
        raise invalid(
            f"`{param}` has token {min(ids)}; ids must be in [0, {info.vocab_size})", param
        )
    check_known(param, ids, info)
    return ids


def check_known(name: str, ids: Iterable[int], info: EngineInfo) -> None:
    """Refuse token ids that the model does not have."""
    unknown = next((id for id in ids if id >= info.vocab_size), None)
    if unknown is not None:
        message = f"`{name}` has token {unknown}; ids must be in [0, {info.vocab_size})"
        raise invalid(message, name)

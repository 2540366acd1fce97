"""Makes jobs from LoRAX's requests."""

import secrets
import time
import uuid

from starlette.requests import Request

from configs.wire.adapters import AdapterReference, AdapterSource
from configs.wire.sampling import Stopping
from deployments.contract import EngineInfo, GenerateRequest, SequenceRequest
from deployments.ingress.access.keys import hub_token
from deployments.ingress.adapter_names.merges import requested_adapter
from deployments.ingress.generation.choices import spread_seed
from deployments.ingress.generation.engine import (
    EngineClient,
    GenerationJob,
    ServedModel,
    stop_ids,
)
from deployments.ingress.generation.prompt_replies import with_prompt_logprobs
from deployments.ingress.lorax.schema import (
    GenerateParameters,
    GenerateRequestBody,
    check,
    check_characters,
    check_known,
    check_lengths,
    input_limit,
    sampling,
    truncated,
)
from deployments.ingress.structured.constraints import UNCONSTRAINED, check_endings


async def job_of(
    engine: EngineClient, request: Request, body: GenerateRequestBody, streams: bool
) -> GenerationJob:
    """The job of a request; refuses an invalid one."""
    started = time.monotonic()
    given = body.given
    check(body.inputs, given, engine.settings, streams)
    served = await engine.served()
    ids = await _encoded(body.inputs, given, served)
    sequences = await _sequences(ids, given, engine, served.info, streams)
    return GenerationJob(
        request=GenerateRequest(
            id=f"gen-{uuid.uuid4().hex}",
            sequences=sequences,
            adapter=adapter_of(given, served.info, engine.settings.default_source),
            api_token=given.api_token or hub_token(request),
        ),
        stops=given.stop,
        keep_stops=True,
        per_token=streams or given.detailed,
        characters=len(body.inputs),
        choices=len(sequences),
        started=started,
    )


def adapter_of(
    given: GenerateParameters, info: EngineInfo, default_source: AdapterSource
) -> AdapterReference | None:
    """The adapter or the merge that the request names; None for the base model."""
    name, source = given.adapter_id or "", given.adapter_source or None
    return requested_adapter(name, source, given.merged_adapters, info, default_source)


async def _encoded(inputs: str, given: GenerateParameters, served: ServedModel) -> list[int]:
    info, tokenizer = served
    limit = input_limit(given, info)
    if limit is None:
        check_characters(inputs, info)
    ids = truncated(await tokenizer.encode(inputs, limit=limit), given, info)
    check_known(ids, info)
    return ids


async def _sequences(
    ids: list[int],
    given: GenerateParameters,
    engine: EngineClient,
    info: EngineInfo,
    streams: bool,
) -> list[SequenceRequest]:
    """One sequence, or `best_of` with different seeds."""
    stopping = Stopping(
        max_new_tokens=check_lengths(len(ids), given.max_new_tokens, info),
        stop_token_ids=stop_ids(info, given.ignore_eos_token),
    )
    format = given.response_format
    constraint = format.constraint if format is not None else UNCONSTRAINED
    constraint = await engine.compiler.compiled(constraint, info)
    check_endings(constraint, given.ignore_eos_token, 0)
    seed = secrets.randbits(63) if given.seed is None else given.seed
    choices = given.best_of or 1
    logprobs = given.return_k_alternatives or 0 if streams or given.detailed else -1
    if choices > 1:
        logprobs = max(0, logprobs)  # The best sequence is selected by logprobs.
    sequences = []
    for choice in range(choices):
        seeded = sampling(given, spread_seed(seed, choice), logprobs, constraint.json_schema)
        sequences.append(SequenceRequest(ids, seeded, stopping))
    if given.decoder_input_details:
        sequences[0] = with_prompt_logprobs(sequences[0], 0)
    return sequences

"""Replies of all routes: whole ones, and streams, whose status waits for the first token."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from configs.wire.plan import TokenLogprobs
from configs.wire.sampling import FinishReason
from deployments.contract import Completion
from deployments.ingress.access.keys import grant_of
from deployments.ingress.access.quotas import Quota
from deployments.ingress.generation.calls import EngineCall, Event, events
from deployments.ingress.generation.engine import EngineClient, GenerationJob
from deployments.ingress.generation.observed import observe
from deployments.ingress.generation.reply_headers import reply_headers, stream_headers
from deployments.ingress.http.errors import RequestError
from deployments.ingress.http.responses import json_response
from deployments.ingress.http.sse import KEEP_ALIVE, EventStream, unless_gone, wait_unless_gone
from deployments.ingress.text.detokenizer_state import DetokenizerState, TextPiece
from deployments.ingress.text.tokenizer import ModelTokenizer


class Choice(NamedTuple):
    """One finished sequence.

    prompt_logprobs: of the prompt, which its choices share.
    stop: the stop string that ended it.
    """

    text: str
    pieces: list[TextPiece]
    num_tokens: int
    reason: FinishReason
    prompt: Sequence[int] = ()
    prompt_logprobs: list[TokenLogprobs] | None = None
    stop: str | None = None


class RunningCall(NamedTuple):
    """A running call, for the writer of its stream."""

    call: EngineCall
    detokenizers: list[DetokenizerState]
    tokenizer: ModelTokenizer

    def events(self) -> AsyncIterator[list[Event]]:
        """Batches of events of all sequences."""
        return events(self.call, self.detokenizers)


Chunks = Callable[[RunningCall], AsyncGenerator[bytes, None]]


class FinishedCall(NamedTuple):
    """All finished sequences of a call."""

    choices: list[Choice]
    completion: Completion


async def whole(
    request: Request,
    engine: EngineClient,
    job: GenerationJob,
    body: Callable[[FinishedCall], object],
) -> Response:
    """Run a job to its end and reply with `body` of the result."""
    served = await engine.served()
    job, quota = _admit(request, job)
    detokenizers = job.detokenizers(served.tokenizer)
    with observe(engine, job) as observer:
        running = collect(engine, job, detokenizers, frames=quota.counts_tokens)
        try:
            result = await unless_gone(request.receive, running)
        finally:
            lengths = _charge(quota, detokenizers)
        record = observer.ended(result.completion, lengths)
    headers = reply_headers(served.info, job, record)
    return json_response(body(result), headers=headers)


async def collect(
    engine: EngineClient,
    job: GenerationJob,
    detokenizers: Sequence[DetokenizerState],
    frames: bool = False,
) -> FinishedCall:
    """Run a job to its end; frames: read tokens as they come, so that they are counted by then."""
    gathered: list[list[Event]] = [[] for _ in detokenizers]
    async with engine.call(job, frames) as call:
        async for batch in events(call, detokenizers):
            for event in batch:
                gathered[event.sequence].append(event)
    assert call.completion is not None, "the events ended before the call"
    outcomes = call.completion.sequences
    # A prompt's logprobs are computed once, with the first of its choices.
    prompt_logprobs = [outcomes[i - i % job.choices].prompt_logprobs for i in range(len(outcomes))]
    choices = [
        _choice(parts, detokenizer.num_tokens)._replace(prompt=sequence.prompt, prompt_logprobs=own)
        for parts, detokenizer, sequence, own in zip(
            gathered, detokenizers, job.request.sequences, prompt_logprobs, strict=True
        )
    ]
    return FinishedCall(choices, call.completion)


def _choice(parts: list[Event], num_tokens: int) -> Choice:
    """A sequence from all its events."""
    reason = parts[-1].reason
    assert reason is not None, "a sequence without an end"
    text = "".join([event.text for event in parts])
    pieces = [piece for event in parts for piece in event.pieces]
    return Choice(text, pieces, num_tokens, reason, stop=parts[-1].stop)


async def stream(
    request: Request,
    engine: EngineClient,
    job: GenerationJob,
    chunks: Chunks,
    error_body: Callable[[RequestError], object],
) -> Response:
    """Run a job and reply with a stream of chunks; a failure before the first chunk is raised.

    If the first chunk is late, the stream begins with a comment. From then on the status is sent,
    and a failure is the last event.
    """
    info, text = await engine.served()
    job, quota = _admit(request, job)
    running = RunningCall(engine.call(job, frames=True), job.detokenizers(text), text)
    body = _within_call(engine, job, running, chunks, quota)
    # Before `first` first runs, so the request is sent one round of the event loop earlier.
    running.call.start()
    first = asyncio.ensure_future(anext(body))
    keep_alive = engine.settings.keep_alive_seconds
    try:
        await wait_unless_gone(request.receive, first, keep_alive)
    except BaseException:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await running.call.close()  # `first` closes it only if it has entered the call.
        raise
    headers = stream_headers(info, job)
    if first.done():
        return EventStream(first.result(), body, error_body, headers, keep_alive)
    late = _late(first, body)
    return EventStream(await anext(late), late, error_body, headers, keep_alive)


async def _late(
    first: asyncio.Future[bytes], body: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    """A comment, the awaited first chunk, the rest of the body. Closing it closes the body."""
    try:
        yield KEEP_ALIVE
        yield await first
        async for chunk in body:
            yield chunk
    finally:
        # A generator cannot be closed while `first` runs in it.
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await body.aclose()


async def _within_call(
    engine: EngineClient, job: GenerationJob, running: RunningCall, chunks: Chunks, quota: Quota
) -> AsyncGenerator[bytes, None]:
    with observe(engine, job) as observer:
        try:
            async with running.call:
                async for chunk in chunks(running):
                    yield chunk
        finally:
            lengths = _charge(quota, running.detokenizers)
        assert running.call.completion is not None, "the events ended before the call"
        observer.ended(running.call.completion, lengths)


def _charge(quota: Quota, detokenizers: Sequence[DetokenizerState]) -> list[int]:
    """Charge an answer's tokens; of a client that leaves, those so far. Returns their numbers."""
    lengths = [detokenizer.num_tokens for detokenizer in detokenizers]
    quota.take_tokens(sum(lengths))
    return lengths


def _admit(request: Request, job: GenerationJob) -> tuple[GenerationJob, Quota]:
    """Put the caller's permissions into the job, and charge its prompts' tokens.

    Returns also the quota for the answer's tokens; RequestError if it is used up. The jobs of all
    routes pass here, so no route can forget the caller's salt of the prefix cache.
    """
    grant = grant_of(request)
    grant.quota.admit_tokens()
    # All choices of a prompt share its computation, so it is charged once.
    prompts = job.request.sequences[:: job.choices]
    grant.quota.take_tokens(sum(len(sequence.prompt) for sequence in prompts))
    granted = msgspec.structs.replace(
        job.request,
        allowed=grant.patterns,
        payer=grant.name,
        cache_salt=grant.cache_salt(job.cache_salt),
        background=grant.background,
    )
    return replace(job, request=granted), grant.quota

"""Runs a job and writes the reply of its dialect, whole or as a stream."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from deployments.ingress.generation.calls import Event
from deployments.ingress.generation.choices import best_first
from deployments.ingress.generation.engine import EngineClient, GenerationJob
from deployments.ingress.generation.replies import Choice, FinishedCall, RunningCall, stream, whole
from deployments.ingress.http.errors import RequestError
from deployments.ingress.requests.usage import UsageReply, usage_of


class AnswerWriter(Protocol):
    """Writes one reply of a dialect: `body` a whole one, the others a stream."""

    def opening(self, num_choices: int) -> bytes:
        """The events before any token."""

    def chunks(self, event: Event) -> bytes:
        """The events for new text of a sequence, or for its end."""

    def closing(self, usage: UsageReply) -> bytes:
        """The events after all sequences have ended."""

    def failed(self, error: RequestError) -> object:
        """The last event of a stream that fails: its data, or all of its bytes."""

    def body(self, choices: Sequence[Choice], usage: UsageReply) -> object:
        """A whole reply."""


async def answer(
    request: Request,
    engine: EngineClient,
    job: GenerationJob,
    writer: AnswerWriter,
    streams: bool,
    num_shown: int = 1,
) -> Response:
    """Run a job and write its reply; num_shown: choices of each prompt in a whole reply."""
    sequences = job.request.sequences

    async def chunks(running: RunningCall) -> AsyncGenerator[bytes, None]:
        # With the first token's events, so that a call that fails before it has a status.
        opening = writer.opening(len(sequences))
        async for batch in running.events():
            written = opening + b"".join([writer.chunks(event) for event in batch])
            opening = b""
            if written:
                yield written
        completion = running.call.completion
        assert completion is not None, "the events ended before the call"
        generated = sum(detokenizer.num_tokens for detokenizer in running.detokenizers)
        yield writer.closing(usage_of(sequences, job.choices, generated, completion))

    def complete(result: FinishedCall) -> object:
        generated = sum(choice.num_tokens for choice in result.choices)
        usage = usage_of(sequences, job.choices, generated, result.completion)
        return writer.body(_best(result, job.choices, num_shown), usage)

    if streams:
        return await stream(request, engine, job, chunks, writer.failed)
    return await whole(request, engine, job, complete)


def _best(result: FinishedCall, num_candidates: int, num_shown: int) -> list[Choice]:
    """Of each prompt's candidates the best ones, the best first."""
    if num_candidates == num_shown:
        return result.choices
    shown = []
    for start in range(0, len(result.choices), num_candidates):
        own = slice(start, start + num_candidates)
        candidates = result.choices[own]
        counts = [candidate.num_tokens for candidate in candidates]
        order = best_first(result.completion.sequences[own], counts)
        shown += [candidates[index] for index in order[:num_shown]]
    return shown

"""Requests whose driver was lost: what another one gets, and how often.

A token depends on the prompt, the tokens before it, and the request's sampling with its seed, all
of which the ingress has. So another driver continues an answer after the tokens that are here.
"""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from msgspec.structs import replace

from deployments.contract import GenerateRequest, SequenceRequest
from deployments.ingress.generation.frames import RequestInbox
from deployments.ingress.http.errors import EngineLost

MOST_RESUBMISSIONS = 3
"""Drivers that may be lost with one request: it may be what kills them."""

T = TypeVar("T")


def resubmission(
    request: GenerateRequest, name: str, inbox: RequestInbox, stops: Mapping[int, int]
) -> GenerateRequest:
    """The request for another driver, with the tokens that have arrived.

    name: its first id. stops: the tokens of sequences that a stop string ended, by index.
    """
    number = request.resubmissions + 1
    sequences = [
        _continued(sequence, inbox, index, stops.get(index))
        for index, sequence in enumerate(request.sequences)
    ]
    # Another id: frames of the driver that is gone may still be on their way.
    return replace(
        request,
        id=f"{name}-{number}",
        sequences=sequences,
        resubmissions=number,
        origin=inbox.origin,
    )


def _continued(
    sequence: SequenceRequest, inbox: RequestInbox, index: int, stop: int | None
) -> SequenceRequest:
    tokens, logprobs = inbox.received(index)
    stopping = sequence.stopping
    if stop is not None:  # It is complete, and the driver sees that.
        stopping = replace(stopping, max_new_tokens=stop)
    return replace(
        sequence, generated=tokens[:stop], logprobs=(logprobs or [])[:stop], stopping=stopping
    )


async def persistent(call: Callable[[], Awaitable[T]]) -> T:
    """The result of a call that only reads, made again when the driver that ran it was lost."""
    for _ in range(MOST_RESUBMISSIONS):
        with suppress(EngineLost):
            return await call()
    return await call()

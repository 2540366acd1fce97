"""What goes into the scheduler about adapters and what comes out of it about requests."""

import msgspec

from configs.adapters import AdapterKey, AdapterRefusal, AdapterShape
from configs.sampling import FinishReason
from scheduler.plan import TokenLogprobs

RequestId = tuple[str, int]
"""(HTTP request id, index of the sequence in it)."""


class AdapterFailure(msgspec.Struct, frozen=True):
    """The request's adapter cannot be served; the message is meant for the client."""

    refusal: AdapterRefusal
    message: str


class Cancelled(msgspec.Struct, frozen=True):
    """The client left."""


class RanksFailure(msgspec.Struct, frozen=True):
    """The ranks were lost again and again while the request ran; it is not tried once more."""

    message: str


Ending = FinishReason | AdapterFailure | Cancelled | RanksFailure


class NewTokens(msgspec.Struct, frozen=True):
    """Generated tokens start .. start + len - 1 of a request (0-based, without the prompt).

    logprobs: one entry a token when the request asked for them, else None.
    """

    request_id: RequestId
    start: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None


class Ended(msgspec.Struct, frozen=True):
    """The one last event of a request, with everything that it generated and keeps.

    cached_tokens: prompt tokens that came from the prefix cache. arrival, first_scheduled,
    first_token: seconds on the caller's clock; None when it never came to that.
    """

    request_id: RequestId
    ending: Ending
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    cached_tokens: int
    arrival: float
    first_scheduled: float | None
    first_token: float | None


Event = NewTokens | Ended


class AdapterStaged(msgspec.Struct, frozen=True):
    """All ranks hold the adapter in host memory; the answer to a key of `to_stage`."""

    key: AdapterKey
    shape: AdapterShape


class AdapterFailed(msgspec.Struct, frozen=True):
    """The adapter could not be staged; the other answer to a key of `to_stage`."""

    key: AdapterKey
    refusal: AdapterRefusal
    message: str


class AdapterPinned(msgspec.Struct, frozen=True):
    """Keep the adapter on the device (it is staged and filled unasked), or keep it no longer."""

    key: AdapterKey
    pinned: bool


class AdapterUnloaded(msgspec.Struct, frozen=True):
    """Forget the adapter's bytes and its pin as soon as no request uses or awaits it."""

    key: AdapterKey


AdapterEvent = AdapterStaged | AdapterFailed | AdapterPinned | AdapterUnloaded

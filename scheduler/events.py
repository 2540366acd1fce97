"""Events: what the scheduler is given about adapters, and what it returns about requests."""

from collections.abc import Sequence

import msgspec

from configs.wire.adapters import AdapterKey, AdapterRefusal, AdapterShape
from configs.wire.plan import TokenLogprobs
from configs.wire.sampling import FinishReason

RequestId = tuple[str, int]
"""(HTTP request id, index of the sequence in it)."""


class AdapterFailure(msgspec.Struct, frozen=True):
    """The request's adapter cannot be served; the message is meant for the client."""

    refusal: AdapterRefusal
    message: str


UNLOADED = AdapterFailure(
    AdapterRefusal.UNAVAILABLE, "the adapter was unloaded while it was being staged"
)


class ClientCancelled(msgspec.Struct, frozen=True):
    """The client left."""


class RanksFailure(msgspec.Struct, frozen=True):
    """The request killed the ranks, or does not fit on the ranks that replaced them."""

    message: str


class ConstraintFailure(msgspec.Struct, frozen=True):
    """The constraint cannot be followed within the limits of its matcher."""

    message: str


Ending = FinishReason | AdapterFailure | ClientCancelled | RanksFailure | ConstraintFailure


class NewTokens(msgspec.Struct, frozen=True, gc=False):
    """Generated tokens start .. start + len - 1 of a request (0-based, without the prompt).

    All are of one step; those behind the first came as a draft's.
    logprobs: one entry for each token if the request wants them, else None.
    """

    request_id: RequestId
    start: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None


class Ended(msgspec.Struct, frozen=True):
    """The last event of a request, sent once, with everything that it generated.

    tokens: the generated ids.
    logprobs: one entry for each token if the request wants them, else None.
    cached_tokens: prompt tokens that came from the prefix cache.
    arrival, first_scheduled, first_token: seconds on the caller's clock; None if it did not happen.
    prompt_logprobs: of the prompt's tokens from the second on; None if not requested.
    embedding: of the prompt, float32 little-endian; empty if not requested or not computed.
    num_drafted: tokens that were guessed for it.
    skipped: the indices of generated tokens that came as a draft's, ascending.
    """

    request_id: RequestId
    ending: Ending
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    cached_tokens: int
    arrival: float
    first_scheduled: float | None
    first_token: float | None
    prompt_logprobs: list[TokenLogprobs] | None = None
    embedding: bytes = b""
    num_drafted: int = 0
    skipped: Sequence[int] = ()


class AdapterArrived(msgspec.Struct, frozen=True):
    """The reply to AdapterWanted: the adapter is staged or loaded, or `failure` says why not."""

    key: AdapterKey
    failure: AdapterFailure | None = None


RequestEvent = NewTokens | Ended

Event = RequestEvent | AdapterArrived


class AdapterStaged(msgspec.Struct, frozen=True):
    """All ranks hold the adapter in host memory; one reply to a key of `to_stage`.

    kept: False when some rank had no room for it; it is staged again once there is room.
    """

    key: AdapterKey
    shape: AdapterShape
    kept: bool = True


class AdapterFailed(msgspec.Struct, frozen=True):
    """The adapter could not be staged; the other reply to a key of `to_stage`.

    partly: whether some rank holds it all the same, or may come to hold it.
    """

    key: AdapterKey
    refusal: AdapterRefusal
    message: str
    partly: bool = False


class AdapterLoaded(msgspec.Struct, frozen=True):
    """All ranks have finished a plan's load; rows may use the adapter from now on."""

    key: AdapterKey


class AdapterPinned(msgspec.Struct, frozen=True):
    """Keep the adapter on the device (stage and load it without a request), or stop doing so."""

    key: AdapterKey
    pinned: bool


class AdapterUnloaded(msgspec.Struct, frozen=True):
    """Forget the adapter and its pin as soon as no request uses it or waits for it."""

    key: AdapterKey


class AdapterWanted(msgspec.Struct, frozen=True):
    """Stage the adapter without a request; AdapterArrived is the reply."""

    key: AdapterKey


AdapterEvent = (
    AdapterStaged | AdapterFailed | AdapterLoaded | AdapterPinned | AdapterUnloaded | AdapterWanted
)

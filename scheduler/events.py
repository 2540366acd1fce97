"""What goes into the scheduler about adapters and what comes out of it about requests."""

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


class ClientCancelled(msgspec.Struct, frozen=True):
    """The client left."""


class RanksFailure(msgspec.Struct, frozen=True):
    """The ranks are lost by the request, or hold too little for it since they were lost."""

    message: str


class ConstraintFailure(msgspec.Struct, frozen=True):
    """The answer cannot be held to its constraint within what that may cost."""

    message: str


Ending = FinishReason | AdapterFailure | ClientCancelled | RanksFailure | ConstraintFailure


class NewTokens(msgspec.Struct, frozen=True, gc=False):
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
    prompt_logprobs: of the prompt's tokens from the second on, where asked for. embedding: of
    the prompt, float32 little-endian; empty where not asked for or not come to.
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


class AdapterArrived(msgspec.Struct, frozen=True):
    """An adapter that was wanted is in host memory or on the device, or why it is not."""

    key: AdapterKey
    failure: AdapterFailure | None = None


RequestEvent = NewTokens | Ended

Event = RequestEvent | AdapterArrived


class AdapterStaged(msgspec.Struct, frozen=True):
    """All ranks hold the adapter in host memory; the answer to a key of `to_stage`.

    kept: False when some rank had no room for it; it is asked for again once there is.
    """

    key: AdapterKey
    shape: AdapterShape
    kept: bool = True


class AdapterFailed(msgspec.Struct, frozen=True):
    """The adapter could not be staged; the other answer to a key of `to_stage`.

    partly: whether some rank holds it, or may come to hold it, all the same.
    """

    key: AdapterKey
    refusal: AdapterRefusal
    message: str
    partly: bool = False


class AdapterLoaded(msgspec.Struct, frozen=True):
    """All ranks have finished a plan's fill; rows may use the adapter from now on."""

    key: AdapterKey


class AdapterPinned(msgspec.Struct, frozen=True):
    """Keep the adapter on the device (it is staged and filled unasked), or keep it no longer."""

    key: AdapterKey
    pinned: bool


class AdapterUnloaded(msgspec.Struct, frozen=True):
    """Forget the adapter's bytes and its pin as soon as no request uses or awaits it."""

    key: AdapterKey


class AdapterWanted(msgspec.Struct, frozen=True):
    """Stage the adapter though no request asks for it; AdapterArrived is the answer."""

    key: AdapterKey


AdapterEvent = (
    AdapterStaged | AdapterFailed | AdapterLoaded | AdapterPinned | AdapterUnloaded | AdapterWanted
)

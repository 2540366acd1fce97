"""Early submit, outside the driver: the request goes by the frames' socket, before its call.

Serve's router selects a replica deep inside a call. `replica_listener` reports the replica to the
ingress, which encodes the request here (`encode_early_submit`) and sends it to that replica over
the socket that is open already. driver/streaming/early_submit.py is the other end. This is not in
the router's module because Serve pickles that by value: its globals would be copies.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import msgspec

from deployments.contract import GenerateRequest

MAX_EARLY_BYTES = 64 << 10

_encoder = msgspec.msgpack.Encoder()
_listener: ContextVar[Callable[[str], None] | None] = ContextVar(
    "loray_replica_selected", default=None
)


class EarlySubmit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Begin this request; the call that brings it is on its way to the same driver."""

    request: GenerateRequest


class Withdraw(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The call of an early submit is not coming: it went to another replica, or ended."""

    request_id: str


def encode_early_submit(request: GenerateRequest) -> bytes | None:
    """The message that submits a request early; None if only its call may bring it.

    That is a large request, one with a client's token, or one that cannot be encoded.
    """
    if request.api_token is not None or _least_bytes(request) > MAX_EARLY_BYTES:
        return None
    try:
        return _encoder.encode(EarlySubmit(request))
    except (OverflowError, UnicodeEncodeError):
        return None  # The call reports the fault.


@contextmanager
def replica_listener(selected: Callable[[str], None]) -> Iterator[None]:
    """Report to `selected` the unique id of each replica that the router selects for a call.

    Valid for calls that begin in this context. `selected` runs on the router's event loop, just
    before the call is sent; if it raises, the call fails.
    """
    token = _listener.set(selected)
    try:
        yield
    finally:
        _listener.reset(token)


def replica_selected(replica: str) -> None:
    """Report the replica of this task's call to its listener, if there is one."""
    listener = _listener.get()
    if listener is not None:
        listener(replica)


def _least_bytes(request: GenerateRequest) -> int:
    """A lower bound of its encoded size; each sequence is encoded with its own sampling."""
    total = 0
    for sequence in request.sequences:
        sampling = sequence.sampling
        long = (sequence.prompt, sequence.generated, sampling.json_schema, sampling.grammar,
                sampling.logit_bias, sampling.allowed_ids, *sampling.bad_words)  # fmt: skip
        total += sum(map(len, long))
    return total

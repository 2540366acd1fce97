"""What ingress and driver say to each other: requests, outcomes, error kinds, token frames.

Values cross processes; exceptions do not. A sequence ends in exactly one of Finished, Failed,
Cancelled. Frames are idempotent (each token run bears its start), so a lost frame is repaired
by the outcome that the unary call returns at the end.
"""

from enum import StrEnum
from typing import Protocol

import msgspec

from configs.adapters import AdapterReference
from configs.sampling import FinishReason, Sampling, Stopping
from scheduler.plan import TokenLogprobs


class ErrorKind(StrEnum):
    """Every way a request can fail; `ingress/errors.py` turns each into both HTTP dialects."""

    VALIDATION = "validation"
    ADAPTER_NOT_FOUND = "adapter_not_found"
    ADAPTER_FORBIDDEN = "adapter_forbidden"
    ADAPTER_UNSUPPORTED = "adapter_unsupported"
    ADAPTER_TOO_LARGE = "adapter_too_large"
    ADAPTER_UNAVAILABLE = "adapter_unavailable"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    GENERATION = "generation"


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The sequence ended by itself."""

    reason: FinishReason


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The sequence ended by an error; retry_after_s is set when trying again makes sense."""

    kind: ErrorKind
    message: str
    retry_after_s: float | None = None


class Cancelled(msgspec.Struct, frozen=True, tag=True):
    """The client left."""


Ending = Finished | Failed | Cancelled


class SequenceRequest(msgspec.Struct, frozen=True):
    """One prompt on its way to one completion: token ids in, token ids out."""

    prompt: list[int]
    sampling: Sampling
    stopping: Stopping


class GenerateRequest(msgspec.Struct, frozen=True):
    """One HTTP request: one or more sequences over one adapter (None = the base model)."""

    id: str
    sequences: list[SequenceRequest]
    adapter: AdapterReference | None = None
    api_token: str | None = None


class SequenceOutcome(msgspec.Struct, frozen=True):
    """Everything one sequence generated and how it ended.

    logprobs: one entry a token when asked for, else None. cached_tokens: prompt tokens that
    came from the prefix cache. queue_seconds, first_token_seconds: since the request arrived.
    """

    tokens: list[int]
    ending: Ending
    logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    first_token_seconds: float = 0.0


class Completion(msgspec.Struct, frozen=True):
    """The answer of `Driver.generate`: one outcome for each sequence, in order.

    validation_seconds is the driver's own; the ingress adds its share.
    """

    sequences: list[SequenceOutcome]


class TokenRun(msgspec.Struct, frozen=True, array_like=True):
    """Tokens start .. start + len - 1 that sequence `index` of a request generated (0-based)."""

    request_id: str
    index: int
    start: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None


class TokenFrame(msgspec.Struct, frozen=True, array_like=True):
    """One message a step from a driver to an ingress replica."""

    runs: list[TokenRun]


class ReplyAddress(msgspec.Struct, frozen=True):
    """Where an ingress replica takes token frames; the secret proves who dials."""

    host: str
    port: int
    secret: str


class AdapterInfo(msgspec.Struct, frozen=True):
    """One known adapter, for listings."""

    id: str
    source: str
    state: str


class EngineInfo(msgspec.Struct, frozen=True):
    """What a driver serves and how; the ingress needs it to validate and to answer /info.

    tokenizer: the folder that holds the tokenizer and the chat template.
    chosen: what start-up decided, for people (device, attention backend, pages, proxy mode).
    healthy: False while the ranks are being rebuilt.
    """

    model_id: str
    model_name: str
    model_revision: str | None
    tokenizer: str
    dtype: str
    device: str
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    max_total_tokens: int
    max_input_tokens: int
    max_batch_total_tokens: int
    max_running: int
    max_queued: int
    chosen: dict[str, str]
    adapters: list[AdapterInfo]
    healthy: bool


class Driver(Protocol):
    """What the ingress may ask of a driver."""

    async def generate(self, request: GenerateRequest, reply_to: ReplyAddress) -> Completion:
        """Run all sequences to their end; token frames go to `reply_to` meanwhile."""
        ...

    async def finish(self, request_id: str, index: int, at: int) -> None:
        """A stop string was matched: keep `at` tokens of this sequence and end it."""
        ...

    async def describe(self) -> EngineInfo:
        """What is served, for validation and /info."""
        ...

"""Messages between ingress and driver: requests, outcomes, error kinds, token frames.

Values cross processes; exceptions do not. A sequence ends in exactly one of Finished, Failed,
Cancelled. Frames are idempotent (each token run has its start). The outcome that the unary call
returns at the end has all tokens, also those of lost frames.
"""

from enum import StrEnum
from typing import Literal

import msgspec

from configs.wire.adapters import AdapterReference, AdapterSource
from configs.wire.plan import TokenLogprobs
from configs.wire.sampling import FinishReason, Sampling, Stopping
from configs.wire.tasks import ModelTask


class ErrorKind(StrEnum):
    """Every way a request can fail; `ingress/http/errors.py` has the HTTP status of each."""

    VALIDATION = "validation"
    ADAPTER_NOT_FOUND = "adapter_not_found"
    ADAPTER_FORBIDDEN = "adapter_forbidden"
    ADAPTER_UNSUPPORTED = "adapter_unsupported"
    ADAPTER_TOO_LARGE = "adapter_too_large"
    ADAPTER_UNAVAILABLE = "adapter_unavailable"
    NOT_FOUND = "not_found"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    QUOTA = "quota"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    GENERATION = "generation"


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The sequence ended by itself."""

    reason: FinishReason


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The sequence ended by an error; retry_after_s: when a retry may succeed, if one may."""

    kind: ErrorKind
    message: str
    retry_after_s: float | None = None


class Cancelled(msgspec.Struct, frozen=True, tag=True):
    """The client disconnected."""


Ending = Finished | Failed | Cancelled


class SequenceRequest(msgspec.Struct, frozen=True):
    """One prompt, as token ids, and how to continue it.

    generated: the first tokens of its answer, which a driver that is gone has generated.
    logprobs: theirs, if requested.
    """

    prompt: list[int]
    sampling: Sampling
    stopping: Stopping
    generated: list[int] = []
    logprobs: list[TokenLogprobs] = []


class GenerateRequest(msgspec.Struct, frozen=True):
    """One HTTP request: one or more sequences over one adapter.

    adapter: None for the base model.
    api_token: the caller's, for the adapter's source.
    allowed: patterns of "source:id", one of which the adapter must match; None allows all.
    payer: the name of the API key that downloads are charged to; "" for callers without one.
    cache_salt: only requests with equal salts share the prefix cache. A hash of the caller's group
    of API keys and of the request's own salt; b"" without both.
    background: served only where no other request wants to be.
    resubmissions: drivers that were lost with this request; each time it gets another id.
    origin: of the generated tokens that it brings (`TokenRun`); "" without any.
    """

    id: str
    sequences: list[SequenceRequest]
    adapter: AdapterReference | None = None
    api_token: str | None = None
    allowed: tuple[str, ...] | None = None
    payer: str = ""
    cache_salt: bytes = b""
    background: bool = False
    resubmissions: int = 0
    origin: str = ""

    def __repr__(self) -> str:
        """Without the token and the salt: requests may be shown in errors and logs."""
        return f"GenerateRequest({self.id!r}, {self.sequences!r}, {self.adapter!r})"


class SequenceOutcome(msgspec.Struct, frozen=True):
    """All tokens that one sequence generated, and how it ended.

    logprobs: one entry a token if requested, else None.
    cached_tokens: prompt tokens that came from the prefix cache.
    queue_seconds, first_token_seconds: since the request arrived.
    prompt_logprobs: of the prompt's tokens from the second on, if requested.
    embedding: or scores, of the prompt, float32 little-endian, if requested.
    drafted_tokens: how many were guessed. skipped: the indices of tokens that were guessed right
    and came behind another of their step, ascending.
    """

    tokens: list[int]
    ending: Ending
    logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    first_token_seconds: float = 0.0
    prompt_logprobs: list[TokenLogprobs] | None = None
    embedding: bytes = b""
    drafted_tokens: int = 0
    skipped: list[int] = []


class Completion(msgspec.Struct, frozen=True):
    """The result of `Driver.generate`: one outcome for each sequence, in order."""

    sequences: list[SequenceOutcome]


class TokenRun(msgspec.Struct, frozen=True, array_like=True):
    """Tokens start .. start + len - 1 that sequence `index` of a request generated (0-based).

    origin: names the model and the adapter's content, in the run with start 0 alone.
    skipped: as in `SequenceOutcome`, of these tokens.
    """

    request_id: str
    index: int
    start: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    origin: str = ""
    skipped: list[int] = []


class TokenFrame(msgspec.Struct, frozen=True, array_like=True):
    """One message a step from a driver to an ingress replica."""

    runs: list[TokenRun]


class ReplyAddress(msgspec.Struct, frozen=True):
    """Where an ingress replica receives token frames; drivers must send the secret first."""

    host: str
    port: int
    secret: str


class AdapterInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """One known adapter, for listings.

    target: of a name that was given to another adapter: that one's "source:id".
    """

    id: str
    source: str
    state: str
    target: str = ""


class EngineInfo(msgspec.Struct, frozen=True):
    """What a driver serves; the ingress validates requests with it and answers /info.

    tokenizer: the folder that holds the tokenizer and the chat template.
    startup_info: what start-up selected (device, attention backend, pages), as `chosen` in /info.
    healthy: False while the ranks are being rebuilt.
    task: what the base model is for.
    sampling_defaults: fields of requests by OpenAI's and Anthropic's rules, where they leave them
    out.
    asleep: no rank runs, because an operator wants it so.
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
    startup_info: dict[str, str]
    adapters: list[AdapterInfo]
    healthy: bool
    task: ModelTask = ModelTask()
    sampling_defaults: dict[str, float] = {}
    asleep: bool = False


AdapterTier = Literal["absent", "disk", "host", "device"]
"""Where a replica has an adapter, slowest first."""


class AdapterDemand(msgspec.Struct, frozen=True):
    """One adapter of a replica, by a name that clients use.

    running, waiting: its requests now.
    """

    name: str
    tier: AdapterTier
    running: int
    waiting: int


class EngineLoad(msgspec.Struct, frozen=True):
    """What one driver replica has to do now, for gateways.

    model: the base model's name for clients.
    queued: requests that wait. running: requests that hold a batch slot.
    free_blocks: KV blocks that no request holds. block_size: tokens of a block.
    device_slots: adapters that fit on the device at once.
    prompt_tokens, cached_tokens, generated_tokens, preemptions: since the start.
    adapters: those that clients requested last.
    asleep: its ranks have ended until they are woken.
    """

    model: str
    queued: int
    running: int
    num_blocks: int
    free_blocks: int
    block_size: int
    device_slots: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    adapters: list[AdapterDemand]
    asleep: bool = False


class _Command(msgspec.Struct, frozen=True, tag_field="action"):
    """A command for every driver replica; the fields' names and the tags are in saved commands."""


class ListAdapters(_Command, frozen=True, tag="list"):
    """Report one adapter, or all (None)."""

    reference: AdapterReference | None = None


class LoadAdapter(_Command, frozen=True, tag="load"):
    """Fetch an adapter and stage it.

    pin: also keep it on the device. api_token: for the adapter's source; None for the server's own.
    """

    reference: AdapterReference
    pin: bool = False
    api_token: str | None = None

    def __repr__(self) -> str:
        """Without the token: commands may be shown in errors and logs."""
        return f"LoadAdapter({self.reference!r}, {self.pin!r})"


class UnloadAdapter(_Command, frozen=True, tag="unload"):
    """Unpin an adapter and drop its bytes when its requests have ended."""

    reference: AdapterReference


class PinAdapter(_Command, frozen=True, tag="pin"):
    """Keep an adapter on the device."""

    reference: AdapterReference


class UnpinAdapter(_Command, frozen=True, tag="unpin"):
    """Let an adapter be evicted again."""

    reference: AdapterReference


class NameAdapter(_Command, frozen=True, tag="name"):
    """Give an adapter another name.

    target: the adapter, or the path of its folder.
    replace: the name may move from another adapter.
    stage: wait until the adapter is staged; else its first request does.
    """

    name: AdapterReference
    target: AdapterReference | str = msgspec.field(name="reference")
    replace: bool = False
    stage: bool = True


class PushedContent(msgspec.Struct, frozen=True):
    """The files of a pushed adapter, for nodes that do not have them."""

    config: bytes
    weights: bytes

    def __repr__(self) -> str:
        """Without the bytes."""
        return f"PushedContent({len(self.config)} + {len(self.weights)} bytes)"


class PushAdapter(_Command, frozen=True, tag="push"):
    """Serve pushed files under a name, once all ranks have staged them.

    digest: of the files, which are in the node's memory or in `content`.
    pushed_at: nanoseconds since the epoch; a replica ignores pushes older than the one it serves.
    replace: the name may be in use.
    """

    name: AdapterReference
    digest: str
    pushed_at: int
    replace: bool = False
    content: PushedContent | None = None

    @property
    def target(self) -> AdapterReference:
        """The adapter that the name stands for."""
        return AdapterReference(AdapterSource.PUSHED, self.name.id)


class UnnameAdapter(_Command, frozen=True, tag="unname"):
    """Remove a name; with a target, only if the name stands for it."""

    name: AdapterReference
    target: AdapterReference | str | None = msgspec.field(name="reference", default=None)


AdapterCommand = (
    ListAdapters
    | LoadAdapter
    | UnloadAdapter
    | PinAdapter
    | UnpinAdapter
    | NameAdapter
    | PushAdapter
    | UnnameAdapter
)
"""What an operator can have every driver replica do with adapters."""


class AdapterStatus(msgspec.Struct, frozen=True):
    """One adapter by one of its names, as one driver replica sees it.

    state: absent (its files are not here), disk, host (in the ranks' host memory) or device.
    target: the adapter of an alias.
    rank: the largest LoRA rank of its matrices.
    bytes: of its files.
    host_bytes: of its copy on each rank, 0 without one.
    device_pages: pages of 8 LoRA rank rows over all projections, of experts each for itself.
    0 if it is not on the device.
    pinned: kept on the device.
    draining: unloaded when its requests have ended.
    running, waiting: its requests now.
    num_requests: since the start of the replica.
    last_used: seconds since the epoch.
    """

    reference: AdapterReference
    state: AdapterTier
    target: AdapterReference | None = None
    digest: str | None = None
    rank: int | None = None
    bytes: int = 0
    host_bytes: int = 0
    device_pages: int = 0
    pinned: bool = False
    draining: bool = False
    running: int = 0
    waiting: int = 0
    num_requests: int = 0
    last_used: float | None = None


class AdapterReport(msgspec.Struct, frozen=True):
    """A command's result on one driver replica: the adapters of the command, or the failure.

    lacks_files: the node does not have the files of a push; send it again with `content`.
    """

    replica: str
    adapters: list[AdapterStatus] = []
    failure: Failed | None = None
    lacks_files: bool = False

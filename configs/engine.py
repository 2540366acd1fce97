"""One engine: a model on a group of ranks, with its cache, limits and adapters."""

from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from configs.adapters import AdaptersConfig
from configs.base import Config
from configs.lorax_names import limits
from configs.model import ModelConfig


class Device(StrEnum):
    """The device of the ranks; AUTO takes CUDA where there is a CUDA device."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class AttentionKind(StrEnum):
    """The attention backend; AUTO takes the fastest that fits on this device."""

    AUTO = "auto"
    SDPA = "sdpa"
    FLASH_ATTN = "flash_attn"
    FLASHINFER = "flashinfer"
    TRITON = "triton"


class AllReduce(StrEnum):
    """How GPUs sum their partial results; AUTO takes what is fastest as measured at start.

    SYMMETRIC: torch's symmetric memory; the start fails where peers' memory cannot be mapped.
    Ranks on CPU use gloo.
    """

    AUTO = "auto"
    NCCL = "nccl"
    SYMMETRIC = "symmetric"


class CudaGraphs(StrEnum):
    """Which steps are captured as CUDA graphs at start and replayed.

    NONE: every step is launched kernel by kernel.
    DECODE: steps in which every request computes one token.
    ALL: also steps with prompts, except their attention.
    """

    NONE = "none"
    DECODE = "decode"
    ALL = "all"


class CacheDType(StrEnum):
    """The type of cached keys and values; AUTO takes the model's.

    FP8 (e4m3): one byte for each value, with scales from the checkpoint or measured at start. It
    changes results; docs/operations.md says by how much, and which attention backends have it.
    """

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FP8 = "fp8"


class CacheConfig(Config):
    """The paged KV cache.

    block_size: tokens of a block, of the smallest where a model has several KV groups.
    num_blocks: None: as many as fit in the memory that is left at start (the minimum over ranks).
    device_memory_fraction: the part of the device's memory that weights, cache and all else use.
    kept_states: copies of a sequence's states, of models with recurrent layers, that the ranks keep
    behind prompts, so that others with the same beginning go on from there; each takes the bytes of
    a batch slot. None: a quarter of max_running, 8 at least. 0: no prefixes are shared.
    """

    block_size: PositiveInt = 16
    num_blocks: PositiveInt | None = None
    device_memory_fraction: float = Field(default=0.9, gt=0, le=1)
    dtype: CacheDType = CacheDType.AUTO
    prefix_caching: bool = True
    kept_states: NonNegativeInt | None = None


class LimitsConfig(Config):
    """Limits of a step, of the running requests and of the queue.

    max_step_tokens: the token budget of one step; long prompts are cut into chunks of it.
    max_mixed_prompt_tokens: prompt tokens of a step in which other requests generate. More of them
    make those requests wait longer for their next tokens; fewer lower the throughput. None: as
    many as the budget holds.
    token_gap_ms: what a step with prompts in which other requests generate should take at most, in
    milliseconds, or three times as long as without prompts if that is more; prompts get the tokens
    that fit, by what steps have taken so far. None: no bound.
    max_running: requests that run at once; each has a batch slot.
    max_queued: requests that may wait; beyond it clients get 429, except for adapters with less
    than an equal part of the queue.
    max_total_tokens: prompt plus generated tokens of one request; None: the model's own length.
    max_input_tokens: tokens of one prompt; None: one less than max_total_tokens, or as
    many where the model generates nothing.
    max_batch_total_tokens: an upper bound of the cache in tokens; None: what memory allows.
    max_stop_sequences: stop strings of one request.
    max_best_of: LoRAX's `best_of`: sequences of one request, of which the best is returned.
    LoRAX's names are accepted too (`configs/lorax_names.py`).
    """

    max_step_tokens: PositiveInt = 2048
    max_mixed_prompt_tokens: PositiveInt | None = None
    token_gap_ms: PositiveFloat | None = 28.0
    max_running: PositiveInt = 256
    max_queued: NonNegativeInt = 768
    max_total_tokens: PositiveInt | None = None
    max_input_tokens: PositiveInt | None = None
    max_batch_total_tokens: PositiveInt | None = None
    max_stop_sequences: PositiveInt = 4
    max_best_of: PositiveInt = 2

    @model_validator(mode="before")
    @classmethod
    def _with_our_names(cls, given: Any) -> Any:
        return limits(given, cls.model_fields["max_running"].default)

    @model_validator(mode="after")
    def _parts_fit_the_whole(self) -> "LimitsConfig":
        total, cache = self.max_total_tokens, self.max_batch_total_tokens
        prompt = self.max_input_tokens
        if total is not None and prompt is not None and prompt > total:
            raise ValueError(
                f"max_input_tokens ({prompt}) must not be more than max_total_tokens ({total}): "
                "a request's tokens are its prompt's and those that it generates"
            )
        if total is not None and cache is not None and total > cache:
            raise ValueError(
                f"max_total_tokens ({total}) must not be more than max_batch_total_tokens "
                f"({cache}): one request must fit the cache"
            )
        return self


class RecoveryConfig(Config):
    """Time limits in seconds, and what waits to take over.

    step_timeout_s: a step; after it the ranks count as lost.
    stage_timeout_s: the staging of an adapter, and the preparation of a matcher.
    start_timeout_s: a start of the ranks.
    recovery_timeout_s: how long open requests wait for new ranks.
    standby: whether each rank has a process that waits to take over; None: on GPUs.
    """

    step_timeout_s: PositiveFloat = 60.0
    stage_timeout_s: PositiveFloat = 120.0
    start_timeout_s: PositiveFloat = 900.0
    recovery_timeout_s: PositiveFloat = 120.0
    standby: bool | None = None

    def wants_standby(self, on_gpu: bool) -> bool:
        """Whether such ranks have a process that waits to take over."""
        return on_gpu if self.standby is None else self.standby


class SleepingRequests(StrEnum):
    """What becomes of new requests while the ranks sleep: 503, or they wait."""

    REFUSE = "refuse"
    WAIT = "wait"


class SleepConfig(Config):
    """Sleep, for trainers that share the device.

    requests: those that come while the ranks sleep.
    """

    requests: SleepingRequests = SleepingRequests.REFUSE


class SpeculationKind(StrEnum):
    """How tokens are guessed, so that one step can check several; it changes no token.

    PROMPT_LOOKUP: what followed the last three tokens where they occurred before, in the prompt
    or the answer.
    MEDUSA: what heads beside the model's own make of its hidden states.
    EAGLE3: what a small decoder layer makes of the states of three of the model's layers.
    MTP: what the layer behind the model's last one makes of its hidden states.
    """

    NONE = "none"
    PROMPT_LOOKUP = "prompt_lookup"
    MEDUSA = "medusa"
    EAGLE3 = "eagle3"
    MTP = "mtp"

    @property
    def reads_heads(self) -> bool:
        """Whether it has files of its own."""
        return self in (SpeculationKind.MEDUSA, SpeculationKind.EAGLE3)

    @property
    def is_layer(self) -> bool:
        """Whether what guesses is a decoder layer beside those of the model."""
        return self in (SpeculationKind.EAGLE3, SpeculationKind.MTP)


DRAFT_LENGTHS = (1, 3, 8)
"""Tokens of a draft for which steps are captured; a shorter draft takes the next longer one's.

With the token before them, 64 requests have 128 and 256 tokens, which GPUs multiply in whole tiles.
"""

MOST_DRAFTED = 512
"""Tokens of all drafts of a step, at most."""


class SpeculationConfig(Config):
    """Speculation.

    max_tokens: guessed tokens of a request in a step; fewer where that brings more tokens a second.
    max_running: nothing is guessed while more requests run.
    model: the heads' folder or hub id; revision: its commit, branch or tag.
    """

    kind: SpeculationKind = SpeculationKind.NONE
    model: str | None = None
    revision: str | None = None
    max_tokens: PositiveInt = Field(default=8, le=64)
    max_running: PositiveInt = 128

    @property
    def most_tokens(self) -> int:
        """`max_tokens`; 0 where nothing is guessed."""
        return 0 if self.kind is SpeculationKind.NONE else self.max_tokens

    @model_validator(mode="after")
    def _heads_have_files(self) -> "SpeculationConfig":
        if self.revision is not None and self.model is None:
            raise ValueError(f"revision ({self.revision}) is that of model, which is not set")
        if self.kind.reads_heads != (self.model is not None):
            name = self.kind.value
            raise ValueError(
                f"kind {name} needs the folder or hub id of its heads in speculation.model"
                if self.kind.reads_heads
                else f"model names heads, which kind {name} does not read: set kind to medusa or "
                "eagle3, or remove it"
            )
        return self


class EngineConfig(Config):
    """The settings of one driver and its ranks."""

    model: ModelConfig
    tensor_parallel: PositiveInt = 1
    expert_parallel: bool = Field(
        default=False, description="whether ranks have whole experts instead of a part of each"
    )
    device: Device = Device.AUTO
    attention: AttentionKind = AttentionKind.AUTO
    all_reduce: AllReduce = AllReduce.AUTO
    cuda_graphs: CudaGraphs = CudaGraphs.ALL
    cuda_graphs_later: bool = Field(
        default=False, description="whether ranks serve before their graphs are recorded"
    )
    kernel_cache: Path | None = Field(
        default=None, description="compiled kernels, by `loray warm`; None: $LORAY_KERNEL_CACHE"
    )
    cpu_threads: PositiveInt = Field(default=1, description="torch threads of a CPU rank")
    cache: CacheConfig = CacheConfig()
    limits: LimitsConfig = LimitsConfig()
    adapters: AdaptersConfig = AdaptersConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    sleep: SleepConfig = SleepConfig()
    speculation: SpeculationConfig = SpeculationConfig()

    @property
    def kept_states(self) -> int:
        """How many copies of a sequence's states the ranks keep, where layers are recurrent."""
        if not self.cache.prefix_caching:
            return 0
        own, least = self.cache.kept_states, 8
        return max(least, self.limits.max_running // 4) if own is None else own

    @model_validator(mode="after")
    def _adapters_heads_are_beside_others(self) -> "EngineConfig":
        if self.adapters.draft_heads and self.speculation.kind is not SpeculationKind.MEDUSA:
            raise ValueError(
                "adapters.draft_heads needs speculation.kind medusa: the number of heads is that "
                "of speculation.model"
            )
        return self

    @model_validator(mode="after")
    def _budget_holds_a_decode_step(self) -> "EngineConfig":
        """A step must hold one token for every running request."""
        if self.limits.max_step_tokens < self.limits.max_running:
            raise ValueError(
                f"limits.max_step_tokens ({self.limits.max_step_tokens}) must be at least "
                f"limits.max_running ({self.limits.max_running}): raise the one or lower the other"
            )
        return self

"""One engine: a model over a group of ranks, its cache, its budgets, its adapters."""

from enum import StrEnum
from typing import Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from configs.adapters import AdaptersConfig
from configs.base import Config
from configs.lorax_names import limits
from configs.model import ModelConfig


class Device(StrEnum):
    """What the ranks compute on; AUTO takes CUDA where there is one."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class AttentionKind(StrEnum):
    """Which paged attention; AUTO takes the fastest that imports on this device."""

    AUTO = "auto"
    SDPA = "sdpa"
    FLASH_ATTN = "flash_attn"
    FLASHINFER = "flashinfer"


class AllReduce(StrEnum):
    """What sums between GPUs go through; AUTO takes the fastest as measured at start.

    SYMMETRIC refuses to start where peers' memory cannot be mapped. Ranks on CPU use gloo.
    """

    AUTO = "auto"
    NCCL = "nccl"
    SYMMETRIC = "symmetric"


class CudaGraphs(StrEnum):
    """Which steps are recorded at start and replayed, on a GPU.

    DECODE: steps in which every request computes one token. ALL: steps with prompts in them too,
    but for their attention. NONE: every step is launched kernel by kernel.
    """

    NONE = "none"
    DECODE = "decode"
    ALL = "all"


class CacheDType(StrEnum):
    """The type of cached keys and values; AUTO takes the model's.

    FP8 (e4m3): a byte a value, with scales from the checkpoint or measured at start. It changes
    results; docs/operations.md says by how much, and which attention backends have it.
    """

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FP8 = "fp8"


class CacheConfig(Config):
    """The paged KV cache.

    num_blocks: given, or measured at start from what memory is left (the minimum over ranks).
    """

    block_size: PositiveInt = 16
    num_blocks: PositiveInt | None = None
    device_memory_fraction: float = Field(default=0.9, gt=0, le=1)
    dtype: CacheDType = CacheDType.AUTO
    prefix_caching: bool = True


class LimitsConfig(Config):
    """What the scheduler admits into a step, into the ranks, and into the queue.

    max_step_tokens: the token budget of one step; long prompts are cut into chunks of it.
    max_mixed_prompt_tokens: prompt tokens of a step in which requests generate: more of them cost
    each of those requests a longer wait for its next token, fewer cost tokens a second. None: as
    many as the budget holds.
    max_running: requests that may hold a place on the ranks at once.
    max_queued: requests that may wait; beyond it clients get 429, but for adapters with less
    than an equal part of the queue.
    max_total_tokens: prompt plus generated tokens of one request; None: the model's own length.
    max_batch_total_tokens: an upper bound of the cache in tokens; None: what memory allows.
    LoRAX's names are understood too (`configs/lorax_names.py`).
    """

    max_step_tokens: PositiveInt = 2048
    max_mixed_prompt_tokens: PositiveInt | None = None
    max_running: PositiveInt = 256
    max_queued: NonNegativeInt = 768
    max_total_tokens: PositiveInt | None = None
    max_input_tokens: PositiveInt | None = None
    max_batch_total_tokens: PositiveInt | None = None
    max_stop_sequences: PositiveInt = 4
    max_best_of: PositiveInt = 2

    @model_validator(mode="before")
    @classmethod
    def _by_our_names(cls, given: Any) -> Any:
        return limits(given, cls.model_fields["max_running"].default)

    @model_validator(mode="after")
    def _cache_holds_a_request(self) -> "LimitsConfig":
        total, cache = self.max_total_tokens, self.max_batch_total_tokens
        if total is not None and cache is not None and total > cache:
            raise ValueError(
                f"max_total_tokens ({total}) must not be more than max_batch_total_tokens "
                f"({cache}): one request must fit the cache"
            )
        return self


class RecoveryConfig(Config):
    """How long a step and the reading of an adapter may take, and the wait for new ranks."""

    step_timeout_s: PositiveFloat = 60.0
    stage_timeout_s: PositiveFloat = 120.0
    start_timeout_s: PositiveFloat = 900.0
    recovery_timeout_s: PositiveFloat = 120.0


class EngineConfig(Config):
    """Everything one driver and its ranks need to know."""

    model: ModelConfig
    tensor_parallel: PositiveInt = 1
    device: Device = Device.AUTO
    attention: AttentionKind = AttentionKind.AUTO
    all_reduce: AllReduce = AllReduce.AUTO
    cuda_graphs: CudaGraphs = CudaGraphs.ALL
    cpu_threads: PositiveInt = Field(default=1, description="torch threads of a CPU rank")
    cache: CacheConfig = CacheConfig()
    limits: LimitsConfig = LimitsConfig()
    adapters: AdaptersConfig = AdaptersConfig()
    recovery: RecoveryConfig = RecoveryConfig()

    @model_validator(mode="after")
    def _budget_holds_a_decode_step(self) -> "EngineConfig":
        """A step must be able to give every running request its one token."""
        if self.limits.max_step_tokens < self.limits.max_running:
            raise ValueError(
                f"limits.max_step_tokens ({self.limits.max_step_tokens}) must be at least "
                f"limits.max_running ({self.limits.max_running}): raise the one or lower the other"
            )
        return self

"""One engine: a model over a group of ranks, its cache, its budgets, its adapters."""

from enum import StrEnum

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from configs.adapters import AdapterSource
from configs.base import Config
from configs.model import ModelConfig


class Device(StrEnum):
    """What the ranks compute on; AUTO takes CUDA where there is one."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class AttentionBackend(StrEnum):
    """Which paged attention; AUTO takes the fastest that imports on this device."""

    AUTO = "auto"
    SDPA = "sdpa"
    FLASH_ATTN = "flash_attn"
    FLASHINFER = "flashinfer"


class CacheDType(StrEnum):
    """The type of cached keys and values; AUTO takes the model's."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


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
    max_running: requests that may hold a place on the ranks at once.
    max_queued: requests that may wait; beyond it clients get 429.
    max_total_tokens: prompt plus generated tokens of one request; None: the model's own length.
    """

    max_step_tokens: PositiveInt = 2048
    max_running: PositiveInt = 256
    max_queued: NonNegativeInt = 1024
    max_total_tokens: PositiveInt | None = None
    max_input_tokens: PositiveInt | None = None
    max_stop_sequences: PositiveInt = 4
    max_best_of: PositiveInt = 2


class AdaptersConfig(Config):
    """LoRA adapters: where they may come from and how much memory they get.

    local_roots: folders under which `local` ids are looked up; nothing outside is ever read.
    device_pages: pages of 8 rank rows in each projection's device pool.
    max_device_adapters: how many adapters may be on the device at once.
    max_rank: the largest rank that is served.
    host_bytes: the host tier of each rank.
    preload: references loaded before the server is ready.
    memory_fraction: share of device memory for the pools when device_pages is None.
    vocabulary: serve LoRA on embeddings and head too; their pools are as wide as the vocabulary,
    and decode steps with such adapters are not captured.
    """

    enabled: bool = True
    default_source: AdapterSource = AdapterSource.HUB
    local_roots: tuple[str, ...] = ()
    device_pages: PositiveInt | None = None
    memory_fraction: float = Field(default=0.1, gt=0, lt=1)
    max_device_adapters: PositiveInt = 64
    max_rank: PositiveInt = 128
    vocabulary: bool = False
    host_bytes: PositiveInt = 4 * 2**30
    preload: tuple[str, ...] = ()
    max_file_bytes: PositiveInt = 8 * 2**30
    fetch_timeout_s: PositiveFloat = 120.0


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
    attention: AttentionBackend = AttentionBackend.AUTO
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

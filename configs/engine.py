"""One engine: a model over a group of ranks, its cache, its budgets, its adapters."""

from enum import StrEnum
from typing import Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from configs.base import Config
from configs.fetching import FetchConfig, S3Config
from configs.lorax_names import ADAPTERS, IDLE_ADAPTERS, limits, ours
from configs.model import ModelConfig
from configs.wire.adapters import AdapterSource


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


class AdaptersConfig(Config):
    """LoRA adapters: where they may come from and how much memory they get.

    local_roots: folders under which `local` ids are looked up; nothing outside is ever read.
    device_pages: pages of 8 rank rows in each projection's device pool.
    max_device_adapters: how many adapters may be on the device at once.
    max_rank: the largest rank that is served.
    host_bytes: the host tier of each rank, taken at start and, for CUDA, pinned.
    staging_threads: adapters that a rank reads from disk side by side.
    preload: references loaded before the server is ready.
    max_file_bytes: of one adapter's files. fetch_timeout_s: the longest that a request waits for
    them; the download goes on. look_timeout_s: the longest that it waits for news of an adapter
    whose last version is in memory. hub_endpoint: None is huggingface_hub's own (HF_ENDPOINT).
    s3: None serves nothing from there. share_hub_token: requests without a token of the hub use
    the server's. allow_pickle: take adapter_model.bin too (tensors alone).
    max_known: contents that are remembered, so that the same bytes find their prefix cache again.
    memory_fraction: share of device memory for the pools when device_pages is None.
    vocabulary: serve LoRA on embeddings and head too; their pools are as wide as the vocabulary,
    and decode steps with such adapters are not captured.
    vocabulary_copies: adapters with a whole embedding or head of their own (PEFT's
    modules_to_save) that may be on the device at once; each place takes both matrices' bytes.
    LoRAX's names are understood too (`configs/lorax_names.py`).
    """

    enabled: bool = True
    default_source: AdapterSource = AdapterSource.HUB
    local_roots: tuple[str, ...] = ()
    device_pages: PositiveInt | None = None
    memory_fraction: float = Field(default=0.1, gt=0, lt=1)
    max_device_adapters: PositiveInt = 64
    max_rank: PositiveInt = 128
    vocabulary: bool = False
    vocabulary_copies: NonNegativeInt = 0
    host_bytes: PositiveInt = 4 * 2**30
    staging_threads: PositiveInt = 4
    preload: tuple[str, ...] = ()
    max_file_bytes: PositiveInt = 8 * 2**30
    fetch_timeout_s: PositiveFloat = 120.0
    look_timeout_s: PositiveFloat = 2.0
    fetch: FetchConfig = FetchConfig()
    hub_endpoint: str | None = None
    s3: S3Config | None = None
    share_hub_token: bool = False
    allow_pickle: bool = False
    max_known: PositiveInt = 100_000

    @model_validator(mode="before")
    @classmethod
    def _by_our_names(cls, given: Any) -> Any:
        return ours(given, ADAPTERS, IDLE_ADAPTERS)

    @model_validator(mode="after")
    def _copies_need_open_ends(self) -> "AdaptersConfig":
        """Whole matrices come in by the same door as factors."""
        if self.vocabulary_copies and not self.vocabulary:
            raise ValueError(
                f"adapters.vocabulary_copies ({self.vocabulary_copies}) needs adapters.vocabulary: "
                "set it to true"
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

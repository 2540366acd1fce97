"""How adapters are fetched from far away: patience, what is remembered, the disk cache."""

from typing import Any

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from configs.base import Config
from configs.lorax_names import ADAPTERS, IDLE_ADAPTERS, ours
from configs.wire.adapters import AdapterSource


class FetchConfig(Config):
    """Fetching from the hub and from s3; times in seconds.

    connect_timeout_s, read_timeout_s: to open a connection; between two pieces of an answer.
    attempts: how often one request is made when the fault may pass (5xx, 429, a connection that
    broke); the wait before the second is at most backoff_s, and doubles each time.
    recheck_s: how long an answer about an adapter (its version, a caller's right) is used again.
    grace_s: how long such an answer serves its caller while the source is out of reach.
    refusal_s: how long a refusal is repeated without asking again.
    cache_dir: where downloads are kept, on a local disk; drivers of one node may share it.
    cache_bytes: how much is kept there; what was not used for longest goes first.
    hub_on_demand: whether requests may have adapters downloaded from the hub; what the operator
    loads, pins and preloads always may. download_bytes_per_hour: what each API key, or all callers
    without one together, may have downloaded by one driver replica.
    """

    connect_timeout_s: PositiveFloat = 5.0
    read_timeout_s: PositiveFloat = 10.0
    attempts: PositiveInt = 4
    backoff_s: PositiveFloat = 0.5
    recheck_s: NonNegativeFloat = 30.0
    grace_s: NonNegativeFloat = 600.0
    refusal_s: NonNegativeFloat = 5.0
    cache_dir: str = "~/.cache/loray/adapters"
    cache_bytes: PositiveInt = 64 * 2**30
    hub_on_demand: bool = True
    download_bytes_per_hour: PositiveInt = 64 * 2**30


class S3Config(Config):
    """Adapters in S3 buckets; credentials come by boto3's usual chain.

    roots: "bucket" or "bucket/prefix" under which adapters lie; nothing else is ever read. An id
    is looked up as it is when it begins with a root, else under the first root.
    endpoint_url: of another service that speaks S3; None is AWS.
    """

    roots: tuple[str, ...]
    endpoint_url: str | None = None
    region: str | None = None

    @field_validator("roots")
    @classmethod
    def _plain_roots(cls, roots: tuple[str, ...]) -> tuple[str, ...]:
        """Take "s3://bucket/prefix/" for what it means; refuse what names no bucket."""
        plain = tuple(root.removeprefix("s3://").strip("/") for root in roots)
        if not plain or not all(plain):
            raise ValueError('give at least one root as "bucket" or "bucket/prefix"')
        return plain


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

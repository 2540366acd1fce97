"""LoRA adapters: their sources, how they are fetched, and the memory that they get."""

from typing import Annotated, Any

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from configs.base import URL, Config
from configs.lorax_names import ADAPTERS, IDLE_ADAPTERS, ours
from configs.s3 import S3ServiceConfig
from configs.wire.adapters import AdapterSource


class FetchConfig(Config):
    """Fetching from the hub and from S3; times in seconds.

    connect_timeout_s: the longest time to open a connection.
    read_timeout_s: the longest time between two pieces of a reply.
    attempts: how often a request is made when its fault is transient (5xx, 429, a broken
    connection).
    backoff_s: the longest wait before the second attempt; it doubles before each further one.
    recheck_s: how long a reply about an adapter (its version, a caller's access) is used again.
    grace_s: how long such a reply is used while the source cannot be reached.
    refusal_s: how long a refusal is repeated without another call of the source.
    cache_dir: the folder of downloads, on a local disk; drivers of one node may share it.
    cache_bytes: the size of that folder; the least recently used adapters are deleted first.
    hub_on_demand: whether a request may cause a download from the hub; loads, pins and preloads of
    the operator always may.
    download_bytes_per_hour: downloads of one driver replica for each API key, and for all callers
    without a key together.
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


class S3Config(S3ServiceConfig):
    """Adapters in S3 buckets.

    roots: "bucket" or "bucket/prefix"; nothing outside them is ever read. An id that begins with
    a root is looked up as it is, any other under the first root.
    """

    roots: tuple[str, ...]

    @field_validator("roots")
    @classmethod
    def _plain_roots(cls, roots: tuple[str, ...]) -> tuple[str, ...]:
        """Accept "s3://bucket/prefix/" too; refuse a root without a bucket."""
        plain = tuple(root.removeprefix("s3://").strip("/") for root in roots)
        if not plain or not all(plain):
            raise ValueError('give at least one root as "bucket" or "bucket/prefix"')
        return plain


class PushConfig(Config):
    """Adapters that trainers push over HTTP or in shared memory; their files are on no disk.

    folder: in a file system in memory, for all processes of a node and one user; LoRay makes it.
    "{uid}" in it stands for the number of the user that serves.
    max_bytes: of a node's pushed adapters together, versions that still run included.
    """

    folder: str = Field(default="/dev/shm/loray-{uid}", pattern="^/")
    max_bytes: PositiveInt = 4 * 2**30


class CatalogueConfig(Config):
    """Adapters that appear, change and leave while the server runs.

    location: a folder with a folder for each adapter; "s3://bucket/prefix" under a root of
    adapters.s3, with the same; or a YAML file that lists adapters.
    interval_s: seconds between two looks.
    """

    location: str = Field(min_length=1)
    interval_s: PositiveFloat = 2.0


class AdaptersConfig(Config):
    """LoRA adapters: their sources and their memory.

    default_source: the source of names without a prefix.
    local_roots: folders under which `local` ids are looked up; nothing outside is ever read.
    device_pages: pages of 8 LoRA rank rows in each projection's device pool.
    memory_fraction: share of device memory for the pools when device_pages is None.
    max_device_adapters: adapters on the device at once.
    max_rank: the largest rank that is served.
    vocabulary: serve LoRA on embeddings and head too. None: where the model is paged. True: with as
    many pages in their pools as in the others, unless vocabulary_pages says otherwise.
    vocabulary_pages: pages of 8 LoRA rank rows in the pools of embedding and head. None: an eighth
    of the other pools', but enough for one adapter of max_rank.
    expert_pages: how often the pools of experts' factors hold 8 LoRA rank rows of every expert.
    None: what fits into half of the pools' memory, at most as many as all adapters could use.
    vocabulary_copies: adapters with a whole embedding or head of their own (PEFT's
    modules_to_save) that may be on the device at once; each takes both matrices' bytes.
    whole_linears: linear maps of which adapters may bring the whole weight (modules_to_save), by
    name, and how many such adapters may be on the device at once; each takes that map's bytes in
    all layers.
    draft_heads: adapters with Medusa heads of their own that may be on the device at once; each
    takes their bytes. 0: such heads are not read, and the model's own guess for these adapters too.
    host_bytes: the host tier of each rank, allocated at start and, for CUDA, pinned.
    staging_threads: adapters that a rank reads from disk at the same time.
    preload: references loaded before the server is ready.
    max_file_bytes: of one adapter's files.
    fetch_timeout_s: the longest that a request waits for a download; the download continues.
    look_timeout_s: the longest that a request waits for the source's reply about an adapter
    that is in memory in its last known version.
    fetch: time limits, attempts and the disk cache.
    hub_endpoint: None is huggingface_hub's own (HF_ENDPOINT).
    s3: None: nothing is read from S3.
    catalogue: None: there is none.
    push: where pushed adapters are kept, and how many bytes.
    share_hub_token: requests without a hub token use the server's.
    allow_pickle: read adapter_model.bin too (its tensors alone).
    max_known: contents that keep their keys, so that the same bytes find their prefix cache again.
    LoRAX's names are accepted too (`configs/lorax_names.py`).
    """

    enabled: bool = True
    default_source: AdapterSource = AdapterSource.HUB
    local_roots: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    device_pages: PositiveInt | None = None
    memory_fraction: float = Field(default=0.1, gt=0, lt=1)
    max_device_adapters: PositiveInt = 64
    max_rank: PositiveInt = 128
    vocabulary: bool | None = None
    vocabulary_pages: PositiveInt | None = None
    expert_pages: NonNegativeInt | None = None
    vocabulary_copies: NonNegativeInt = 0
    whole_linears: dict[str, PositiveInt] = Field(default_factory=dict)
    draft_heads: NonNegativeInt = 0
    host_bytes: PositiveInt = 4 * 2**30
    staging_threads: PositiveInt = 4
    preload: tuple[str, ...] = ()
    max_file_bytes: PositiveInt = 8 * 2**30
    fetch_timeout_s: PositiveFloat = 120.0
    look_timeout_s: PositiveFloat = 2.0
    fetch: FetchConfig = FetchConfig()
    hub_endpoint: str | None = Field(default=None, pattern=URL)
    s3: S3Config | None = None
    catalogue: CatalogueConfig | None = None
    push: PushConfig = PushConfig()
    share_hub_token: bool = False
    allow_pickle: bool = False
    max_known: PositiveInt = 100_000

    @model_validator(mode="before")
    @classmethod
    def _with_our_names(cls, given: Any) -> Any:
        return ours(given, ADAPTERS, IDLE_ADAPTERS)

    @model_validator(mode="after")
    def _buckets_need_s3(self) -> "AdaptersConfig":
        at = self.catalogue.location if self.catalogue is not None else ""
        if at.startswith("s3://"):
            roots = () if self.s3 is None else self.s3.roots
            if not any(f"{at.rstrip('/')}/".startswith(f"s3://{root}/") for root in roots):
                raise ValueError(
                    f"adapters.catalogue.location ({at}) must lie under one of adapters.s3.roots"
                )
        return self

    @model_validator(mode="after")
    def _vocabulary_has_a_use(self) -> "AdaptersConfig":
        if self.vocabulary_copies and not self.adapts_vocabulary:
            raise ValueError(
                f"adapters.vocabulary_copies ({self.vocabulary_copies}) needs adapters.vocabulary: "
                "set it to true"
            )
        if self.vocabulary_pages is not None and not self.adapts_vocabulary:
            raise ValueError(
                f"adapters.vocabulary_pages ({self.vocabulary_pages}) is for adapters.vocabulary, "
                "which is false: remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _default_source_is_set_up(self) -> "AdaptersConfig":
        if self.default_source is AdapterSource.S3 and self.s3 is None:
            raise ValueError("adapters.default_source is s3: set adapters.s3.roots")
        return self

    @property
    def adapts_vocabulary(self) -> bool:
        """Return whether adapters of paged models may change embedding and head."""
        return self.vocabulary is not False

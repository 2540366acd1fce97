"""How adapters are fetched from far away: patience, what is remembered, the disk cache."""

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, field_validator

from configs.base import Config


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

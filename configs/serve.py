"""The Serve application: `args` in serve_config.yaml is exactly this."""

from enum import StrEnum

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from configs.api import ApiConfig
from configs.base import Config
from configs.embeddings import EmbeddingsConfig
from configs.engine import EngineConfig
from configs.observability import ObservabilityConfig


class RankPlacement(StrEnum):
    """Where a replica's ranks may lie: one node, or as close as there is room."""

    STRICT_PACK = "STRICT_PACK"
    PACK = "PACK"


class ServeConfig(Config):
    """One LoRay application.

    driver_cpus, rank_cpus, ingress_cpus: what Ray reserves; fractions let small machines hold
    them all. placement: of one replica's driver and ranks. request_timeout_s: the longest
    generation that a shutdown or a rolling update waits for. Replicas and autoscaling are
    Serve's own keys, edited under `deployments` in the yaml.
    """

    engine: EngineConfig
    api: ApiConfig = ApiConfig()
    embeddings: EmbeddingsConfig = EmbeddingsConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    placement: RankPlacement = RankPlacement.STRICT_PACK
    driver_cpus: NonNegativeFloat = 1.0
    rank_cpus: NonNegativeFloat = 1.0
    ingress_cpus: NonNegativeFloat = 1.0
    request_timeout_s: PositiveFloat = 600.0
    max_ongoing_requests: PositiveInt = 2048

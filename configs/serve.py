"""The settings of the Serve application: `args` in serve_config.yaml."""

from enum import StrEnum

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from configs.api import ApiConfig
from configs.base import Config
from configs.embeddings import EmbeddingsConfig
from configs.engine import EngineConfig
from configs.observability import ObservabilityConfig


class RankPlacement(StrEnum):
    """The nodes of a replica's ranks: STRICT_PACK is one node, PACK as few as have room."""

    STRICT_PACK = "STRICT_PACK"
    PACK = "PACK"


class ServeConfig(Config):
    """One LoRay application; replicas and autoscaling are Serve's own keys under `deployments`.

    placement: of one replica's driver and ranks.
    driver_cpus, rank_cpus, ingress_cpus: CPUs that Ray reserves; a small machine needs fractions.
    request_timeout_s: the longest generation that a shutdown or a rolling update waits for.
    max_ongoing_requests: HTTP requests of one replica, running and waiting.
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

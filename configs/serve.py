"""The settings of the Serve application: `args` in serve_config.yaml."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from configs.api import ApiConfig
from configs.base import Config
from configs.batches import BatchesConfig
from configs.embeddings import EmbeddingsConfig
from configs.engine import EngineConfig
from configs.observability import ObservabilityConfig


class RankPlacement(StrEnum):
    """The nodes of a replica's ranks: STRICT_PACK is one node, PACK as few as have room."""

    STRICT_PACK = "STRICT_PACK"
    PACK = "PACK"


_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
_ROUTES = frozenset({
    "v1", "generate", "generate_stream", "invocations", "tokenize", "embed", "info", "health",
    "ping", "startup", "metrics", "playground", "docs", "redoc", "openapi.json",
    "static-offline-docs",
})  # fmt: skip


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
    batches: BatchesConfig = BatchesConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    placement: RankPlacement = RankPlacement.STRICT_PACK
    driver_cpus: NonNegativeFloat = 1.0
    rank_cpus: NonNegativeFloat = 1.0
    ingress_cpus: NonNegativeFloat = 1.0
    request_timeout_s: PositiveFloat = 600.0
    max_ongoing_requests: PositiveInt = 2048


class BasesConfig(Config):
    """Several base models behind one address: each has drivers of its own, all share the ingress.

    models: the settings of each base by its name, which clients send as `model`. The first serves
    requests that name none. Its deployment is Driver-NAME.
    batches: of all bases; a batch's lines may name any of them.
    observability, ingress_cpus, request_timeout_s, max_ongoing_requests: of the shared ingress;
    those of an entry are for its drivers.
    """

    models: dict[Annotated[str, Field(pattern=_NAME)], ServeConfig] = Field(min_length=1)
    batches: BatchesConfig = BatchesConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    ingress_cpus: NonNegativeFloat = 1.0
    request_timeout_s: PositiveFloat = 600.0
    max_ongoing_requests: PositiveInt = 2048

    @model_validator(mode="after")
    def _names_are_free(self) -> "BasesConfig":
        for name in self.models:
            if name in _ROUTES:
                raise ValueError(f"models: `{name}` is the name of a route: choose another")
            if self.models[name].batches.storage is not None:
                raise ValueError(f"models.{name}.batches: set `batches` beside `models`")
        names = [each.engine.model.name for each in self.models.values() if each.engine.model.name]
        if len(set(names)) < len(names):
            raise ValueError("models: two bases have the same engine.model.name")
        for base, each in self.models.items():
            if each.engine.model.name in self.models.keys() - {base}:
                raise ValueError(
                    f"models.{base}.engine.model.name: `{each.engine.model.name}` is another base"
                )
        if self.batches.storage is not None:
            self._require_same_keys()
        return self

    def _require_same_keys(self) -> None:
        """Refuse two keys of one name: files and batches belong to a key's name."""
        seen: dict[str, tuple[str | None, str | None]] = {}
        for base, settings in self.models.items():
            for key in settings.api.keys:
                if seen.setdefault(key.name, (key.env, key.sha256)) != (key.env, key.sha256):
                    raise ValueError(
                        f"models.{base}.api.keys: `{key.name}` is another key of another base: "
                        "with `batches`, give each key a name of its own"
                    )

    @property
    def has_quotas(self) -> bool:
        """Whether any key of any base has a quota."""
        return any(each.api.has_quotas for each in self.models.values())

    def named(self) -> dict[str, ServeConfig]:
        """Each base's settings, with its name as that of its model, and with the batches."""
        batches = {"batches": self.batches}
        return {
            name: each.model_copy(update=batches | {"engine": _with_name(each.engine, name)})
            for name, each in self.models.items()
        }


def _with_name(engine: EngineConfig, name: str) -> EngineConfig:
    given = engine.model.name or name
    return engine.model_copy(update={"model": engine.model.model_copy(update={"name": given})})

"""Settings that change without a restart: the `user_config` of the deployment Driver."""

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from configs.base import Config
from configs.engine import EngineConfig
from configs.wire.adapters import parse_reference

MAX_PRIORITY = 8


class AdapterShare(Config):
    """The weight and limits of one adapter, or the base model, in each driver replica.

    Requests over a limit wait. None: no limit.

    weight: tokens that are admitted in a round, relative to other adapters.
    max_concurrent: requests that run at once.
    tokens_per_second: tokens of prompts and answers, on average; one second's worth may come at
    once.
    priority: higher ones are admitted first, but not always (see scheduler/admission/queues.py).
    """

    weight: float = Field(default=1.0, ge=0.01, le=100.0)
    max_concurrent: PositiveInt | None = None
    tokens_per_second: PositiveFloat | None = None
    priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)


class RuntimeConfig(Config):
    """Settings that restart nothing; None keeps the value of the engine's config.

    pinned_adapters: references ("[source:]id[@revision]") of adapters that stay on the device.
    max_queued, max_step_tokens, max_mixed_prompt_tokens: as in the engine's limits.
    adapters: shares by reference; an entry without a revision holds for all revisions without an
    entry of their own.
    adapter_default: the share of every other adapter.
    base_model: the share of requests without an adapter.
    names: further names of adapters: {"sql": "hub:acme/sql@v3"}.
    """

    pinned_adapters: tuple[str, ...] = ()
    max_queued: NonNegativeInt | None = None
    max_step_tokens: PositiveInt | None = None
    max_mixed_prompt_tokens: PositiveInt | None = None
    adapters: dict[str, AdapterShare] = Field(default_factory=dict)
    adapter_default: AdapterShare = AdapterShare()
    base_model: AdapterShare = AdapterShare()
    names: dict[str, str] = Field(default_factory=dict)


_LIMITS = ("max_queued", "max_step_tokens", "max_mixed_prompt_tokens")


def with_runtime(config: EngineConfig, runtime: RuntimeConfig) -> EngineConfig:
    """The engine's config with these settings; ValueError for any that cannot be applied.

    It does not look up whether the pinned adapters exist.
    """
    for text in (*runtime.pinned_adapters, *runtime.adapters, *runtime.names.values()):
        parse_reference(text, config.adapters.default_source)
    for name in runtime.names:
        parse_reference(name, config.adapters.default_source)
        if name == config.model.served_name:
            raise ValueError(f"names.{name}: it is the base model's name, which comes first")
    most = config.limits.max_step_tokens
    if (runtime.max_step_tokens or 0) > most:
        raise ValueError(
            f"max_step_tokens ({runtime.max_step_tokens}) must not be more than that of "
            f"engine.limits ({most}), for which memory was measured: raise that one"
        )
    changes = {name: value for name in _LIMITS if (value := getattr(runtime, name)) is not None}
    limits = config.limits.model_copy(update=changes)
    return EngineConfig.model_validate({**config.model_dump(), "limits": limits.model_dump()})

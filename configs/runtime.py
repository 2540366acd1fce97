"""What an operator changes while the app runs: the Driver's `user_config`, applied in place."""

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from configs.base import Config
from configs.engine import EngineConfig
from configs.wire.adapters import parse_reference

MAX_PRIORITY = 8


class AdapterShare(Config):
    """What one adapter, or the base model, may take of each driver replica.

    weight: the tokens it is admitted for in a round, where another's are 1. max_concurrent:
    requests that may run at once. tokens_per_second: of prompts and answers, on average; one
    second's worth may come at once. priority: higher ones are admitted first, but not always
    (scheduler/admission/queues.py says how often lower ones are). None: no cap. What is over a
    cap waits.
    """

    weight: float = Field(default=1.0, ge=0.01, le=100.0)
    max_concurrent: PositiveInt | None = None
    tokens_per_second: PositiveFloat | None = None
    priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)


class RuntimeConfig(Config):
    """Settings that restart nothing; None keeps what the engine's config says.

    pinned_adapters: references ("[source:]id[@revision]") kept on the device.
    max_queued, max_step_tokens, max_mixed_prompt_tokens: as in the engine's limits.
    adapters: shares by reference; one without a revision is for all revisions that have none of
    their own. adapter_default: every other adapter's. base_model: that of requests without any.
    names: what clients may call adapters besides, by reference: {"sql": "hub:acme/sql@v3"}.
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
    """The engine's config under these settings; ValueError for any that cannot be applied.

    Whether a pinned adapter can be had is not looked up.
    """
    for text in (*runtime.pinned_adapters, *runtime.adapters, *runtime.names.values()):
        parse_reference(text, config.adapters.default_source)
    for name in runtime.names:
        parse_reference(name, config.adapters.default_source)
    changes = {name: value for name in _LIMITS if (value := getattr(runtime, name)) is not None}
    limits = config.limits.model_copy(update=changes)
    return EngineConfig.model_validate({**config.model_dump(), "limits": limits.model_dump()})

"""The Llama family as one frozen spec, read from a Hugging Face config.json.

Keys and defaults are those of transformers' LlamaConfig and MistralConfig. What would change
results and is not computed here is refused by its name, never ignored.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from pydantic import PositiveFloat, PositiveInt, model_validator

from configs.architectures.base import (
    Activation,
    ArchitectureError,
    ModelArchitecture,
    activation,
    checkpoint_dtype,
    refuse_quantised,
    required,
    token_ids,
)
from configs.base import Config


class RopeType(StrEnum):
    """How rotary frequencies are derived from theta."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"


class Rope(Config):
    """Rotary position embedding (arXiv:2104.09864), full head width, rotate-half layout.

    factor: LINEAR and LLAMA3 divide (low) frequencies by it. The last three are LLAMA3's.
    """

    type: RopeType = RopeType.DEFAULT
    theta: PositiveFloat = 10000.0
    factor: PositiveFloat = 1.0
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    original_max_position_embeddings: PositiveInt = 8192


class Architecture(ModelArchitecture):
    """A pre-norm decoder of the Llama family."""

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    rms_norm_eps: PositiveFloat
    hidden_act: Activation
    rope: Rope
    attention_bias: bool = False
    mlp_bias: bool = False

    @model_validator(mode="after")
    def _heads_fit(self) -> "Architecture":
        """Query heads share KV heads evenly; rotation pairs the halves of a head."""
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even for rotary embeddings")
        return self


FAMILY: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
}
"""The architectures that this spec describes, and their defaults where not LlamaConfig's."""

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_ROPE_KEYS = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    }
)


def parse(name: str, config: Mapping[str, Any]) -> Architecture:
    """Normalise the config.json of architecture `name`; ArchitectureError names what is wrong."""
    known = {**_DEFAULTS, **FAMILY[name], **config}
    _refuse_unsupported(known)
    heads = required(known, "num_attention_heads")
    return Architecture(
        architecture=name,
        vocab_size=required(known, "vocab_size"),
        hidden_size=required(known, "hidden_size"),
        intermediate_size=required(known, "intermediate_size"),
        num_layers=required(known, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=known.get("num_key_value_heads") or heads,
        head_dim=known.get("head_dim") or known["hidden_size"] // heads,
        rms_norm_eps=known["rms_norm_eps"],
        hidden_act=activation(known["hidden_act"]),
        rope=_rope(known),
        max_position_embeddings=known["max_position_embeddings"],
        tie_word_embeddings=known.get("tie_word_embeddings", False),
        attention_bias=known.get("attention_bias", False),
        mlp_bias=known.get("mlp_bias", False),
        bos_token_id=known["bos_token_id"],
        eos_token_ids=token_ids(known["eos_token_id"]),
        checkpoint_dtype=checkpoint_dtype(known),
    )


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Refuse settings that would change results: quantised weights, windows, partial rotation."""
    refuse_quantised(config)
    window = config.get("sliding_window")
    if window is not None and window < config["max_position_embeddings"]:
        raise ArchitectureError(
            f"sliding_window ({window}) shorter than max_position_embeddings "
            f"({config['max_position_embeddings']}) is not supported"
        )
    if config.get("partial_rotary_factor") not in (None, 1.0):
        raise ArchitectureError(
            f"partial_rotary_factor ({config['partial_rotary_factor']}) is not supported"
        )


def _rope(config: Mapping[str, Any]) -> Rope:
    """Read `rope_parameters` (transformers 5), or `rope_scaling` beside `rope_theta` (before)."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = given.get("rope_type") or given.get("type") or RopeType.DEFAULT
    if kind not in list(RopeType):
        raise ArchitectureError(
            f"rope type {kind!r} is not supported; known: {', '.join(RopeType)}"
        )
    unknown = sorted(key for key in given if key not in _ROPE_KEYS)
    if unknown:
        raise ArchitectureError(f"rope settings {', '.join(unknown)} are not supported")
    if given.get("partial_rotary_factor") not in (None, 1.0):
        raise ArchitectureError("partial_rotary_factor other than 1 is not supported")
    theta = given.get("rope_theta") or config["rope_theta"]
    if kind == RopeType.DEFAULT:
        return Rope(theta=theta)
    if kind == RopeType.LINEAR:
        return Rope(type=RopeType.LINEAR, theta=theta, factor=_rope_value(given, "factor"))
    return Rope(
        type=RopeType.LLAMA3,
        theta=theta,
        factor=_rope_value(given, "factor"),
        low_freq_factor=_rope_value(given, "low_freq_factor"),
        high_freq_factor=_rope_value(given, "high_freq_factor"),
        original_max_position_embeddings=given.get("original_max_position_embeddings")
        or config["max_position_embeddings"],
    )


def _rope_value(given: Mapping[str, Any], key: str) -> float:
    """A number that this rope type cannot do without."""
    if given.get(key) is None:
        raise ArchitectureError(f"the rope settings do not give {key}")
    return float(given[key])

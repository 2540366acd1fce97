"""Rotary position embedding as one frozen spec, read from a config.json's rope settings.

Keys, defaults and precedence are those of transformers' RotaryEmbeddingConfigMixin.
"""

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Self

from pydantic import Field, PositiveFloat, PositiveInt

from configs.architectures.base import ArchitectureError, ModelArchitecture
from configs.base import Config
from configs.rope_sets import RopeSets

POSITIONS_PER_SET = 1 << 24
"""A position p of rope set s is p + s * POSITIONS_PER_SET; float32 counts so far exactly."""


class RopeType(StrEnum):
    """How rotary frequencies are derived from theta."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"
    DYNAMIC = "dynamic"


class Rope(Config):
    """Rotary position embedding (arXiv:2104.09864), rotate-half layout.

    fraction: of a head's width that is rotated, its first dimensions (partial_rotary_factor).
    factor: LINEAR, LLAMA3 and YARN divide (low) frequencies by it, DYNAMIC grows theta by it.
    low_freq_factor, high_freq_factor: LLAMA3's. beta_fast, beta_slow, truncate: YARN's
    (arXiv:2309.00071). short_factors, long_factors: LONGROPE's (arXiv:2402.13753), one for each
    rotated pair. attention_factor: cosines and sines are multiplied by it.
    original_max_position_embeddings: the length that was trained, in tokens.
    fixed_length: DYNAMIC's frequencies are those for a sequence of so many tokens, whatever a
    sequence has; None: those of the trained length, and no sequence may be longer.
    """

    type: RopeType = RopeType.DEFAULT
    theta: PositiveFloat = 10000.0
    fraction: float = Field(default=1.0, gt=0, le=1)
    factor: PositiveFloat = 1.0
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    truncate: bool = True
    short_factors: tuple[PositiveFloat, ...] = ()
    long_factors: tuple[PositiveFloat, ...] = ()
    attention_factor: PositiveFloat = 1.0
    original_max_position_embeddings: PositiveInt = 8192
    fixed_length: PositiveInt | None = None

    def width(self, head_dim: int) -> int:
        """How many of a head's first dimensions are rotated."""
        return int(head_dim * self.fraction)


class RotaryArchitecture(ModelArchitecture):
    """A model with rotary position embeddings.

    rope_recompute: whether its `generate` computes all keys anew where a growing sequence takes
    LONGROPE's other set; else they stay as they were written.
    """

    rope: Rope
    rope_recompute: bool = False

    @property
    def max_total_tokens(self) -> int:
        """The longest sequence, in tokens; a fixed length of dynamic rope may be longer."""
        return max(self.max_position_embeddings, self.rope.fixed_length or 0)

    @property
    def longer_advice(self) -> str:
        """What to do where sequences shall be longer; a part of the error text."""
        if self.rope.type is not RopeType.DYNAMIC:
            return super().longer_advice
        return (
            "lower it, or set model.dynamic_rope_length to the one length that gives all "
            "sequences their frequencies (with rope_type dynamic they change with every token "
            "beyond the model's own length, but for keys that were computed before)"
        )

    @property
    def rope_sets(self) -> RopeSets | None:
        """When a sequence takes which rotary frequencies; None where all take the same."""
        if self.rope.type is not RopeType.LONGROPE:
            return None
        return RopeSets(self.rope.original_max_position_embeddings, self.rope_recompute)

    def with_rope_length(self, length: int | None) -> Self:
        """The same model with dynamic rope fixed to that length."""
        if self.rope.type is not RopeType.DYNAMIC:
            return super().with_rope_length(length)
        rope = self.rope.model_copy(update={"fixed_length": length})
        return self.model_copy(update={"rope": rope})


_KEYS = frozenset(
    {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "attention_factor"}
    | {"low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    | {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
    | {"short_factor", "long_factor", "finetuned"}
)
"""Those that are read, and `finetuned`, which says how a model was trained with YaRN."""


def read_rope(config: Mapping[str, Any], aliases: Mapping[str, str] | None = None) -> Rope:
    """The rope settings of a config.json; ArchitectureError names what is wrong.

    They are `rope_parameters` (transformers 5) or `rope_scaling` beside `rope_theta` (before).
    `config` holds rope_theta and max_position_embeddings, the family's default or the file's own.
    aliases: what a family calls a rope type, to the type's name here.
    """
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = given.get("rope_type") or given.get("type") or RopeType.DEFAULT
    kind = (aliases or {}).get(kind, kind)
    if kind not in list(RopeType):
        raise ArchitectureError(
            f"rope type {kind!r} is not supported; known: {', '.join(RopeType)}"
        )
    unknown = sorted(key for key in given if key not in _KEYS)
    if unknown:
        raise ArchitectureError(
            f"rope settings {', '.join(unknown)} are not supported: transformers does not read "
            "them; remove them from config.json if the model shall be computed as it does"
        )
    fraction = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    fields = {
        "type": kind,
        "theta": given.get("rope_theta") or config["rope_theta"],
        "fraction": 1.0 if fraction is None else fraction,
    }
    return Rope(**fields, **_OWN_FIELDS[RopeType(kind)](given, config))


def _default(given: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def _linear(given: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    return {"factor": _number(given, "factor")}


def _llama3(given: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    names = ("factor", "low_freq_factor", "high_freq_factor")
    own: dict[str, Any] = {name: _number(given, name) for name in names}
    return {**own, "original_max_position_embeddings": _trained_length(given, config)}


def _yarn(given: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    factor, wanted = _number(given, "factor"), given.get("attention_factor")
    mscale, all_dim = given.get("mscale"), given.get("mscale_all_dim")
    if wanted is None and mscale and all_dim:
        wanted = _yarn_scale(factor, mscale) / _yarn_scale(factor, all_dim)
    return {
        "factor": factor,
        "attention_factor": _yarn_scale(factor, 1.0) if wanted is None else wanted,
        "beta_fast": given.get("beta_fast") or 32,
        "beta_slow": given.get("beta_slow") or 1,
        "truncate": given.get("truncate", True),
        "original_max_position_embeddings": _trained_length(given, config),
    }


def _yarn_scale(factor: float, mscale: float) -> float:
    """Equation 22 of arXiv:2309.00071, for cosines and sines instead of the scores."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(given: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    trained = _trained_length(given, config)
    factor, wanted = given.get("factor"), given.get("attention_factor")
    ratio = config["max_position_embeddings"] / trained if factor is None else factor
    if wanted is None:
        wanted = math.sqrt(1 + math.log(ratio) / math.log(trained)) if ratio > 1 else 1.0
    for name in ("short_factor", "long_factor"):
        if not given.get(name):
            raise ArchitectureError(f"the rope settings do not give {name}")
    return {
        "attention_factor": wanted,
        "short_factors": given["short_factor"],
        "long_factors": given["long_factor"],
        "original_max_position_embeddings": trained,
    }


def _dynamic(given: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    # transformers grows theta from max_position_embeddings on, whatever the original_... key says.
    return {
        "factor": _number(given, "factor"),
        "original_max_position_embeddings": config["max_position_embeddings"],
    }


_OWN_FIELDS = {
    RopeType.DEFAULT: _default,
    RopeType.LINEAR: _linear,
    RopeType.LLAMA3: _llama3,
    RopeType.YARN: _yarn,
    RopeType.LONGROPE: _longrope,
    RopeType.DYNAMIC: _dynamic,
}


def _trained_length(given: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """The length before stretching; transformers puts the top-level key first (Phi-3 has it)."""
    key = "original_max_position_embeddings"
    return int(config.get(key) or given.get(key) or config["max_position_embeddings"])


def _number(given: Mapping[str, Any], key: str) -> float:
    """A number that this rope type cannot do without."""
    if given.get(key) is None:
        raise ArchitectureError(f"the rope settings do not give {key}")
    return float(given[key])

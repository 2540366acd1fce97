"""The Llama family as one frozen spec, read from a Hugging Face config.json.

Keys and defaults are those of transformers' configs (Llama, Mistral, Qwen2, Qwen3, Granite,
Phi3) and of Solar's own. What would change results and is not computed here is refused by its
name, never ignored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from configs.architectures.base import (
    Activation,
    ArchitectureError,
    activation,
    checkpoint_dtype,
    refuse_unserved,
    refuse_window_of_one,
    required,
)
from configs.architectures.rope import Rope, RopeType, RotaryArchitecture, read_rope
from configs.base import Config

__all__ = ["FAMILY", "Architecture", "Blend", "Member", "Rope", "RopeType", "parse"]


class Blend(Config):
    """A skip connection into the stream x before a layer: x = weight * s + (1 - weight) * x.

    s: what the stream was before layer `source`, which is no later, and before any blend there.
    """

    layer: NonNegativeInt
    source: NonNegativeInt
    weight: float


class Architecture(RotaryArchitecture):
    """A pre-norm decoder of the Llama family.

    qkv_bias, output_bias: of the attention's projections. qk_norm: queries and keys pass an
    RMSNorm over each head before they are rotated. fused: the checkpoint holds one qkv_proj and
    one gate_up_proj, and so do its adapters. attention_scale: of the scores. windows: one a
    layer, how many tokens back a token sees, itself included (None: all).
    embedding_multiplier: of the embedded tokens. residual_multiplier: of what a sublayer adds.
    logits_divisor: logits are divided by it (Granite's logits_scaling). blends: skip connections,
    in order.
    """

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    rms_norm_eps: PositiveFloat
    hidden_act: Activation
    attention_scale: PositiveFloat
    windows: tuple[PositiveInt | None, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    fused: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: PositiveFloat = 1.0
    blends: tuple[Blend, ...] = ()

    @model_validator(mode="after")
    def _sizes_fit(self) -> "Architecture":
        """Query heads share KV heads evenly; rotation works on pairs; every layer has a window."""
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        width = self.rope.width(self.head_dim)
        if width % 2 or width < 2:
            raise ValueError(
                f"head_dim ({self.head_dim}) must be even for rotary embeddings, and so must its "
                f"rotated part ({width}, by partial_rotary_factor)"
            )
        for name in ("short_factors", "long_factors"):
            count = len(getattr(self.rope, name))
            if self.rope.type is RopeType.LONGROPE and count != width // 2:
                raise ValueError(f"longrope's {name} must be {width // 2} numbers, found {count}")
        if len(self.windows) != self.num_layers:
            raise ValueError(f"layer_types must name {self.num_layers} layers")
        return self


@dataclass(frozen=True)
class Member:
    """One architecture of the family: what its config.json may say, and what goes unsaid.

    defaults: where not LlamaConfig's. honours: the keys of `_OWN` that its class reads.
    traits: fields of the spec that its class in transformers fixes.
    rope_aliases: its own names for rope types.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    honours: frozenset[str] = frozenset()
    traits: Mapping[str, Any] = field(default_factory=dict)
    rope_aliases: Mapping[str, str] = field(default_factory=dict)


_QWEN: dict[str, Any] = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "bos_token_id": None,
}
_SOME_WINDOWED = frozenset({"use_sliding_window", "max_window_layers"})
_MULTIPLIERS = frozenset(
    {"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"}
)
_SKIPS = ("bskcn_1", "bskcn_2", "bskcn_3", "bskcn_4")
"""Layers before which the stream is kept (1, 2), and into which it is blended again (3, 4)."""

FAMILY: dict[str, Member] = {
    "LlamaForCausalLM": Member(honours=frozenset({"attention_bias", "mlp_bias"})),
    "MistralForCausalLM": Member(
        {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
        # AutoConfig makes a Ministral of a Mistral with layer_types in its config.json.
        honours=frozenset({"sliding_window", "layer_types"}),
    ),
    "Qwen2ForCausalLM": Member(
        _QWEN,
        honours=frozenset({"sliding_window", "layer_types", "attention_bias"} | _SOME_WINDOWED),
        traits={"qkv_bias": True, "output_bias": False},
    ),
    "Qwen3ForCausalLM": Member(
        {**_QWEN, "head_dim": 128},
        honours=frozenset({"sliding_window", "layer_types", "attention_bias"} | _SOME_WINDOWED),
        traits={"qk_norm": True},
    ),
    "GraniteForCausalLM": Member(
        {"attention_multiplier": 1.0},
        honours=frozenset({"attention_bias", "mlp_bias"}) | _MULTIPLIERS,
    ),
    "Phi3ForCausalLM": Member(
        {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
        honours=frozenset({"sliding_window", "partial_rotary_factor"}),
        # Its class in transformers drops the cache there, in prepare_inputs_for_generation.
        traits={"fused": True, "rope_recompute": True},
        rope_aliases={"su": "longrope", "yarn": "longrope"},
    ),
    # transformers has no such class; its keys and defaults are those of the model's own code.
    "SolarForCausalLM": Member(
        {
            "sliding_window": 2047,
            "bskcn_1": [12, 20, 32, 44],
            "bskcn_2": [20, 32],
            "bskcn_3": [16, 24, 36, 48],
            "bskcn_4": [28, 40],
            "bskcn_tv": [0.9, 0.8],
        },
        honours=frozenset({"attention_bias", "mlp_bias", "sliding_window", *_SKIPS}),
    ),
}
"""The architectures that this spec describes."""

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
}

_OWN = frozenset(
    {"sliding_window", "layer_types", "partial_rotary_factor", "attention_bias", "mlp_bias"}
    | {*_SOME_WINDOWED, *_MULTIPLIERS, *_SKIPS}
)
"""Keys that only some members' classes read; what the others' config.json says of them is idle,
except where rope, masks or the cache, which all share, heed it (`_refuse_unsupported`)."""


def parse(name: str, config: Mapping[str, Any]) -> Architecture:
    """Normalise the config.json of architecture `name`; ArchitectureError names what is wrong."""
    member = FAMILY[name]
    given = {**_DEFAULTS, **member.defaults, **config}
    _refuse_unsupported(name, given)
    known = {key: given[key] for key in given if key not in _OWN or key in member.honours}
    windows = _windows(name, known)
    refuse_window_of_one(windows)
    heads = required(known, "num_attention_heads")
    head_dim = known.get("head_dim") or required(known, "hidden_size") // heads
    return Architecture(
        architecture=name,
        vocab_size=required(known, "vocab_size"),
        hidden_size=required(known, "hidden_size"),
        intermediate_size=required(known, "intermediate_size"),
        num_layers=required(known, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=known.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        rms_norm_eps=known["rms_norm_eps"],
        hidden_act=activation(known["hidden_act"]),
        rope=_rope(member, known),
        windows=windows,
        max_position_embeddings=known["max_position_embeddings"],
        tie_word_embeddings=known.get("tie_word_embeddings", False),
        bos_token_id=known["bos_token_id"],
        checkpoint_dtype=checkpoint_dtype(known),
        blends=_blends(known),
        **_scales(known, head_dim),
        **{**_biases(known), **member.traits},
    )


def _rope(member: Member, config: Mapping[str, Any]) -> Rope:
    """The rope settings; members that do not honour partial_rotary_factor rotate whole heads."""
    rope = read_rope(config, member.rope_aliases)
    if "partial_rotary_factor" in member.honours:
        return rope
    return rope.model_copy(update={"fraction": 1.0})


def _biases(config: Mapping[str, Any]) -> dict[str, Any]:
    """`attention_bias` is one key for all four projections."""
    attention = bool(config.get("attention_bias"))
    return {
        "qkv_bias": attention,
        "output_bias": attention,
        "mlp_bias": bool(config.get("mlp_bias")),
    }


def _scales(config: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """What is multiplied where; Granite's keys, neutral for the others."""
    scale, divisor = config.get("attention_multiplier"), config.get("logits_scaling")
    embedding, residual = config.get("embedding_multiplier"), config.get("residual_multiplier")
    return {
        "attention_scale": head_dim**-0.5 if scale is None else scale,
        "embedding_multiplier": 1.0 if embedding is None else embedding,
        "residual_multiplier": 1.0 if residual is None else residual,
        "logits_divisor": 1.0 if divisor is None else divisor,
    }


def _blends(config: Mapping[str, Any]) -> tuple[Blend, ...]:
    """Solar's skip connections; its second weight is the one outside training."""
    ends = {key: sorted(config.get(key) or ()) for key in _SKIPS}
    layers, found = required(config, "num_hidden_layers"), []
    for kept, into in (("bskcn_1", "bskcn_3"), ("bskcn_2", "bskcn_4")):
        for layer in (each for each in ends[into] if each < layers):
            source = max((each for each in ends[kept] if each <= layer), default=None)
            if source is None:
                raise ArchitectureError(f"{into} names layer {layer}, and {kept} none before it")
            found.append(Blend(layer=layer, source=source, weight=config["bskcn_tv"][1]))
    return tuple(sorted(found, key=lambda blend: blend.layer))


def _windows(name: str, config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """One window a layer: the same for all, or as `layer_types` (or Qwen's rule) says."""
    honours, window = FAMILY[name].honours, config.get("sliding_window")
    layers = required(config, "num_hidden_layers")
    if "sliding_window" not in honours:
        return (None,) * layers
    if "layer_types" not in honours:
        return (window,) * layers
    if not config.get("use_sliding_window", True):
        window = None
    first = config.get("max_window_layers", 0) if window is not None else layers
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(layers)
    ]
    unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if unknown:
        raise ArchitectureError(f"layer_types {', '.join(unknown)} are not supported")
    if window is None and "sliding_attention" in kinds:
        raise ArchitectureError(
            "layer_types names sliding_attention, but use_sliding_window or sliding_window is off"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _refuse_unsupported(name: str, config: Mapping[str, Any]) -> None:
    """Refuse settings that this member's class does not read and its rope, masks or cache do."""
    honours = FAMILY[name].honours
    windowed = "sliding_window" in honours
    refuse_unserved(name, config, None if windowed else config["max_position_embeddings"])
    kinds = config.get("layer_types")
    if kinds and "layer_types" not in honours:
        _check_kinds(name, kinds, config)
    if "partial_rotary_factor" not in honours:
        _check_fraction(name, config)


def _check_kinds(name: str, kinds: Sequence[str], config: Mapping[str, Any]) -> None:
    """Refuse layer_types by which the cache would keep less than the member's attention sees."""
    # With a window, it sees that window in every layer, whatever a layer's cache keeps beyond.
    neutral = [{"full_attention"}]
    if config.get("sliding_window") is not None and "sliding_window" in FAMILY[name].honours:
        neutral.append({"sliding_attention"})
    if set(kinds) not in neutral or len(kinds) != required(config, "num_hidden_layers"):
        shown = ", ".join(sorted(set(kinds)))
        raise ArchitectureError(
            f"layer_types ({shown} in {len(kinds)} layers) is not supported for {name}: "
            "all of its layers attend alike"
        )


def _check_fraction(name: str, config: Mapping[str, Any]) -> None:
    """Refuse a part of the head to be rotated, where rope follows it and attention does not."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    fraction = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    kind = rope.get("rope_type") or rope.get("type") or RopeType.DEFAULT
    # The frequencies of this kind are computed by each class itself, for its whole heads.
    if fraction not in (None, 1.0) and kind != RopeType.DEFAULT:
        raise ArchitectureError(
            f"partial_rotary_factor ({fraction}) with rope type {kind!r} is not supported for "
            f"{name}, which rotates whole heads: remove it"
        )

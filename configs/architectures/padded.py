"""Any causal language model that has no paged implementation here, read for what a server needs.

transformers itself knows the rest; this file only finds the few numbers under their many names.
"""

from collections.abc import Mapping
from typing import Any

from configs.architectures.base import (
    LAYER_COUNTS,
    ArchitectureError,
    ModelArchitecture,
    checkpoint_dtype,
    refuse_quantised,
    required,
)

DEFAULT_LENGTH = 2048
"""Tokens of the longest sequence where a model names no limit of its own: LoRAX's default."""

_LENGTHS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx",
    "model_max_length",
)  # fmt: skip
_OWN_LENGTHS = {"falcon": 2048}
"""What transformers takes where config.json names no limit, by model_type."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "no_bias": (True,),
    "norm_type": ("low_precision_layernorm", "layernorm"),
    "logit_scale": (None,),
    "attn_type": ("multihead_attention",),
    "alibi": (True,),
    "alibi_bias_max": (8,),
    "prefix_lm": (False,),
    "qk_ln": (False,),
}
"""What MPT's config.json may say, itself or in attn_config, of what transformers does not read."""
AUTO_SUFFIX = "ForCausalLM"
"""Behind a model_type: the name of what AutoModelForCausalLM makes of it, where none is given."""
_CAUSAL = (AUTO_SUFFIX, "LMHeadModel")


class PaddedArchitecture(ModelArchitecture):
    """A model that runs in transformers' own code, over padded batches.

    limited: whether max_position_embeddings is the model's own (else DEFAULT_LENGTH, a guess).
    reason: why it is not paged.
    """

    limited: bool
    reason: str = "it has no paged implementation here"

    @property
    def stretches(self) -> bool:
        """A model without position embeddings (ALiBi) takes any length."""
        return not self.limited


def is_causal(name: str) -> bool:
    """Whether an architecture's name is that of a causal language model."""
    return any(part in name for part in _CAUSAL)


def parse(name: str, config: Mapping[str, Any]) -> PaddedArchitecture:
    """Normalise the config.json of architecture `name`; ArchitectureError names what is wrong."""
    refuse_quantised(config)
    if config.get("is_encoder_decoder"):
        raise ArchitectureError("is_encoder_decoder: only decoders are served")
    kind = config.get("model_type")
    if kind == "mpt":
        _refuse_unread(config)
    if kind == "doge" and config.get("is_moe"):
        raise ArchitectureError(
            "is_moe: transformers mixes the routers of a Doge's tokens in each call, so that "
            "answers would depend on other requests: it is not served"
        )
    # Falcon keeps max_position_embeddings in its config when ALiBi makes it meaningless.
    given = _first(config, _LENGTHS) or _OWN_LENGTHS.get(str(kind))
    length = None if config.get("alibi") else given
    kinds = config.get("layers_block_type") or config.get("layer_types") or ()
    layers = _first(config, LAYER_COUNTS) or len(kinds)
    if not layers and isinstance(config.get("text_config"), Mapping):
        raise ArchitectureError(
            f"architectures names {name}, but config.json has a decoder's fields in text_config, "
            "as larger models have: name the larger model's class, or save the decoder by itself "
            "with transformers (AutoModelForCausalLM: from_pretrained, save_pretrained)"
        )
    if not layers:
        raise ArchitectureError(f"config.json gives none of {', '.join(LAYER_COUNTS)}")
    return PaddedArchitecture(
        architecture=name,
        vocab_size=required(config, "vocab_size"),
        num_layers=layers,
        max_position_embeddings=length or DEFAULT_LENGTH,
        limited=length is not None,
        bos_token_id=config.get("bos_token_id"),
        checkpoint_dtype=checkpoint_dtype(config),
    )


def _refuse_unread(config: Mapping[str, Any]) -> None:
    """Refuse an MPT that transformers computes as if it were another."""
    settings = {**config, **(config.get("attn_config") or {})}
    for key, neutral in _NEUTRAL.items():
        if key in settings and settings[key] not in neutral:
            raise ArchitectureError(
                f"{key} ({settings[key]}): transformers does not read it of an MPT"
            )


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    """The first of `keys` that is given."""
    return next((int(config[key]) for key in keys if config.get(key) is not None), None)

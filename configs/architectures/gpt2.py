"""The GPT-2 family as one frozen spec, read from a Hugging Face config.json.

Keys and defaults are those of transformers' GPT2Config. What would change results and is not
computed here is refused by its name, never ignored.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import PositiveFloat, PositiveInt, model_validator

from configs.architectures.base import (
    Activation,
    ArchitectureError,
    ModelArchitecture,
    activation,
    checkpoint_dtype,
    refuse_unserved,
    required,
)


class GPT2Architecture(ModelArchitecture):
    """A pre-norm decoder with learned positions and Conv1D weights.

    scale_attn_weights: scores are multiplied by head_dim^-0.5.
    scale_attn_by_inverse_layer_idx: scores of layer i are divided by i + 1.
    """

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_heads: PositiveInt
    layer_norm_eps: PositiveFloat
    activation: Activation
    scale_attn_weights: bool
    scale_attn_by_inverse_layer_idx: bool

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads

    @model_validator(mode="after")
    def _heads_fit(self) -> "GPT2Architecture":
        """Heads share the hidden size evenly."""
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"n_embd ({self.hidden_size}) must be a multiple of n_head ({self.num_heads})"
            )
        return self


_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
    "bos_token_id": 50256,
}

_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
"""GPT2Config's attribute_map: the general name to the family's own."""


def parse(name: str, config: Mapping[str, Any]) -> GPT2Architecture:
    """Normalise the config.json of architecture `name`; ArchitectureError names what is wrong."""
    known = {**_DEFAULTS, **{_ALIASES.get(key, key): value for key, value in config.items()}}
    length = required(known, "n_positions")
    refuse_unserved(name, known, length)
    if known.get("add_cross_attention"):
        raise ArchitectureError("add_cross_attention is not supported: there is no encoder")
    hidden = required(known, "n_embd")
    return GPT2Architecture(
        architecture=name,
        vocab_size=required(known, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=known.get("n_inner") or 4 * hidden,
        num_layers=required(known, "n_layer"),
        num_heads=required(known, "n_head"),
        layer_norm_eps=known["layer_norm_epsilon"],
        activation=activation(known["activation_function"], "activation_function"),
        scale_attn_weights=known["scale_attn_weights"],
        scale_attn_by_inverse_layer_idx=known["scale_attn_by_inverse_layer_idx"],
        max_position_embeddings=length,
        tie_word_embeddings=known["tie_word_embeddings"],
        bos_token_id=known["bos_token_id"],
        checkpoint_dtype=checkpoint_dtype(known),
    )

"""The OPT family as one frozen spec, read from a Hugging Face config.json.

Keys and defaults are those of transformers' OPTConfig. What would change results and is not
computed here is refused by its name, never ignored.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import PositiveInt, model_validator

from configs.architectures.base import (
    Activation,
    ModelArchitecture,
    activation,
    checkpoint_dtype,
    refuse_unserved,
    required,
)


class OPTArchitecture(ModelArchitecture):
    """A decoder with learned positions, normed before or after each sublayer.

    embedding_size: of a token (word_embed_proj_dim); where it is not hidden_size, there are
    projections in and out. bias: of all linear layers (enable_bias). norm_first: whether a
    sublayer's input is normed (do_layer_norm_before) or the sum behind it. affine_norms: whether
    norms have weights. last_norm: whether there is one behind the last layer.
    use_cache: the default of the padded interface's argument.
    """

    hidden_size: PositiveInt
    embedding_size: PositiveInt
    intermediate_size: PositiveInt
    num_heads: PositiveInt
    activation: Activation
    bias: bool
    norm_first: bool
    affine_norms: bool
    last_norm: bool
    use_cache: bool

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads

    @model_validator(mode="after")
    def _heads_fit(self) -> "OPTArchitecture":
        """Heads share the hidden size evenly."""
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads "
                f"({self.num_heads})"
            )
        return self


_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50272,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "ffn_dim": 3072,
    "max_position_embeddings": 2048,
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "num_attention_heads": 12,
    "activation_function": "relu",
    "use_cache": True,
    "bos_token_id": 2,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "tie_word_embeddings": True,
}


def parse(name: str, config: Mapping[str, Any]) -> OPTArchitecture:
    """Normalise the config.json of architecture `name`; ArchitectureError names what is wrong."""
    known = {**_DEFAULTS, **config}
    length = required(known, "max_position_embeddings")
    refuse_unserved(name, known, length)
    hidden, norm_first = required(known, "hidden_size"), known["do_layer_norm_before"]
    return OPTArchitecture(
        architecture=name,
        vocab_size=required(known, "vocab_size"),
        hidden_size=hidden,
        embedding_size=known.get("word_embed_proj_dim") or hidden,
        intermediate_size=required(known, "ffn_dim"),
        num_layers=required(known, "num_hidden_layers"),
        num_heads=required(known, "num_attention_heads"),
        activation=activation(known["activation_function"], "activation_function"),
        bias=known["enable_bias"],
        norm_first=norm_first,
        affine_norms=known["layer_norm_elementwise_affine"],
        last_norm=norm_first and not known["_remove_final_layer_norm"],
        use_cache=known["use_cache"],
        max_position_embeddings=length,
        tie_word_embeddings=known["tie_word_embeddings"],
        bos_token_id=known["bos_token_id"],
        checkpoint_dtype=checkpoint_dtype(known),
    )

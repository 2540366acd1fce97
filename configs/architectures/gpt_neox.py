"""The GPT-NeoX family (Pythia too) as one frozen spec, read from a Hugging Face config.json.

Keys and defaults are those of transformers' GPTNeoXConfig. What would change results and is not
computed here is refused by its name, never ignored.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import PositiveFloat, PositiveInt, model_validator

from configs.architectures.base import (
    Activation,
    ArchitectureError,
    activation,
    checkpoint_dtype,
    refuse_unserved,
    required,
)
from configs.architectures.rope import Rope, RopeType, RotaryArchitecture, read_rope


class GPTNeoXArchitecture(RotaryArchitecture):
    """A decoder that rotates a part of each head; its residual may be parallel.

    rope.fraction: of a head's width that is rotated (rotary_pct). parallel_residual: attention
    and feed-forward read the same stream (use_parallel_residual). attention_bias: of
    query_key_value and dense; the feed-forward always has biases.
    use_cache: the default of the padded interface's argument.
    """

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_heads: PositiveInt
    layer_norm_eps: PositiveFloat
    hidden_act: Activation
    parallel_residual: bool
    attention_bias: bool
    use_cache: bool

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads

    @property
    def stretches(self) -> bool:
        """Angles are computed for any position; only frequencies made for a length set a limit."""
        return self.rope.type in (RopeType.DEFAULT, RopeType.LINEAR)

    @model_validator(mode="after")
    def _sizes_fit(self) -> "GPTNeoXArchitecture":
        """Heads share the hidden size evenly; rotation works on pairs."""
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads "
                f"({self.num_heads})"
            )
        width = self.rope.width(self.head_dim)
        if width % 2 or width < 2:
            raise ValueError(
                f"the rotated part of a head must be even, {width} of {self.head_dim} "
                "dimensions are rotated (by rotary_pct)"
            )
        for name in ("short_factors", "long_factors"):
            count = len(getattr(self.rope, name))
            if self.rope.type is RopeType.LONGROPE and count != width // 2:
                raise ValueError(f"longrope's {name} must be {width // 2} numbers, found {count}")
        return self


_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50432,
    "hidden_size": 6144,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "intermediate_size": 24576,
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "use_cache": True,
    "bos_token_id": 0,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "attention_bias": True,
    "rotary_emb_base": 10000.0,
    "rotary_pct": 0.25,
}


def parse(name: str, config: Mapping[str, Any]) -> GPTNeoXArchitecture:
    """Normalise the config.json of architecture `name`; ArchitectureError names what is wrong."""
    known = {**_DEFAULTS, **config}
    hidden, heads = required(known, "hidden_size"), required(known, "num_attention_heads")
    length = required(known, "max_position_embeddings")
    refuse_unserved(name, known, length)
    # transformers' rotary embedding would follow it, its attention would not.
    if known.get("head_dim") not in (None, hidden // heads):
        raise ArchitectureError(f"head_dim ({known['head_dim']}) is not supported for {name}")
    return GPTNeoXArchitecture(
        architecture=name,
        vocab_size=required(known, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=required(known, "intermediate_size"),
        num_layers=required(known, "num_hidden_layers"),
        num_heads=heads,
        layer_norm_eps=known["layer_norm_eps"],
        hidden_act=activation(known["hidden_act"]),
        rope=_rope(known),
        parallel_residual=known["use_parallel_residual"],
        attention_bias=known["attention_bias"],
        use_cache=known["use_cache"],
        max_position_embeddings=length,
        tie_word_embeddings=known["tie_word_embeddings"],
        bos_token_id=known["bos_token_id"],
        checkpoint_dtype=checkpoint_dtype(known),
    )


def _rope(known: Mapping[str, Any]) -> Rope:
    """The rope settings; outside their object, only the family's own names of these two count."""
    own = {
        "rope_theta": known["rotary_emb_base"],
        "partial_rotary_factor": known["rotary_pct"],
    }
    return read_rope({**known, **own})

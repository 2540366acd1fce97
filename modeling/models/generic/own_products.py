"""How types with attention in code of their own store the maps of q, k and v."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _heads(config: Any) -> int:
    found: int = config.num_attention_heads
    return found


@dataclass(frozen=True)
class OwnProduct:
    """The linear maps of a module that attends.

    inputs: the names of q, k and v, or of their one product. output: of the map behind attention.
    kv_heads: how many a layer has. blocks: the product lies in so many, each of some heads' q, k
    and v. order: of the three in a block.
    """

    inputs: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "out_proj"
    kv_heads: Callable[[Any], int] = _heads
    blocks: Callable[[Any], int] = _heads
    order: str = "qkv"

    def head_dim(self, config: Any) -> int:
        """Width of a head."""
        width: int = config.hidden_size
        return width // _heads(config)

    def sizes(self, config: Any) -> tuple[int, int]:
        """Query heads and KV heads of a block."""
        blocks = self.blocks(config)
        return _heads(config) // blocks, self.kv_heads(config) // blocks


def _falcon_kv_heads(config: Any) -> int:
    if config.new_decoder_architecture:
        found: int = config.num_kv_heads
        return found
    return 1 if config.multi_query else _heads(config)


_PLAIN = OwnProduct()
_BY_HEAD = OwnProduct(("query_key_value",), "dense")

_PRODUCTS = {
    **dict.fromkeys(("gpt_neo", "gptj", "xglm"), _PLAIN),
    **dict.fromkeys(("bloom", "gpt_neox_japanese"), _BY_HEAD),
    # Of the four parts in which it was trained.
    "codegen": OwnProduct(("qkv_proj",), blocks=lambda _: 4, order="qvk"),
    "falcon": OwnProduct(
        ("query_key_value",), "dense", kv_heads=_falcon_kv_heads, blocks=_falcon_kv_heads
    ),
    "mpt": OwnProduct(("Wqkv",), blocks=lambda _: 1),
}
"""By model_type."""


def own_product(config: Any) -> OwnProduct | None:
    """Return a type's maps; None where its attention is not replaced."""
    return _PRODUCTS.get(config.model_type)

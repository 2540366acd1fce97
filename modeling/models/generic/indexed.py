"""Indexes of layers that choose which positions tokens see (DeepSeek's sparse attention).

transformers' modules compute the linear maps and the norm of an index; keys, scores and choice are
those of `modeling.attention.sparse`. A layer's own code hands on what its index returns to
`attend`, and where layers share a choice, to the next ones.
"""

import inspect
import logging
from functools import partial
from typing import Any

from torch import Tensor, nn

from configs.architectures.base import ArchitectureError
from modeling.attention.sparse import TokenIndex
from modeling.models.generic.windows import mark

logger = logging.getLogger("loray.modeling")

MARKS = dict.fromkeys(("indexed_attention", "deepseek_sparse_attention"), mark())
"""Replaces masks, of which layers hand a part to their index; by transformers' names of layers,
since 5.24 and before."""

_ROTATIONS = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave")

_ROTATED_AT_THE_END = frozenset({"hy_v4"})
"""Types of which index heads are so; those of others begin with what is rotated."""


def take_over_indexes(causal: nn.Module) -> bool:
    """Replace the forward of each index; whether there are any."""
    found = [each for each in causal.modules() if hasattr(each, "index_topk")]
    for module in found:
        forward: Any = inspect.unwrap(type(module).forward)
        names = [name for name in _ROTATIONS if name in forward.__code__.co_names]
        if len(names) != 1:
            raise ArchitectureError(
                f"{type(module).__name__} of this version of transformers is an index that this "
                "version of LoRay does not know"
            )
        module.forward = partial(_compute, module, forward.__globals__[names[0]])
    if found:
        topk = found[0].index_topk
        logger.info("tokens see %s positions, which an index chooses: steps are launched", topk)
    return bool(found)


def _compute(
    module: Any,
    rotate: Any,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *_: Any,
    **_options: Any,
) -> TokenIndex:
    """hidden_states, q_resid: [1, tokens, ...]. Masks, positions and cache are not read."""
    heads, width, rotated = module.n_heads, module.head_dim, module.qk_rope_head_dim
    queries = module.wq_b(q_resid).unflatten(-1, (heads, width))
    keys = module.k_norm(module.wk(hidden_states).to(module.k_norm.weight.dtype))
    keys = keys.to(hidden_states.dtype).unsqueeze(2)
    first = width - rotated if module.config.model_type in _ROTATED_AT_THE_END else 0
    own = slice(first, first + rotated)
    turned = rotate(queries[..., own], keys[..., own], *position_embeddings, unsqueeze_dim=2)
    queries[..., own], keys[..., own] = turned
    weights = module.weights_proj(hidden_states)[0].float()
    factor = module.softmax_scale * heads**-0.5
    return TokenIndex(queries[0], weights * factor, keys[0, :, 0], module.index_topk)

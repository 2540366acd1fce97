"""MiniMax's lightning attention of further tokens of a row, in blocks.

transformers computes a sequence's first tokens so, and those behind a state one by one.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STATE = "get_linear_cache"
"""The method of its cache by which such a mixer reads the state."""


class LightningForward:
    """A mixer's forward: ours for several tokens behind a state, transformers' for all others."""

    def __init__(self, module: nn.Module, plain: Any) -> None:
        """plain: transformers'."""
        self._module: Any = module
        self._plain = plain

    def __call__(self, hidden_states: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """Return the outputs, shaped as hidden_states [rows, tokens, hidden] is, and the states."""
        cache = next(each for each in options.values() if hasattr(each, STATE))
        layer: int = self._module.layer_idx
        state = cache.get_linear_cache(layer)
        if state is None or hidden_states.shape[1] == 1:
            found: tuple[Tensor, Tensor] = self._plain(hidden_states, **options)
            return found
        out, state = _in_blocks(self._module, hidden_states, state)
        cache.set_linear_cache(layer, state)
        return out, state


def _in_blocks(module: Any, hidden_states: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs and the state behind the tokens; state: [rows, heads, width, width]."""
    qkv = module.act_fn(module.qkv_proj(hidden_states))
    heads = qkv.unflatten(-1, (module.num_attention_heads, -1)).transpose(1, 2).chunk(3, -1)
    made = []
    for q, k, v in zip(*(each.split(module.block_size, 2) for each in heads), strict=True):
        count = q.shape[2]
        scores = (q @ k.transpose(-1, -2)) * module.diagonal_decay[:, :, :count, :count]
        made.append((q * module.query_decay[:, :count]) @ state + scores @ v)
        added = (k * module.key_decay[:, -count:]).transpose(-1, -2) @ v
        state = state * torch.exp(-module.slope_rate * count) + added
    out = module.norm(torch.cat(made, 2).transpose(1, 2).flatten(2))
    return module.out_proj(F.sigmoid(module.output_gate(hidden_states)) * out), state

"""Layers' small operations as one launch each, where the device has kernels for them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from modeling.attention.kv_cache import LayerCache


@dataclass(frozen=True)
class FusedOps:
    """What the kernels compute; arguments are contiguous.

    add_rms_norm: (x, residual or None, weight, eps) to (norm of the sum, the sum), as RMSNorm.
    silu_mul: gate and up side by side [tokens, 2 * n] to silu(gate) * up [tokens, n].
    rotate_and_store: (qkv [tokens, heads, head_dim], number of query heads, (cos, sin), cache,
    slots) to q, rotated in place of what it was; k and v go to the cache.
    """

    add_rms_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
    silu_mul: Callable[[Tensor], Tensor]
    rotate_and_store: Callable[[Tensor, int, tuple[Tensor, Tensor], LayerCache, Tensor], Tensor]


def fused_ops(device: torch.device) -> FusedOps | None:
    """The kernels of a CUDA device with Triton; None elsewhere, where torch's own serve."""
    if device.type != "cuda":
        return None
    try:
        from modeling.layers import triton
    except ImportError:
        return None
    return triton.OPS

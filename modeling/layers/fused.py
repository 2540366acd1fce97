"""Layers' small operations as one launch each, where the device has kernels for them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from sharding.linear_weight import LinearWeight

Rounded = tuple[Tensor, Tensor]
"""fp8 or int8 [tokens, n] and float32 [tokens, 1]: numbers, and the scale of each token's."""


@dataclass(frozen=True)
class FusedOps:
    """What the kernels compute; arguments are contiguous.

    add_rms_norm: (x, residual or None, weight, eps) to (norm of the sum, the sum), as RMSNorm; a
    last argument (weight, eps) is a norm of x before the sum. Without a weight the sum is returned
    twice. `factor` multiplies what is added to the residual, `total_factor` the sum. `rounded`:
    (codes, scales), where the norm is written in fp8 or int8 too, rounded by token. `summand`: the
    one that x is part of, where x stands for its sum over ranks.
    silu_mul: gate and up side by side [tokens, 2 * n] to silu(gate) * up [tokens, n]; `rounded` the
    same.
    gelu_tanh_mul: the same with the tanh form of GELU.
    gated_mul: (gate, up, is_gelu) to the same of two tensors, of which rows may be far from each
    other.
    rotate_and_store: ((q, k, v) [tokens, heads or kv_heads, head_dim], (cos, sin), cache, slots,
    norms or None) to the rotation of q; k and v go to the cache, as LayerCache.store. A last
    argument: whether q is overwritten.
    store_latents: (q, k, angles, cache, slots): rotates the last numbers of heads, and stores k.
    angles: (int64 positions [tokens], float32 frequencies [sets, n], scale, type) to (cos, sin)
    [tokens, 1, 2 * n], as Rotary.angles.
    best: logits [rows, vocab] to int64 [rows], each row's argmax, the lowest id of equals.
    """

    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    silu_mul: Callable[..., Tensor]
    gelu_tanh_mul: Callable[[Tensor], Tensor]
    gated_mul: Callable[[Tensor, Tensor, bool], Tensor]
    rotate_and_store: Callable[..., Tensor]
    store_latents: Callable[..., None]
    angles: Callable[[Tensor, Tensor, float, torch.dtype], tuple[Tensor, Tensor]]
    best: Callable[[Tensor], Tensor]


def rounded_for(reader: LinearWeight | None, x: Tensor) -> Rounded | None:
    """Return where a kernel writes what `reader` multiplies in 8 bits too, if that spares a launch.

    x: what the kernel reads [tokens, n], of the type that it writes. The reader must be given the
    numbers with `take_rounded`.
    """
    kind = None if reader is None else reader.rounded_type(x)
    if reader is None or kind is None:
        return None
    codes = torch.empty(len(x), reader.shape[1], dtype=kind, device=x.device)
    return codes, torch.empty(len(x), 1, dtype=torch.float32, device=x.device)


@cache
def casts_to_fp8(device: torch.device) -> bool:
    """Whether kernels can write e4m3 numbers there: compute capability 8.9 and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def fused_ops(device: torch.device) -> FusedOps | None:
    """The kernels of a CUDA device with Triton; None elsewhere, where torch's operations serve."""
    return _triton_ops() if device.type == "cuda" else None


@cache
def _triton_ops() -> FusedOps | None:
    try:
        # Here, not above: Triton comes with CUDA builds of torch only.
        from modeling.layers.kernels import latents, operations, rows
    except ImportError:
        return None
    return FusedOps(
        add_rms_norm=rows.add_rms_norm,
        silu_mul=rows.silu_mul,
        gelu_tanh_mul=rows.gelu_tanh_mul,
        gated_mul=rows.gated_mul,
        rotate_and_store=operations.rotate_and_store,
        store_latents=latents.store_latents,
        angles=operations.angles,
        best=operations.best,
    )

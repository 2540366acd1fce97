"""The layers' small operations in Triton: one read and one write of each tensor, one launch each.

All compute in float32 and round once where torch's own operations round after each.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from modeling.attention.kv_cache import LayerCache
from modeling.layers.fused import FusedOps

SILU_COLUMNS = 1024
HEADS_A_PROGRAM = 4

Pointer = Any


@triton.jit  # type: ignore[untyped-decorator]
def _add_rms_norm(
    x: "Pointer",
    residual: "Pointer",
    weight: "Pointer",
    normed: "Pointer",
    total: "Pointer",
    eps: float,
    size: tl.constexpr,
    width: tl.constexpr,
    has_residual: tl.constexpr,
) -> None:
    """Norm one row of x + residual; width: the power of two that holds size."""
    start = tl.program_id(0).to(tl.int64) * size
    columns = tl.arange(0, width)
    inside = columns < size
    values = tl.load(x + start + columns, mask=inside, other=0.0)
    if has_residual:
        before = tl.load(residual + start + columns, mask=inside, other=0.0)
        # The sum travels on in the model's type, so the norm is that of the rounded sum.
        values = (values.to(tl.float32) + before.to(tl.float32)).to(values.dtype)
        tl.store(total + start + columns, values, mask=inside)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + start + columns, (wide * scale * factors).to(values.dtype), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul(gate_up: "Pointer", out: "Pointer", size: tl.constexpr, width: tl.constexpr) -> None:
    """One run of `width` columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * width + tl.arange(0, width)
    inside = columns < size
    gate = tl.load(gate_up + row * 2 * size + columns, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * size + size + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    product = wide * tl.sigmoid(wide) * up.to(tl.float32)
    tl.store(out + row * size + columns, product.to(gate.dtype), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_and_store(
    qkv: "Pointer",
    cos: "Pointer",
    sin: "Pointer",
    keys: "Pointer",
    values: "Pointer",
    slots: "Pointer",
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    half: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """A few heads of one token: q rotates in place, k rotates into the cache, v moves there.

    half: of a head; width: the power of two that holds it. sin bears the rotation's signs.
    """
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * block + tl.arange(0, block))[:, None]
    columns = tl.arange(0, width)[None, :]
    rotated = num_heads + num_kv_heads
    inside = (heads < rotated + num_kv_heads) & (columns < half)
    is_query = inside & (heads < num_heads)
    is_key = inside & (heads >= num_heads) & (heads < rotated)
    is_value = inside & (heads >= rotated)

    source = qkv + token * (rotated + num_kv_heads) * 2 * half + heads * 2 * half + columns
    raw_low = tl.load(source, mask=inside, other=0.0)
    raw_high = tl.load(source + half, mask=inside, other=0.0)
    angle = token * 2 * half + columns
    in_half = columns < half
    cos_low = tl.load(cos + angle, mask=in_half, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + angle + half, mask=in_half, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + angle, mask=in_half, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + angle + half, mask=in_half, other=0.0).to(tl.float32)
    low, high = raw_low.to(tl.float32), raw_high.to(tl.float32)
    new_low = (low * cos_low + high * sin_low).to(raw_low.dtype)
    new_high = (high * cos_high + low * sin_high).to(raw_low.dtype)

    tl.store(source, new_low, mask=is_query)
    tl.store(source + half, new_high, mask=is_query)
    cached = tl.load(slots + token) * num_kv_heads * 2 * half + columns
    key = cached + (heads - num_heads) * 2 * half
    tl.store(keys + key, new_low.to(keys.dtype.element_ty), mask=is_key)
    tl.store(keys + key + half, new_high.to(keys.dtype.element_ty), mask=is_key)
    value = cached + (heads - rotated) * 2 * half
    tl.store(values + value, raw_low.to(values.dtype.element_ty), mask=is_value)
    tl.store(values + value + half, raw_high.to(values.dtype.element_ty), mask=is_value)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """y = w * s / sqrt(mean(s^2) + eps), s = x + residual: (y, s), both [tokens, size]."""
    size = x.shape[-1]
    normed = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    _add_rms_norm[(x.shape[0],)](
        x,
        x if residual is None else residual,
        weight,
        normed,
        total,
        eps,
        size=size,
        width=triton.next_power_of_2(size),
        has_residual=residual is not None,
        num_warps=8 if size > 1024 else 4,
    )
    return normed, total


def silu_mul(gate_up: Tensor) -> Tensor:
    """y[t, j] = silu(g[t, j]) * u[t, j], g the first half of the columns, u the second."""
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    grid = (tokens, triton.cdiv(size, SILU_COLUMNS))
    _silu_mul[grid](gate_up, out, size=size, width=SILU_COLUMNS)
    return out


def rotate_and_store(
    qkv: Tensor, num_heads: int, angles: tuple[Tensor, Tensor], cache: LayerCache, slots: Tensor
) -> Tensor:
    """q' = q cos + swap(q) sin in place, the same for k into the cache, v as it is.

    qkv: [tokens, heads + 2 * kv_heads, head_dim]; returns q [tokens, heads, head_dim].
    """
    tokens, all_heads, head_dim = qkv.shape
    half = head_dim // 2
    _rotate_and_store[(tokens, triton.cdiv(all_heads, HEADS_A_PROGRAM))](
        qkv,
        *angles,
        cache.keys,
        cache.values,
        slots,
        num_heads=num_heads,
        num_kv_heads=(all_heads - num_heads) // 2,
        half=half,
        width=triton.next_power_of_2(half),
        block=HEADS_A_PROGRAM,
        num_warps=4,
    )
    return qkv[:, :num_heads]


OPS = FusedOps(add_rms_norm, silu_mul, rotate_and_store)

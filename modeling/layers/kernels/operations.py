"""The layers' small operations in Triton: one read and one write of each tensor, one launch each.

All compute in float32 and round once where torch's own operations round after each. They are
programmatic dependent launches (PDL): each starts while the kernel before it ends, reads what
that one wrote only after `gdc_wait`, and lets the next one start.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from configs.architectures.rope import POSITIONS_PER_SET
from modeling.attention.kv_cache import FP8_MAX, LayerCache
from modeling.kernels.launch import Launcher, aligned, has_dependent_launch, launch_options
from modeling.layers.head_norms import HeadNorms

HEADS_PER_PROGRAM, NUMBERS_PER_PROGRAM = 8, 512
"""Of a rotation: so many heads, or more where halves of heads have few numbers."""

BEST_COLUMNS = 4096
"""What one program computes."""

Pointer = Any

# Arguments are grouped by what they describe.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def _clamped(
    x: "Any", factor: float, largest: tl.constexpr, clamped: "Pointer", mask: "Any"
) -> "Any":
    """x * factor, clamped to +-largest, the most that the cache's type can hold.

    Sets `clamped` to 1 if a value was beyond that. NaN stays NaN.
    """
    scaled = x.to(tl.float32) * factor
    beyond = tl.abs(scaled) > largest
    tl.store(clamped + tl.zeros_like(scaled).to(tl.int32), 1, mask=mask & beyond)
    return tl.where(beyond, tl.where(scaled > 0, largest, -largest), scaled)


@triton.jit  # type: ignore[untyped-decorator]
def _of_parts(
    q: "Pointer", k: "Pointer", v: "Pointer", is_query: "Any", is_key: "Any", is_value: "Any"
) -> "Any":
    """What each of a program's heads has, of q, k or v."""
    found = tl.load(q, mask=is_query, other=0.0)
    found = tl.where(is_key, tl.load(k, mask=is_key, other=0.0), found)
    return tl.where(is_value, tl.load(v, mask=is_value, other=0.0), found)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_and_store(
    q: "Pointer", k: "Pointer", v: "Pointer", out: "Pointer",
    q_stride: "Any", k_stride: "Any", v_stride: "Any", out_stride: "Any",
    q_weight: "Pointer", k_weight: "Pointer",
    cos: "Pointer", sin: "Pointer",
    keys: "Pointer", values: "Pointer", slots: "Pointer", clamped: "Pointer",
    q_eps: float, k_eps: float, key_factor: float, value_factor: float,
    num_heads: tl.constexpr, num_kv_heads: tl.constexpr, half: tl.constexpr, width: tl.constexpr,
    block: tl.constexpr, largest: tl.constexpr,
    NORMED: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """A few heads of one token: the rotation of q goes to out; k's, and v, go to the cache.

    q'[i] = q[i] cos[i] + q[(i + half) mod 2 half] sin[i], sin with the rotation's signs; k alike.
    NORMED: of the norms of q's and k's heads. half: of a head; width: the power of two that holds
    it. largest: 0, or the largest number of a quantised cache, into which k and v go times their
    factors.
    """
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * block + tl.arange(0, block))[:, None]
    columns = tl.arange(0, width)[None, :]
    rotated = num_heads + num_kv_heads
    in_half = columns < half
    inside = (heads < rotated + num_kv_heads) & in_half
    is_query = inside & (heads < num_heads)
    is_key = inside & (heads >= num_heads) & (heads < rotated)
    is_value = inside & (heads >= rotated)
    if NORMED:
        # No kernel writes weights: they are loaded while the kernel before still runs.
        of_query = heads < num_heads
        q_low = tl.load(q_weight + columns, mask=in_half, other=0.0)
        q_high = tl.load(q_weight + half + columns, mask=in_half, other=0.0)
        k_low = tl.load(k_weight + columns, mask=in_half, other=0.0)
        k_high = tl.load(k_weight + half + columns, mask=in_half, other=0.0)
        low_factors = tl.where(of_query, q_low, k_low)
        high_factors = tl.where(of_query, q_high, k_high)
        eps = tl.where(of_query, q_eps, k_eps)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()

    # Both parts of a head are loaded before either is stored: each is needed for the other.
    queries = q + token * q_stride + heads * 2 * half + columns
    own_keys = k + token * k_stride + (heads - num_heads) * 2 * half + columns
    own_values = v + token * v_stride + (heads - rotated) * 2 * half + columns
    raw_low = _of_parts(queries, own_keys, own_values, is_query, is_key, is_value)
    raw_high = _of_parts(
        queries + half, own_keys + half, own_values + half, is_query, is_key, is_value
    )
    low, high = raw_low.to(tl.float32), raw_high.to(tl.float32)
    if NORMED:
        mean = tl.sum(low * low + high * high, axis=1, keep_dims=True) / (2 * half)
        factor = tl.rsqrt(mean + eps)
        # Rounded, as the norm's own output is.
        low = (low * factor * low_factors).to(raw_low.dtype).to(tl.float32)
        high = (high * factor * high_factors).to(raw_low.dtype).to(tl.float32)
    angle = token * 2 * half + columns
    cos_low = tl.load(cos + angle, mask=in_half, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + angle + half, mask=in_half, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + angle, mask=in_half, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + angle + half, mask=in_half, other=0.0).to(tl.float32)
    new_low = (low * cos_low + high * sin_low).to(raw_low.dtype)
    new_high = (high * cos_high + low * sin_high).to(raw_low.dtype)

    # k and v are read from the cache.
    query = out + token * out_stride + heads * 2 * half + columns
    tl.store(query, new_low, mask=is_query)
    tl.store(query + half, new_high, mask=is_query)
    if largest:
        new_low = _clamped(new_low, key_factor, largest, clamped, is_key)
        new_high = _clamped(new_high, key_factor, largest, clamped, is_key)
        raw_low = _clamped(raw_low, value_factor, largest, clamped + 1, is_value)
        raw_high = _clamped(raw_high, value_factor, largest, clamped + 1, is_value)
    cached = tl.load(slots + token) * num_kv_heads * 2 * half + columns
    key = cached + (heads - num_heads) * 2 * half
    tl.store(keys + key, new_low.to(keys.dtype.element_ty), mask=is_key)
    tl.store(keys + key + half, new_high.to(keys.dtype.element_ty), mask=is_key)
    value = cached + (heads - rotated) * 2 * half
    tl.store(values + value, raw_low.to(values.dtype.element_ty), mask=is_value)
    tl.store(values + value + half, raw_high.to(values.dtype.element_ty), mask=is_value)


@triton.jit  # type: ignore[untyped-decorator]
def _angles(
    positions: "Pointer", frequencies: "Pointer",
    cos: "Pointer", sin: "Pointer",
    scale: float, half: tl.constexpr, width: tl.constexpr, per_set: tl.constexpr,
) -> None:
    """One token's cosines and sines, as `angles`; width: the power of two that holds half.

    per_set: position p by the frequencies of set s is encoded as p + s * per_set.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, width)
    inside = columns < half
    encoded = tl.load(positions + token)
    frequencies += encoded // per_set * half
    # In float32 before the product, as transformers does; far positions would differ otherwise.
    position = (encoded % per_set).to(tl.float32)
    angle = position * tl.load(frequencies + columns, mask=inside, other=0.0)
    out = token * 2 * half + columns
    cosine = (tl.cos(angle) * scale).to(cos.dtype.element_ty)
    sine = (tl.sin(angle) * scale).to(sin.dtype.element_ty)
    tl.store(cos + out, cosine, mask=inside)
    tl.store(cos + out + half, cosine, mask=inside)
    tl.store(sin + out, -sine, mask=inside)
    tl.store(sin + out + half, sine, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _best_of_part(
    logits: "Pointer",
    values: "Pointer",
    ids: "Pointer",
    vocab: "Any",
    stride: "Any",
    width: tl.constexpr,
) -> None:
    """The argmax and its value over one part of a row, `width` columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * width + tl.arange(0, width)
    # A row alone gives too few programs for a vocabulary of 128k: its columns are cut into parts.
    found = tl.load(logits + row * stride + columns, mask=columns < vocab, other=-float("inf"))
    value, at = tl.max(found.to(tl.float32), axis=0, return_indices=True)
    out = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(values + out, value)
    tl.store(ids + out, tl.program_id(1) * width + at)


@triton.jit  # type: ignore[untyped-decorator]
def _best_of_parts(
    values: "Pointer", ids: "Pointer", best: "Pointer", parts: "Any", width: tl.constexpr
) -> None:
    """The argmax over a row's parts, the first of equals.

    width: the power of two that holds the parts.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, width)
    found = tl.load(values + row * parts + part, mask=part < parts, other=-float("inf"))
    at = tl.argmax(found, axis=0)
    tl.store(best + row, tl.load(ids + row * parts + at).to(tl.int64))


# fmt: on
_LAUNCH_ROTATE_AND_STORE = Launcher(_rotate_and_store)


def rotate_and_store(
    parts: Sequence[Tensor],
    angles: tuple[Tensor, Tensor],
    cache: LayerCache,
    slots: Tensor,
    norms: HeadNorms | None = None,
    overwrites: bool = False,
) -> Tensor:
    """q' = q cos + swap(q) sin, swap exchanging a head's two parts; returns q'.

    k' is computed alike and stored in the cache with v, at `slots`, as LayerCache.store does.
    parts: q, k, v [tokens, heads or kv_heads, head_dim], whole heads behind each other. norms: of
    each head of q and of k before the rotation. overwrites: whether q' overwrites q.
    """
    q, k, v = parts
    (tokens, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    out = q if overwrites else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    # A single token's stride means nothing.
    strides = [0 if tokens == 1 else each.stride(0) for each in (q, k, v, out)]
    weights, eps = ((q, q), (0.0, 0.0)) if norms is None else (norms.weights, norms.eps)
    half, all_heads = head_dim // 2, num_heads + 2 * num_kv_heads
    width = triton.next_power_of_2(half)
    block = max(HEADS_PER_PROGRAM, NUMBERS_PER_PROGRAM // width)
    dependent = has_dependent_launch(q.device)
    # `aligned` of all pointers is in the key: caches of other layers may begin elsewhere.
    pointers = (*weights, *angles, cache.keys, cache.values, slots, cache.clamped)
    shape = (num_heads, num_kv_heads, half, q.dtype, angles[0].dtype, cache.keys.dtype)
    divisible = tuple(stride % 16 == 0 for stride in strides)
    _LAUNCH_ROTATE_AND_STORE(
        (*shape, divisible, norms is None, q.device, aligned(q, k, v, out, *pointers)),
        (tokens, -(-all_heads // block)),
        (q, k, v, out, *strides, *pointers, *eps, 1 / cache.scales.keys, 1 / cache.scales.values),
        {
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "half": half,
            "width": width,
            "block": block,
            "largest": int(FP8_MAX) if cache.quantised else 0,
            "NORMED": norms is not None,
            "PDL": dependent,
        },
        {"num_warps": 4, **launch_options(dependent)},
    )
    return out


def angles(
    positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(scale cos(p f), scale sin(p f)), each twice side by side, the first sin negated."""
    tokens, half = positions.shape[0], frequencies.shape[1]
    cos, sin = torch.empty(2, tokens, 1, 2 * half, dtype=dtype, device=positions.device)
    width = triton.next_power_of_2(half)
    sizes = {"half": half, "width": width, "per_set": POSITIONS_PER_SET}
    _angles[(tokens,)](positions, frequencies, cos, sin, scale, **sizes, num_warps=1)
    return cos, sin


def best(logits: Tensor) -> Tensor:
    """argmax_v logits[t, v] in two launches: over parts of the columns, then over the parts."""
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, BEST_COLUMNS)
    values = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    found = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _best_of_part[(rows, parts)](logits, values, ids, vocab, logits.stride(0), width=BEST_COLUMNS)
    _best_of_parts[(rows,)](values, ids, found, parts, width=triton.next_power_of_2(parts))
    return found

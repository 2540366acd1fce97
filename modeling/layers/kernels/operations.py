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
from modeling.layers.angles import Angles
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
def _pairs(
    half: tl.constexpr, rotated: tl.constexpr, neighbours: tl.constexpr, columns: "Any"
) -> "Any":
    """Where both numbers of a head's pairs are; the first `rotated` pairs lie in front."""
    first, second = columns, half + columns
    if neighbours:
        first, second = 2 * columns, 2 * columns + 1
    elif rotated < half:
        turned = columns < rotated
        first = tl.where(turned, columns, rotated + columns)
        second = tl.where(turned, rotated, half) + columns
    return first, second


@triton.jit  # type: ignore[untyped-decorator]
def _put(
    at: "Pointer", low: "Any", high: "Any", mask: "Any",
    first: "Any", second: "Any", in_half: "Any",
    half: tl.constexpr, width: tl.constexpr, neighbours: tl.constexpr,
) -> None:
    """Store both numbers of pairs of the heads at `at`, those of `mask`."""
    low, high = low.to(at.dtype.element_ty), high.to(at.dtype.element_ty)
    if neighbours:
        # Each of the two alone would write every other number, which takes many times as long.
        both = tl.reshape(tl.join(low, high), [low.shape[0], 2 * width])
        whole = tl.arange(0, 2 * width)[None, :]
        tl.store(at + whole, both, mask=mask & (whole < 2 * half))
    else:
        tl.store(at + first, low, mask=mask & in_half)
        tl.store(at + second, high, mask=mask & in_half)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_and_store(
    q: "Pointer", k: "Pointer", v: "Pointer", out: "Pointer",
    q_stride: "Any", k_stride: "Any", v_stride: "Any", out_stride: "Any",
    q_weight: "Pointer", k_weight: "Pointer", v_weight: "Pointer",
    cos: "Pointer", sin: "Pointer",
    keys: "Pointer", values: "Pointer", slots: "Pointer", clamped: "Pointer",
    q_eps: float, k_eps: float, v_eps: float, key_factor: float, value_factor: float,
    num_heads: tl.constexpr, num_kv_heads: tl.constexpr, half: tl.constexpr, width: tl.constexpr,
    rotated: tl.constexpr, neighbours: tl.constexpr,
    block: tl.constexpr, largest: tl.constexpr,
    normed: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """A few heads of one token: the rotation of q goes to out; k's, and v, go to the cache.

    Of the pair (a, b): a' = a cos + b sin, b' = b cos' + a sin', sines with the rotation's signs.
    half: of a head; width: the power of two that holds it. rotated: of its pairs, the first ones.
    normed: how many of q, k and v have norms of their heads. num_kv_heads: 0 if q is alone.
    largest: 0, or the largest number of a quantised cache, into which k and v go times their
    factors.
    """
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * block + tl.arange(0, block))[:, None]
    columns = tl.arange(0, width)[None, :]
    keys_end = num_heads + num_kv_heads
    in_half = columns < half
    of_query = heads < num_heads
    of_key = (heads >= num_heads) & (heads < keys_end)
    of_value = (heads >= keys_end) & (heads < keys_end + num_kv_heads)
    first, second = _pairs(half, rotated, neighbours, columns)
    if normed:
        # No kernel writes weights: they are loaded while the kernel before still runs.
        low_factors = tl.load(q_weight + first, mask=in_half, other=0.0)
        high_factors = tl.load(q_weight + second, mask=in_half, other=0.0)
        k_low = tl.load(k_weight + first, mask=in_half, other=0.0)
        k_high = tl.load(k_weight + second, mask=in_half, other=0.0)
        low_factors = tl.where(of_query, low_factors, k_low)
        high_factors = tl.where(of_query, high_factors, k_high)
        eps = tl.where(of_query, q_eps, k_eps)
        if normed > 2:
            v_low = tl.load(v_weight + first, mask=in_half, other=0.0)
            v_high = tl.load(v_weight + second, mask=in_half, other=0.0)
            low_factors = tl.where(of_value, v_low, low_factors)
            high_factors = tl.where(of_value, v_high, high_factors)
            eps = tl.where(of_value, v_eps, eps)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()

    # Both parts of a head are loaded before either is stored: each is needed for the other.
    queries = q + token * q_stride + heads * 2 * half
    own_keys = k + token * k_stride + (heads - num_heads) * 2 * half
    own_values = v + token * v_stride + (heads - keys_end) * 2 * half
    if neighbours:
        whole = tl.arange(0, 2 * width)[None, :]
        known = whole < 2 * half
        both = _of_parts(
            queries + whole, own_keys + whole, own_values + whole,
            of_query & known, of_key & known, of_value & known,
        )
        raw_low, raw_high = tl.split(tl.reshape(both, [block, width, 2]))
    else:
        is_query, is_key, is_value = of_query & in_half, of_key & in_half, of_value & in_half
        raw_low = _of_parts(
            queries + first, own_keys + first, own_values + first, is_query, is_key, is_value
        )
        raw_high = _of_parts(
            queries + second, own_keys + second, own_values + second, is_query, is_key, is_value
        )
    low, high = raw_low.to(tl.float32), raw_high.to(tl.float32)
    if normed:
        mean = tl.sum(low * low + high * high, axis=1, keep_dims=True) / (2 * half)
        factor = tl.rsqrt(mean + eps)
        # Rounded, as the norm's own output is.
        rounded_low = (low * factor * low_factors).to(raw_low.dtype)
        rounded_high = (high * factor * high_factors).to(raw_low.dtype)
        if normed > 2:
            raw_low, raw_high = rounded_low, rounded_high
        low, high = rounded_low.to(tl.float32), rounded_high.to(tl.float32)
    if rotated:
        angle = token * 2 * rotated + columns
        turned = columns < rotated
        cos_low = tl.load(cos + angle, mask=turned, other=1.0).to(tl.float32)
        cos_high = tl.load(cos + angle + rotated, mask=turned, other=1.0).to(tl.float32)
        sin_low = tl.load(sin + angle, mask=turned, other=0.0).to(tl.float32)
        sin_high = tl.load(sin + angle + rotated, mask=turned, other=0.0).to(tl.float32)
        low, high = low * cos_low + high * sin_low, high * cos_high + low * sin_high
    new_low, new_high = low.to(raw_low.dtype), high.to(raw_low.dtype)

    # k and v are read from the cache.
    query = out + token * out_stride + heads * 2 * half
    _put(query, new_low, new_high, of_query, first, second, in_half, half, width, neighbours)
    if num_kv_heads:
        if largest:
            is_key, is_value = of_key & in_half, of_value & in_half
            new_low = _clamped(new_low, key_factor, largest, clamped, is_key)
            new_high = _clamped(new_high, key_factor, largest, clamped, is_key)
            raw_low = _clamped(raw_low, value_factor, largest, clamped + 1, is_value)
            raw_high = _clamped(raw_high, value_factor, largest, clamped + 1, is_value)
        cached = tl.load(slots + token) * num_kv_heads * 2 * half
        key = keys + cached + (heads - num_heads) * 2 * half
        _put(key, new_low, new_high, of_key, first, second, in_half, half, width, neighbours)
        value = values + cached + (heads - keys_end) * 2 * half
        _put(value, raw_low, raw_high, of_value, first, second, in_half, half, width, neighbours)


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
    angles: Angles | None,
    cache: LayerCache | None,
    slots: Tensor | None,
    norms: HeadNorms | None = None,
    overwrites: bool = False,
) -> Tensor:
    """q' = q cos + swap(q) sin, swap exchanging the numbers of pairs; returns q'.

    k' is computed alike and stored in the cache with v, at `slots`, as LayerCache.store does.
    parts: q, k, v [tokens, heads or kv_heads, head_dim], whole heads behind each other; q alone
    where cache and slots are None. angles: None where nothing is rotated. norms: of each head
    before the rotation. overwrites: whether q' overwrites q.
    """
    q, k, v = parts if len(parts) > 1 else (parts[0],) * 3
    (tokens, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1] if cache is not None else 0
    out = q if overwrites else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    # A single token's stride means nothing.
    strides = [0 if tokens == 1 else each.stride(0) for each in (q, k, v, out)]
    weights, eps = ((q,), (0.0,)) if norms is None else (norms.weights, norms.eps)
    weights, eps = (*weights, *weights[-1:] * 2)[:3], (*eps, *eps[-1:] * 2)[:3]
    half, all_heads = head_dim // 2, num_heads + 2 * num_kv_heads
    rotated = 0 if angles is None else angles.cos.shape[-1] // 2
    cos, sin = (q, q) if angles is None else angles[:2]
    stored = (q, q, q, q)
    if cache is not None and slots is not None:
        stored = (cache.keys, cache.values, slots, cache.clamped)
    factors = (1.0, 1.0) if cache is None else (1 / cache.scales.keys, 1 / cache.scales.values)
    width = triton.next_power_of_2(half)
    block = max(HEADS_PER_PROGRAM, NUMBERS_PER_PROGRAM // width)
    dependent = has_dependent_launch(q.device)
    # `aligned` of all pointers is in the key: caches of other layers may begin elsewhere.
    pointers = (*weights, cos, sin, *stored)
    form = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "half": half,
        "width": width,
        "rotated": rotated,
        "neighbours": angles is not None and angles.neighbours,
        "block": block,
        "largest": int(FP8_MAX) if cache is not None and cache.quantised else 0,
        "normed": 0 if norms is None else len(norms.weights),
        "PDL": dependent,
    }
    divisible = tuple(stride % 16 == 0 for stride in strides)
    types = (q.dtype, weights[0].dtype, cos.dtype, stored[0].dtype)
    _LAUNCH_ROTATE_AND_STORE(
        (*form.values(), types, divisible, q.device, aligned(q, k, v, out, *pointers)),
        (tokens, -(-all_heads // block)),
        (q, k, v, out, *strides, *pointers, *eps, *factors),
        form,
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

"""The layers' small operations in Triton: one read and one write of each tensor, one launch each.

All compute in float32 and round once where torch's own operations round after each. They are
programmatic dependent launches (PDL): each starts while the kernel before it ends, reads what
that one wrote only after `gdc_wait`, and lets the next one start.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from configs.architectures.rope import POSITIONS_PER_SET
from modeling.adapters.norm_rows import NO_WEIGHTS, OwnWeights
from modeling.attention.kv_cache import FP8_MAX, LayerCache
from modeling.triton_launch import Launcher, aligned, has_dependent_launch, launch_options

SILU_COLUMNS = 1024
HEADS_PER_PROGRAM = 4
BEST_COLUMNS = 4096
"""What one program computes."""

Pointer = Any

# Arguments are grouped by what they describe.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def _own_weight(
    factors: "Any", own: "Pointer", page: "Any", stride: "Any", columns: "Any", inside: "Any",
    plus: tl.constexpr,
) -> "Any":
    """An adapter's weight, where the token's adapter brings one; plus: what is added to it."""
    found = tl.load(own + page * stride + columns, mask=inside & (page >= 0), other=0.0)
    return tl.where(page >= 0, found.to(tl.float32) + plus, factors)


@triton.jit  # type: ignore[untyped-decorator]
def _add_rms_norm(
    x: "Pointer", residual: "Pointer", inner: "Pointer",
    weight: "Pointer", normed: "Pointer", total: "Pointer",
    pages: "Pointer", own: "Pointer", own_inner: "Pointer", own_stride: "Any",
    eps: float, inner_eps: float, size: tl.constexpr, width: tl.constexpr,
    has_residual: tl.constexpr, has_inner: tl.constexpr,
    has_pages: tl.constexpr, per_token: tl.constexpr,
    plus: tl.constexpr, inner_plus: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """normed = w * s / sqrt(mean(s^2) + eps), s = x + residual, of one row.

    width: the power of two that holds size. has_inner: s = norm(x) + residual, with inner as w.
    has_pages: w is that of an adapter where pages has one for the row's token.
    """
    if PDL:
        gdc_launch_dependents()
    start = tl.program_id(0).to(tl.int64) * size
    columns = tl.arange(0, width)
    inside = columns < size
    # No kernel writes weights: they are loaded while the kernel before still runs.
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if has_inner:
        inner_factors = tl.load(inner + columns, mask=inside, other=0.0).to(tl.float32)
    if has_pages:
        # No kernel of a step writes pages, nor the adapters that the step reads.
        page = tl.load(pages + tl.program_id(0) // per_token).to(tl.int64)
        factors = _own_weight(factors, own, page, own_stride, columns, inside, plus)
        if has_inner:
            inner_factors = _own_weight(
                inner_factors, own_inner, page, own_stride, columns, inside, inner_plus
            )
    if PDL:
        gdc_wait()
    values = tl.load(x + start + columns, mask=inside, other=0.0)
    if has_inner:
        wide = values.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + inner_eps)
        values = (wide * scale * inner_factors).to(values.dtype)
    if has_residual:
        before = tl.load(residual + start + columns, mask=inside, other=0.0)
        # The next layer reads the sum in the model's type, so the norm is that of the rounded sum.
        values = (values.to(tl.float32) + before.to(tl.float32)).to(values.dtype)
        tl.store(total + start + columns, values, mask=inside)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    tl.store(normed + start + columns, (wide * scale * factors).to(values.dtype), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul(
    gate_up: "Pointer",
    out: "Pointer",
    size: tl.constexpr,
    width: tl.constexpr,
    is_gelu: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """out = act(gate) * up, for `width` columns of one row.

    act: GELU in its tanh form if is_gelu, else SiLU.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * width + tl.arange(0, width)
    inside = columns < size
    gate = tl.load(gate_up + row * 2 * size + columns, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * size + size + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    inner = wide
    if is_gelu:
        # 0.5 (1 + tanh z) = sigmoid(2 z), z = sqrt(2 / pi) (x + 0.044715 x^3).
        inner = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    product = wide * tl.sigmoid(inner) * up.to(tl.float32)
    tl.store(out + row * size + columns, product.to(gate.dtype), mask=inside)


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
def _rotate_and_store(
    qkv: "Pointer",
    cos: "Pointer", sin: "Pointer",
    keys: "Pointer", values: "Pointer", slots: "Pointer", clamped: "Pointer",
    key_factor: float, value_factor: float,
    num_heads: tl.constexpr, num_kv_heads: tl.constexpr, half: tl.constexpr, width: tl.constexpr,
    block: tl.constexpr, largest: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A few heads of one token: q is overwritten with its rotation; k's, and v, go to the cache.

    q'[i] = q[i] cos[i] + q[(i + half) mod 2 half] sin[i], sin with the rotation's signs; k alike.
    half: of a head; width: the power of two that holds it. largest: 0, or the largest number of a
    quantised cache, into which k and v go times their factors.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * block + tl.arange(0, block))[:, None]
    columns = tl.arange(0, width)[None, :]
    rotated = num_heads + num_kv_heads
    inside = (heads < rotated + num_kv_heads) & (columns < half)
    is_query = inside & (heads < num_heads)
    is_key = inside & (heads >= num_heads) & (heads < rotated)
    is_value = inside & (heads >= rotated)

    # Both parts of a head are loaded before either is stored: each is needed for the other.
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

    # Only q goes back to the product; k and v are read from the cache.
    tl.store(source, new_low, mask=is_query)
    tl.store(source + half, new_high, mask=is_query)
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
_LAUNCH_ADD_RMS_NORM = Launcher(_add_rms_norm)
_LAUNCH_SILU_MUL = Launcher(_silu_mul)
_LAUNCH_ROTATE_AND_STORE = Launcher(_rotate_and_store)


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    inner: tuple[Tensor, float] | None = None,
    own: OwnWeights | None = None,
    own_inner: OwnWeights | None = None,
) -> tuple[Tensor, Tensor]:
    """y = w * s / sqrt(mean(s^2) + eps), s = x + residual; returns (y, s), both [rows, size].

    inner: the weight and eps of a norm of x before the sum, rounded to its type as always.
    own, own_inner: what replaces the weights for the rows of some tokens.
    """
    tokens, size = x.shape
    inner_weight, inner_eps = inner or (weight, 0.0)
    first, second = own or NO_WEIGHTS, own_inner or own or NO_WEIGHTS
    pages = weight if own is None else own.pages
    stored = (weight, weight) if own is None else (own.weights, second.weights)
    stride = 0 if own is None else own.weights.stride(0)
    per_token = 1 if own is None else tokens // len(pages)
    normed = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    added = x if residual is None else residual
    dependent = has_dependent_launch(x.device)
    # The key names all that Triton compiles the kernel for; see Launcher.
    _LAUNCH_ADD_RMS_NORM(
        (
            size,
            residual is None,
            inner is None,
            x.dtype,
            inner_weight.dtype,
            weight.dtype,
            x.device,
            aligned(x, added, inner_weight, weight),
            (per_token, first.plus, second.plus, stride, stored[0].dtype, aligned(pages, *stored))
            if own is not None
            else None,
        ),
        (tokens,),
        (x, added, inner_weight, weight, normed, total, pages, *stored, stride, eps, inner_eps),
        {
            "size": size,
            "width": triton.next_power_of_2(size),
            "has_residual": residual is not None,
            "has_inner": inner is not None,
            "has_pages": own is not None,
            "per_token": per_token,
            "plus": first.plus,
            "inner_plus": second.plus,
            "PDL": dependent,
        },
        {"num_warps": 8 if size > 1024 else 4, **launch_options(dependent)},
    )
    return normed, total


def silu_mul(gate_up: Tensor) -> Tensor:
    """y[t, j] = silu(g[t, j]) * u[t, j], g the first half of the columns, u the second."""
    return _gated_mul(gate_up, is_gelu=False)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """y[t, j] = gelu(g[t, j]) * u[t, j] by the tanh form, g and u as for `silu_mul`."""
    return _gated_mul(gate_up, is_gelu=True)


def _gated_mul(gate_up: Tensor, is_gelu: bool) -> Tensor:
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    dependent = has_dependent_launch(gate_up.device)
    _LAUNCH_SILU_MUL(
        (size, is_gelu, gate_up.dtype, gate_up.device, aligned(gate_up)),
        (tokens, -(-size // SILU_COLUMNS)),
        (gate_up, out),
        {"size": size, "width": SILU_COLUMNS, "is_gelu": is_gelu, "PDL": dependent},
        launch_options(dependent),
    )
    return out


def rotate_and_store(
    qkv: Tensor, num_heads: int, angles: tuple[Tensor, Tensor], cache: LayerCache, slots: Tensor
) -> Tensor:
    """q' = q cos + swap(q) sin, swap exchanging a head's two parts; overwrites q, which it returns.

    k' is computed alike and stored in the cache with v, at `slots`, as LayerCache.store does.
    qkv: [tokens, heads + 2 * kv_heads, head_dim]; returns q [tokens, heads, head_dim].
    """
    tokens, all_heads, head_dim = qkv.shape
    half = head_dim // 2
    dependent = has_dependent_launch(qkv.device)
    # `aligned` of all pointers is in the key: caches of other layers may begin elsewhere.
    pointers = (qkv, *angles, cache.keys, cache.values, slots, cache.clamped)
    shape = (all_heads, num_heads, half, qkv.dtype, angles[0].dtype, cache.keys.dtype)
    _LAUNCH_ROTATE_AND_STORE(
        (*shape, qkv.device, aligned(*pointers)),
        (tokens, -(-all_heads // HEADS_PER_PROGRAM)),
        (*pointers, 1 / cache.scales.keys, 1 / cache.scales.values),
        {
            "num_heads": num_heads,
            "num_kv_heads": (all_heads - num_heads) // 2,
            "half": half,
            "width": triton.next_power_of_2(half),
            "block": HEADS_PER_PROGRAM,
            "largest": int(FP8_MAX) if cache.quantised else 0,
            "PDL": dependent,
        },
        {"num_warps": 4, **launch_options(dependent)},
    )
    return qkv[:, :num_heads]


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

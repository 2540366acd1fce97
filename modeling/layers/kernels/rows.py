"""Norms and gated products of rows in Triton, in fp8 or int8 too where a product reads them so.

They compute and are launched as `modeling.layers.kernels.operations` says.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modeling.adapters.norm_rows import NO_WEIGHTS, OwnWeights
from modeling.kernels.launch import Launcher, aligned, has_dependent_launch, launch_options
from modeling.kernels.tiles import store_codes
from modeling.layers.kernels.ranks import meet, sum_of_ranks, table
from modeling.quantisation.activations import FP8, range_of
from sharding.group import Summand

SILU_COLUMNS = 1024
"""What one program computes."""

Rounded = tuple[Tensor, Tensor]

Pointer = Any

# Arguments are grouped by what they describe.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def _store_rounded(
    x: "Any", codes: "Any", scales: "Any", inside: "Any", most: float, smallest: float
) -> None:
    """Store a row of x in fp8 or int8, and its scale, as `quantisation.kernels.rounding.by_token`.

    x: 0 where it is not inside.
    """
    values = x.to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(values), axis=0), most)
    scale = tl.where(scale == 0, smallest, scale)
    store_codes(values, scale, most, codes, inside)
    tl.store(scales + tl.program_id(0), scale)


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
    weight: "Pointer", normed: "Pointer", total: "Pointer", codes: "Pointer", scales: "Pointer",
    pages: "Pointer", own: "Pointer", own_inner: "Pointer", own_stride: "Any",
    peers: "Pointer",
    eps: float, inner_eps: float, most: float, smallest: float,
    factor: float, total_factor: float,
    size: tl.constexpr, width: tl.constexpr,
    has_residual: tl.constexpr, has_inner: tl.constexpr, has_outer: tl.constexpr,
    has_factor: tl.constexpr, has_total_factor: tl.constexpr, rounds: tl.constexpr,
    has_pages: tl.constexpr, per_token: tl.constexpr,
    plus: tl.constexpr, inner_plus: tl.constexpr,
    rank: tl.constexpr, ranks: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """normed = w * s / sqrt(mean(s^2) + eps), s = x + residual, of one row.

    ranks: if more than one, x is this rank's summand, and s = sum of x over ranks + residual.

    width: the power of two that holds size. has_inner: s = norm(x) + residual, with inner as w.
    has_factor: what is added to the residual is multiplied by factor before. has_total_factor: s
    is the sum times total_factor. has_outer: if not, s alone is computed.
    has_pages: w is that of an adapter where pages has one for the row's token. rounds: codes and
    scales are normed in fp8 or int8.
    """
    if PDL:
        gdc_launch_dependents()
    start = tl.program_id(0).to(tl.int64) * size
    columns = tl.arange(0, width)
    inside = columns < size
    # No kernel writes weights: they are loaded while the kernel before still runs.
    if has_outer:
        factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if has_inner:
        inner_factors = tl.load(inner + columns, mask=inside, other=0.0).to(tl.float32)
    if has_pages:
        # No kernel of a step writes pages, nor the adapters that the step reads.
        page = tl.load(pages + tl.program_id(0) // per_token).to(tl.int64)
        if has_outer:
            factors = _own_weight(factors, own, page, own_stride, columns, inside, plus)
        if has_inner:
            inner_factors = _own_weight(
                inner_factors, own_inner, page, own_stride, columns, inside, inner_plus
            )
    if ranks > 1:
        summands = table(peers, ranks)
        flags = table(peers + ranks, ranks)
    if PDL:
        gdc_wait()
    if has_residual:
        before = tl.load(residual + start + columns, mask=inside, other=0.0)
    if ranks > 1:
        # Behind the wait, for only then is this rank's summand written.
        meet(flags, rank, ranks)
        values = sum_of_ranks(summands, x.dtype.element_ty, start + columns, inside, ranks)
    else:
        values = tl.load(x + start + columns, mask=inside, other=0.0)
    if has_inner:
        wide = values.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + inner_eps)
        values = (wide * scale * inner_factors).to(values.dtype)
    if has_factor:
        values = (values.to(tl.float32) * factor).to(values.dtype)
    if has_residual:
        # The next layer reads the sum in the model's type, so the norm is that of the rounded sum.
        values = (values.to(tl.float32) + before.to(tl.float32)).to(values.dtype)
    if has_total_factor:
        values = (values.to(tl.float32) * total_factor).to(values.dtype)
    if has_residual or ranks > 1:
        tl.store(total + start + columns, values, mask=inside)
    if has_outer:
        wide = values.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
        found = (wide * scale * factors).to(values.dtype)
        tl.store(normed + start + columns, found, mask=inside)
        if rounds:
            _store_rounded(found, codes + start + columns, scales, inside, most, smallest)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul(
    gates: "Pointer", ups: "Pointer", out: "Pointer", codes: "Pointer", scales: "Pointer",
    most: float, smallest: float,
    gate_stride: tl.constexpr, up_stride: tl.constexpr, first_up: tl.constexpr,
    size: tl.constexpr, width: tl.constexpr,
    is_gelu: tl.constexpr, rounds: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """out = act(gate) * up, for `width` columns of one row.

    gate_stride, up_stride: from row to row. first_up: 0, or the first column of up where gates has
    both. act: GELU in its tanh form if is_gelu, else SiLU. rounds: codes and scales are out in 8
    bits; the columns are then the whole row.
    """
    if first_up:
        # The compiler is to see one pointer.
        ups = gates
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * width + tl.arange(0, width)
    inside = columns < size
    gate = tl.load(gates + row * gate_stride + columns, mask=inside, other=0.0)
    up = tl.load(ups + row * up_stride + first_up + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    inner = wide
    if is_gelu:
        # 0.5 (1 + tanh z) = sigmoid(2 z), z = sqrt(2 / pi) (x + 0.044715 x^3).
        inner = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    product = wide * tl.sigmoid(inner) * up.to(tl.float32)
    found = product.to(gate.dtype)
    tl.store(out + row * size + columns, found, mask=inside)
    if rounds:
        _store_rounded(found, codes + row * size + columns, scales, inside, most, smallest)


# fmt: on
_LAUNCH_ADD_RMS_NORM = Launcher(_add_rms_norm)
_LAUNCH_SILU_MUL = Launcher(_silu_mul)


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    inner: tuple[Tensor, float] | None = None,
    own: OwnWeights | None = None,
    own_inner: OwnWeights | None = None,
    rounded: Rounded | None = None,
    summand: Summand | None = None,
    factor: float = 1.0,
    total_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """y = w * s / sqrt(mean(s^2) + eps), s = x + residual; returns (y, s), both [rows, size].

    weight: None: no norm is computed, and y is s. inner: the weight and eps of a norm of x before
    the sum, rounded to its type as always. factor: of x, or of its norm, before the sum;
    total_factor: of the sum. Both round to x's type too, and take a residual.
    own, own_inner: what replaces the weights for the rows of some tokens. rounded: where y is
    written in codes of 8 bits too. summand: the one that x is part of, if it is: x stands for its
    sum over ranks then, which is rounded as `all_reduce` rounds; all ranks make the same calls in
    one order.
    """
    assert residual is not None or factor == total_factor == 1.0, "a factor of no sum"
    tokens, size = x.shape
    outer_weight = x if weight is None else weight
    inner_weight, inner_eps = inner or (outer_weight, 0.0)
    first, second = own or own_inner or NO_WEIGHTS, own_inner or own or NO_WEIGHTS
    has_own = first is not NO_WEIGHTS
    pages, *stored = (first.pages, first.weights, second.weights) if has_own else [outer_weight] * 3
    stride = first.weights.stride(0) if has_own else 0
    per_token = tokens // len(pages) if has_own else 1
    total = x if residual is None and summand is None else torch.empty_like(x)
    normed = total if weight is None else torch.empty_like(x)
    rank, ranks = (0, 1) if summand is None else (summand.group.rank, summand.group.size)
    peers = outer_weight if summand is None else summand.peers
    added = x if residual is None else residual
    dependent = has_dependent_launch(x.device)
    codes, scales = rounded or (normed, normed)
    kind = rounded and codes.dtype
    # The key names all that Triton compiles the kernel for; see Launcher.
    _LAUNCH_ADD_RMS_NORM(
        (
            size,
            residual is None,
            inner is None,
            weight is None,
            factor == 1.0,
            total_factor == 1.0,
            kind,
            x.dtype,
            inner_weight.dtype,
            outer_weight.dtype,
            x.device,
            ranks,
            aligned(x, added, inner_weight, outer_weight, codes, scales),
            (per_token, first.plus, second.plus, stride, stored[0].dtype, aligned(pages, *stored))
            if has_own
            else None,
        ),
        (tokens,),
        (x, added, inner_weight, outer_weight, normed, total, codes, scales, pages, *stored, stride,
         peers, eps, inner_eps, *range_of(kind or FP8), factor, total_factor),
        {
            "size": size,
            "width": triton.next_power_of_2(size),
            "has_residual": residual is not None,
            "has_inner": inner is not None,
            "has_outer": weight is not None,
            "has_factor": factor != 1.0,
            "has_total_factor": total_factor != 1.0,
            "rounds": rounded is not None,
            "has_pages": has_own,
            "per_token": per_token,
            "plus": first.plus,
            "inner_plus": second.plus,
            "rank": rank,
            "ranks": ranks,
            "PDL": dependent,
        },
        {"num_warps": 8 if size > 1024 else 4, **launch_options(dependent)},
    )  # fmt: skip
    return normed, total


def silu_mul(gate_up: Tensor, rounded: Rounded | None = None) -> Tensor:
    """y[t, j] = silu(g[t, j]) * u[t, j], g the first half of the columns, u the second.

    rounded: where y is written in codes of 8 bits too.
    """
    size = gate_up.shape[1] // 2
    return _gated_mul(gate_up, gate_up, size, size, is_gelu=False, rounded=rounded)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """y[t, j] = gelu(g[t, j]) * u[t, j] by the tanh form, g and u as for `silu_mul`."""
    size = gate_up.shape[1] // 2
    return _gated_mul(gate_up, gate_up, size, size, is_gelu=True)


def gated_mul(gate: Tensor, up: Tensor, is_gelu: bool) -> Tensor:
    """y = act(gate) * up, both [tokens, n], with rows that may be far from each other.

    act: GELU in its tanh form if is_gelu, else SiLU.
    """
    return _gated_mul(gate, up, gate.shape[1], 0, is_gelu)


def _gated_mul(
    gate: Tensor,
    up: Tensor,
    size: int,
    first_up: int,
    is_gelu: bool,
    rounded: Rounded | None = None,
) -> Tensor:
    """first_up: 0, or the first column of up where gate is the same tensor."""
    tokens = len(gate)
    out = torch.empty(tokens, size, dtype=gate.dtype, device=gate.device)
    dependent = has_dependent_launch(gate.device)
    codes, scales = rounded or (out, out)
    kind = rounded and codes.dtype
    # A row's scale is that of all its columns, so one program takes them.
    width = SILU_COLUMNS if rounded is None else triton.next_power_of_2(size)
    strides = gate.stride(0), up.stride(0), first_up
    _LAUNCH_SILU_MUL(
        (size, *strides, is_gelu, kind, gate.dtype, up.dtype, gate.device,
         aligned(gate, out, codes, scales), aligned(up)),
        (tokens, -(-size // width)),
        (gate, up, out, codes, scales, *range_of(kind or FP8)),
        {"gate_stride": strides[0], "up_stride": strides[1], "first_up": first_up,
         "size": size, "width": width, "is_gelu": is_gelu, "rounds": rounded is not None,
         "PDL": dependent},
        {"num_warps": min(16, max(4, width // 512)), **launch_options(dependent)},
    )  # fmt: skip
    return out

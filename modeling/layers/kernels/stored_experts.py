"""Experts kept as a checkpoint stored them, in Triton: codes of 4 bits or 8.

As in experts.py, a table has the pairs of each expert, and a program reads a tile of one
expert's weights once for many pairs. Here for any number of tokens: numbers are made of a tile
where it is multiplied, so no expert is ever expanded. How they are read: fp4_experts.py,
integer_experts.py, scaled_experts.py.
Adapters' deltas are of x and of inner columns before those are rounded.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modeling.kernels.launch import Launcher, aligned, has_dependent_launch, launch_options
from modeling.layers.kernels.expert_deltas import LayerDeltas, enter_pairs, sum_pairs
from modeling.layers.kernels.fp4_experts import of_fp4
from modeling.layers.kernels.integer_experts import of_integers
from modeling.layers.kernels.scaled_experts import of_blocks, of_outputs
from modeling.layers.kernels.stored_pairs import FEW_TOKENS, experts_by_pair, gated
from modeling.layers.kernels.stored_weights import Gate, StoredCut, StoredWeight
from modeling.quantisation.activations import BLOCK
from modeling.quantisation.kernels.rounding import by_group, by_token, to_fp4

# Arguments are grouped by what they describe.
# fmt: off


@triton.jit(do_not_specialize=["num_x", "num_tokens"])  # type: ignore[untyped-decorator]
def _up(
    x: "Any", x_scales: "Any", num_x: "Any",
    codes: "Any", scales: "Any", outer: "Any", zeros: "Any", order: "Any", bias: "Any",
    inner: "Any", counts: "Any", table: "Any", deltas: "Any", num_tokens: "Any",
    limit: "Any", alpha: "Any",
    INPUTS: tl.constexpr, WIDTH: tl.constexpr, ACTIVE: tl.constexpr, SHARED: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_BIAS: tl.constexpr, INTERLEAVED: tl.constexpr, CLAMPED: tl.constexpr, DELTAS: tl.constexpr,
    BY_BLOCK: tl.constexpr, BY_OUTPUT: tl.constexpr, ROUNDED: tl.constexpr,
    IS_NVFP4: tl.constexpr,
    GROUP: tl.constexpr, MIDDLE: tl.constexpr, HAS_ZEROS: tl.constexpr, ORDERED: tl.constexpr,
    RAISED: tl.constexpr,
    ASM0: tl.constexpr, ASM1: tl.constexpr, ASM2: tl.constexpr, ASM3: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One block of an expert's inner columns for up to PAIRS of its pairs.

    SHARED: pairs of a row of x: ACTIVE, or 1 where x is rounded for each expert by itself.
    deltas: float32 [pairs, 2 * WIDTH] where INTERLEAVED, else [2, pairs, WIDTH].
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    first = tl.program_id(0) * PAIRS
    expert = tl.program_id(2).to(tl.int64)
    count = tl.load(counts + expert)
    if first < count:
        m = first + tl.arange(0, PAIRS)
        live = m < count
        pair = tl.load(table + expert * num_tokens + m, mask=live, other=0).to(tl.int64)
        # Gate and up of a column are neighbours among the rows of the product.
        r = tl.arange(0, 2 * BLOCK_N)
        column = tl.program_id(1) * BLOCK_N + r // 2
        row = 2 * column + r % 2 if INTERLEAVED else r % 2 * WIDTH + column
        at = pair // SHARED
        if BY_BLOCK:
            acc = of_blocks(
                x, x_scales, num_x, codes, scales, expert, row, at, live,
                2 * WIDTH, INPUTS, 2 * BLOCK_N, PAIRS,
            )
        elif BY_OUTPUT:
            acc = of_outputs(
                x, x_scales, codes, scales, expert, row, at, live,
                2 * WIDTH, INPUTS, 2 * BLOCK_N, PAIRS, ROUNDED,
            )
        elif GROUP > 0:
            acc = of_integers(
                x, codes, scales, zeros, order, expert, row, at, live,
                2 * WIDTH, INPUTS, 2 * BLOCK_N, PAIRS, GROUP, MIDDLE, HAS_ZEROS, ORDERED, RAISED,
                ASM0, ASM1, ASM2, ASM3,
            )
        else:
            acc = of_fp4(
                x, codes, scales, outer, expert, row, at, live,
                2 * WIDTH, INPUTS, 2 * BLOCK_N, PAIRS, IS_NVFP4, ASM0, ASM1, ASM2, ASM3,
            )
        if HAS_BIAS:
            acc += tl.load(bias + expert * (2 * WIDTH) + row).to(tl.float32)[:, None]
        if DELTAS:
            if INTERLEAVED:
                own = deltas + pair[None, :] * (2 * WIDTH) + row[:, None]
            else:
                half = (r % 2).to(tl.int64) * num_tokens * (ACTIVE * WIDTH)
                own = deltas + pair[None, :] * WIDTH + (half + column)[:, None]
            acc += tl.load(own, mask=live[None, :], other=0.0)
        gate, up = tl.split(tl.permute(tl.reshape(acc, [BLOCK_N, 2, PAIRS]), [0, 2, 1]))
        value = gated(gate, up, limit, alpha, CLAMPED)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        out = inner + pair[None, :] * WIDTH + n[:, None]
        tl.store(out, value.to(inner.dtype.element_ty), mask=live[None, :])


@triton.jit(do_not_specialize=["num_x", "num_tokens"])  # type: ignore[untyped-decorator]
def _down(
    x: "Any", x_scales: "Any", num_x: "Any",
    codes: "Any", scales: "Any", outer: "Any", zeros: "Any", order: "Any", bias: "Any",
    shares: "Any", out: "Any", counts: "Any", table: "Any", num_tokens: "Any",
    INPUTS: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr,
    BY_BLOCK: tl.constexpr, BY_OUTPUT: tl.constexpr, ROUNDED: tl.constexpr,
    IS_NVFP4: tl.constexpr,
    GROUP: tl.constexpr, MIDDLE: tl.constexpr, HAS_ZEROS: tl.constexpr, ORDERED: tl.constexpr,
    RAISED: tl.constexpr,
    ASM0: tl.constexpr, ASM1: tl.constexpr, ASM2: tl.constexpr, ASM3: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One block of an expert's outputs for up to PAIRS of its pairs, by the pairs' weights."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    first = tl.program_id(0) * PAIRS
    expert = tl.program_id(2).to(tl.int64)
    count = tl.load(counts + expert)
    if first < count:
        m = first + tl.arange(0, PAIRS)
        live = m < count
        pair = tl.load(table + expert * num_tokens + m, mask=live, other=0).to(tl.int64)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        if BY_BLOCK:
            acc = of_blocks(
                x, x_scales, num_x, codes, scales, expert, n, pair, live,
                WIDTH, INPUTS, BLOCK_N, PAIRS,
            )
        elif BY_OUTPUT:
            acc = of_outputs(
                x, x_scales, codes, scales, expert, n, pair, live,
                WIDTH, INPUTS, BLOCK_N, PAIRS, ROUNDED,
            )
        elif GROUP > 0:
            acc = of_integers(
                x, codes, scales, zeros, order, expert, n, pair, live,
                WIDTH, INPUTS, BLOCK_N, PAIRS, GROUP, MIDDLE, HAS_ZEROS, ORDERED, RAISED,
                ASM0, ASM1, ASM2, ASM3,
            )
        else:
            acc = of_fp4(
                x, codes, scales, outer, expert, n, pair, live,
                WIDTH, INPUTS, BLOCK_N, PAIRS, IS_NVFP4, ASM0, ASM1, ASM2, ASM3,
            )
        if HAS_BIAS:
            acc += tl.load(bias + expert * WIDTH + n).to(tl.float32)[:, None]
        acc *= tl.load(shares + pair, mask=live, other=0.0).to(tl.float32)[None, :]
        tl.store(
            out + pair[None, :] * WIDTH + n[:, None], acc.to(out.dtype.element_ty),
            mask=live[None, :],
        )


# fmt: on

_UP, _DOWN = Launcher(_up), Launcher(_down)


def stored_experts(
    x: Tensor,
    up: StoredWeight,
    down: StoredWeight,
    gate: Gate,
    ids: Tensor,
    shares: Tensor,
    counts: Tensor,
    deltas: LayerDeltas | None = None,
) -> Tensor:
    """[tokens, hidden] to the same shape.

    up: of 2 * inner outputs. ids, shares: [tokens, experts of one]. counts: int32 [experts] zeros,
    which it leaves as zeros. deltas: what adapters change.
    """
    (tokens, hidden), active, count = x.shape, ids.shape[1], len(up.codes)
    width = down.shape[1]
    if tokens <= FEW_TOKENS and up.is_by_pair and deltas is None:
        return experts_by_pair(x, up, down, gate, ids, shares)
    cut = _cut(tokens, hidden, width, up.cuts)
    table = torch.empty(count, tokens, dtype=torch.int32, device=x.device)
    inner = torch.empty(tokens * active, width, dtype=x.dtype, device=x.device)
    out = torch.empty(tokens * active, hidden, dtype=x.dtype, device=x.device)
    pdl = has_dependent_launch(x.device)
    common = (x.device, x.dtype, shares.dtype, ids.dtype, aligned(x, ids, shares))
    added = enter_pairs(x, ids, counts, table, deltas)
    sizes = {"INPUTS": hidden, "WIDTH": width, "ACTIVE": active}
    sizes |= {"SHARED": 1 if up.rounds_by_expert else active}
    sizes |= {"PAIRS": cut.pairs, "BLOCK_N": cut.up}
    clamped = gate.limit is not None
    form = {"INTERLEAVED": gate.interleaved, "CLAMPED": clamped, "DELTAS": deltas is not None}
    limits = gate.limit or 0.0, gate.alpha
    blocks = -(-tokens // cut.pairs)
    rest = [inner, counts, table, added, tokens, *limits]
    grid = (blocks, width // cut.up, count)
    _product(_UP, common, grid, x, ids, up, rest, sizes, form, cut, pdl)
    shrunk = None if deltas is None else deltas.shrink_down(inner, ids, count)
    sizes = {"INPUTS": width, "WIDTH": hidden, "PAIRS": cut.pairs, "BLOCK_N": cut.down}
    grid = (blocks, hidden // cut.down, count)
    rest = [shares, out, counts, table, tokens]
    _product(_DOWN, common, grid, inner, ids, down, rest, sizes, {}, cut, pdl)
    return sum_pairs(out, counts, ids, shares, deltas, shrunk)


def _product(
    launch: Launcher,
    common: Any,
    grid: tuple[int, int, int],
    x: Tensor,
    ids: Tensor,
    weight: StoredWeight,
    rest: Sequence[Any],
    sizes: dict[str, int],
    form: dict[str, bool],
    cut: StoredCut,
    pdl: bool,
) -> None:
    rows, inputs, scales = len(x), x, x
    experts = ids if weight.rounds_by_expert else None
    if weight.is_by_block:
        inputs, by_row = by_group(x, BLOCK)
        scales = by_row.t()
    elif weight.rounds and weight.is_by_output:
        inputs, scales = by_token(x, weight.input_scales, weight.codes.dtype, experts)
    elif weight.rounds:
        inputs = to_fp4(x, weight.size, weight.input_scales, experts)
    codes = weight.codes
    found = weight.outer, weight.zeros, weight.order, weight.bias
    beside = [codes if each is None else each for each in found]
    made, kinds = weight.form(x.dtype), (codes.dtype, beside[-1].dtype)
    constants = {**sizes, **form, **made, "PDL": pdl}
    launch(
        (common, cut, *sizes.values(), *form.values(), *made.values(), *kinds),
        *(grid, [inputs, scales, rows, codes, weight.scales, *beside, *rest], constants),
        {"num_warps": cut.warps, "num_stages": cut.stages, **launch_options(pdl)},
    )


@cache
def _cut(tokens: int, hidden: int, width: int, cuts: tuple[StoredCut, ...]) -> StoredCut:
    cut = next(each for each in cuts if tokens <= each.tokens)
    return replace(cut, up=gcd(cut.up, width), down=gcd(cut.down, hidden))

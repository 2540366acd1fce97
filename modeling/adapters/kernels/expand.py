"""The expand of the multi-adapter product: rank rows times B, added to the outputs.

    expand:  y[token(p), o + j] += c[j] y[token(p), o + j] + d[j] + sum_r s[p, r] * Bt[row(p, r), j]

c, d: rows of Bt that some adapters have (output_rows.py), 0 for the others. Tiles, records and
pools are those of the shrink (shrink.py), which leaves s.
"""

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modeling.adapters.kernels.shrink import (
    UNSPECIALIZED,
    of_target,
    pages_of,
    pool_rows,
)

# Arguments are grouped by what they describe; a line for each would hide the kernels.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def sums_of(
    partials: "Any", rows: "Any", live: "Any", r: "Any", rank: "Any", num_splits: "Any",
    split_stride: "Any",
    SPLITS: tl.constexpr, SUMMED: tl.constexpr,
) -> "Any":
    """s[r, p] of one target; rows: the positions' offsets in the first split's part."""
    if SUMMED:
        mask = (r < rank)[:, None] & live[None, :]
        return tl.load(partials + rows[None, :] + r[:, None], mask=mask, other=0.0)
    split = tl.arange(0, SPLITS)[:, None, None]
    at = split * split_stride + rows[None, None, :] + r[None, :, None]
    found = tl.load(partials + at, mask=live[None, None, :] & (split < num_splits), other=0.0)
    # Cut to the rank after the load: its mask is then the same along r, and the load is wide.
    return tl.where((r < rank)[:, None], tl.sum(found, axis=0), 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _expanded(bt: "Any", s: "Any", acc: "Any") -> "Any":
    """acc[j, p] + sum_r bt[r, j] s[r, p]; s keeps its precision as a sum of two in bt's type."""
    b = tl.trans(bt)
    if bt.dtype == tl.float32:
        acc = tl.dot(b, s, acc, input_precision="ieee")
    else:
        # Tensor cores multiply in bt's type: what rounding s takes away is multiplied too.
        high = s.to(bt.dtype)
        low = (s - high.to(tl.float32)).to(bt.dtype)
        acc = tl.dot(b, high, acc)
        acc = tl.dot(b, low, acc)
    return acc


@triton.jit  # type: ignore[untyped-decorator]
def _output_row(bt: "Any", row: "Any", layer: "Any", width: "Any", n: "Any") -> "Any":
    """Row `row` of layer 0, at another layer: columns n, [n, 1]; zeros where there is none."""
    at = (row.to(tl.int64) + layer * 8) * width
    found = tl.load(bt + at + n, mask=(n < width) & (row >= 0), other=0.0)
    return found.to(tl.float32)[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def _expand_tile(
    bt: "Any", table: "Any", rank: "Any", layer: "Any", width: "Any", n: "Any", live: "Any",
    out: "Any", scale_row: "Any", bias_row: "Any",
    partials: "Any", rows: "Any", num_splits: "Any", split_stride: "Any",
    TABLE_PAGES: tl.constexpr, LAYERS: tl.constexpr,
    MAX_RANK: tl.constexpr, SPLITS: tl.constexpr, SUMMED: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr, OUTPUTS: tl.constexpr,
) -> None:
    """out[j, p] += sum_r s[r, p] * Bt[r, n[j]], ROWS rank rows at once.

    OUTPUTS: of an adapter with output rows: out[j, p] += c[j] out[j, p] + d[j] too.
    """
    r = tl.arange(0, ROWS)
    # The first rows come while the shrink still runs.
    b_rows = pool_rows(bt, pages_of(table, r, TABLE_PAGES), layer, r, width, LAYERS)
    b_mask = (r < rank)[:, None] & (n < width)[None, :]
    b_tile = tl.load(b_rows[:, None] + n[None, :], mask=b_mask, other=0.0)
    if PDL:
        gdc_wait()
    if rank > 0:
        out_mask = live[None, :] & (n < width)[:, None]
        # Not before the wait: the base product, which wrote y, may be the kernel ahead.
        old = tl.load(out, mask=out_mask, other=0.0)
        s = sums_of(partials, rows, live, r, rank, num_splits, split_stride, SPLITS, SUMMED)
        zeros = tl.zeros([n.shape[0], live.shape[0]], dtype=tl.float32)
        acc = _expanded(b_tile, s, zeros)
        for _ in range(ROWS, tl.minimum(rank, MAX_RANK), ROWS):
            r += ROWS
            b_rows = pool_rows(bt, pages_of(table, r, TABLE_PAGES), layer, r, width, LAYERS)
            b_mask = (r < rank)[:, None] & (n < width)[None, :]
            b_tile = tl.load(b_rows[:, None] + n[None, :], mask=b_mask, other=0.0)
            s = sums_of(partials, rows, live, r, rank, num_splits, split_stride, SPLITS, SUMMED)
            acc = _expanded(b_tile, s, acc)
        # Added in float32, so that the delta is rounded once, with the sum.
        total = old.to(tl.float32)
        if OUTPUTS:
            scale = _output_row(bt, scale_row, layer, width, n)
            total += scale * total + _output_row(bt, bias_row, layer, width, n)
        tl.store(out, (total + acc).to(old.dtype), mask=out_mask)


@triton.jit(do_not_specialize=UNSPECIALIZED)  # type: ignore[untyped-decorator]
def expand_kernel(
    y: "Any", b0: "Any", b1: "Any", b2: "Any",
    records: "Any", page_table: "Any", ranks: "Any",
    partials: "Any", output_rows: "Any",
    projection0: "Any", projection1: "Any", projection2: "Any", layer: "Any",
    width0: "Any", width1: "Any", width2: "Any", offset0: "Any", offset1: "Any", offset2: "Any",
    y_stride: "Any", num_splits: "Any", positions: "Any",
    PROJECTIONS: tl.constexpr, TABLE_PAGES: tl.constexpr, TABLE_LAYERS: tl.constexpr,
    LAYERS: tl.constexpr,
    MAX_RANK: tl.constexpr, HEADER: tl.constexpr, SPLITS: tl.constexpr, SUMMED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, MORE_ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (block of a target's outputs, tiles): y[token, offset + j] += sum_r s Bt."""
    if PDL:
        gdc_launch_dependents()
    block = tl.program_id(0)
    blocks0 = tl.cdiv(width0, BLOCK_N)
    blocks1 = blocks0 + tl.cdiv(width1, BLOCK_N)
    target = (block >= blocks0).to(tl.int32) + (block >= blocks1).to(tl.int32)
    # Blocks of outputs are numbered through all targets; a padded target has width 0 and none.
    block -= of_target(target, 0 * blocks0, blocks0, blocks1)
    bt = of_target(target, b0, b1, b2)
    projection = of_target(target, projection0, projection1, projection2)
    width = of_target(target, width0, width1, width2)
    offset = of_target(target, offset0, offset1, offset2)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    split_stride = positions * MAX_RANK
    record = records + tl.program_id(1) * (HEADER + BLOCK_M)
    slot = tl.load(record)
    num_tiles = tl.load(record + 2)
    for tile in range(tl.program_id(1), num_tiles, tl.num_programs(1)):
        record = records + tile * (HEADER + BLOCK_M)
        entry = slot * PROJECTIONS + projection
        rank = tl.load(ranks + entry * TABLE_LAYERS + layer)
        scale_row = tl.load(output_rows + entry * 2)
        bias_row = tl.load(output_rows + entry * 2 + 1)
        table = page_table + entry * TABLE_PAGES
        first = tl.load(record + 1)
        tokens = tl.load(record + HEADER + m)
        # As in the shrink: the next tile's slot is on its way while this tile is computed.
        later = tile + tl.num_programs(1)
        slot = tl.load(records + later * (HEADER + BLOCK_M), mask=later < num_tiles, other=0)
        out = y + (tokens.to(tl.int64) * y_stride + offset)[None, :] + n[:, None]
        rows = target * SPLITS * split_stride + (first + m) * MAX_RANK
        # A copy of the code for adapters with output rows: in the one that plain adapters run, they
        # would change the layout of its tensors.
        if (scale_row >= 0) | (bias_row >= 0):
            _expand_tile(
                bt, table, rank, layer, width, n, tokens >= 0, out, scale_row, bias_row,
                partials, rows, num_splits, split_stride,
                TABLE_PAGES, LAYERS, MAX_RANK, SPLITS, SUMMED, BLOCK_R, PDL, True,
            )
        elif rank <= BLOCK_R:
            _expand_tile(
                bt, table, rank, layer, width, n, tokens >= 0, out, scale_row, bias_row,
                partials, rows, num_splits, split_stride,
                TABLE_PAGES, LAYERS, MAX_RANK, SPLITS, SUMMED, BLOCK_R, PDL, False,
            )
        else:
            _expand_tile(
                bt, table, rank, layer, width, n, tokens >= 0, out, scale_row, bias_row,
                partials, rows, num_splits, split_stride,
                TABLE_PAGES, LAYERS, MAX_RANK, SPLITS, SUMMED, MORE_ROWS, PDL, False,
            )
    if PDL:
        gdc_wait()

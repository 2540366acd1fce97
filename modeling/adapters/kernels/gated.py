"""Deltas of gate and up beside silu(gate) * up, in steps of many tokens, in Triton.

    out[t] = silu(gate'[t]) * up'[t],  gate', up' = y[t] with both deltas

Such steps are short of time for what they read and write, not for weights: a separate expand would
read and write gate and up once more. Records, pools and PDL are those of triton_shrink.py, which
leaves the sums of its partial sums; the base model's tokens have tiles of slot -1 behind the
others, which the other kernels skip. Tokens are the wide side of each product.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modeling.adapters.kernels.groups import LaunchGroup
from modeling.adapters.kernels.shrink import pages_of, pool_rows

# Arguments are grouped by what they describe; a line for each would hide the kernels.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def _rank_of(
    ranks: "Any", slot: "Any", projection: "Any", layer: "Any",
    PROJECTIONS: tl.constexpr, TABLE_LAYERS: tl.constexpr,
) -> "Any":
    return tl.load(ranks + (slot * PROJECTIONS + projection) * TABLE_LAYERS + layer)


@triton.jit  # type: ignore[untyped-decorator]
def _rows_of(
    pool: "Any", page_table: "Any", slot: "Any", projection: "Any", layer: "Any", r: "Any",
    width: "Any", PROJECTIONS: tl.constexpr, TABLE_PAGES: tl.constexpr, LAYERS: tl.constexpr,
) -> "Any":
    """Pointers to an adapter's rank rows r of one projection's pool."""
    table = page_table + (slot * PROJECTIONS + projection) * TABLE_PAGES
    return pool_rows(pool, pages_of(table, r, TABLE_PAGES), layer, r, width, LAYERS)


@triton.jit  # type: ignore[untyped-decorator]
def _output_row(bt: "Any", row: "Any", layer: "Any", width: "Any", n: "Any") -> "Any":
    """Row `row` of layer 0, at another layer: columns n, [1, n]; zeros where there is none."""
    at = (row.to(tl.int64) + layer * 8) * width
    found = tl.load(bt + at + n, mask=(n < width) & (row >= 0), other=0.0)
    return found.to(tl.float32)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _changed(
    y: "Any", bt: "Any", page_table: "Any", ranks: "Any", output_rows: "Any", partials: "Any",
    slot: "Any", projection: "Any", layer: "Any", width: "Any", n: "Any", rows: "Any", live: "Any",
    PROJECTIONS: tl.constexpr, TABLE_PAGES: tl.constexpr, TABLE_LAYERS: tl.constexpr,
    LAYERS: tl.constexpr, BLOCK_R: tl.constexpr,
) -> "Any":
    """y[p, n] + c y + d + sum_r s[p, r] Bt[r, n], in float32; y: a tile of one slot."""
    rank = _rank_of(ranks, slot, projection, layer, PROJECTIONS, TABLE_LAYERS)
    total = y.to(tl.float32)
    if rank > 0:
        scale_row = tl.load(output_rows + (slot * PROJECTIONS + projection) * 2)
        bias_row = tl.load(output_rows + (slot * PROJECTIONS + projection) * 2 + 1)
        if (scale_row >= 0) | (bias_row >= 0):
            scale = _output_row(bt, scale_row, layer, width, n)
            total += scale * total + _output_row(bt, bias_row, layer, width, n)
        r = tl.arange(0, BLOCK_R)
        for _ in range(0, rank, BLOCK_R):
            own = _rows_of(
                bt, page_table, slot, projection, layer, r, width, PROJECTIONS, TABLE_PAGES, LAYERS
            )
            mask = (r < rank)[:, None] & (n < width)[None, :]
            b = tl.load(own[:, None] + n[None, :], mask=mask, other=0.0)
            s_mask = live[:, None] & (r < rank)[None, :]
            s = tl.load(partials + rows[:, None] + r[None, :], mask=s_mask, other=0.0)
            if bt.dtype.element_ty == tl.float32:
                total = tl.dot(s, b, total, input_precision="ieee")
            else:
                # Tensor cores multiply in b's type: what rounding s takes away is multiplied too.
                high = s.to(b.dtype)
                low = (s - high.to(tl.float32)).to(b.dtype)
                total = tl.dot(low, b, tl.dot(high, b, total))
            r += BLOCK_R
    return total


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["projection0", "projection1", "layer", "positions"]
)
def gated_kernel(
    gate_up: "Any", out: "Any", b0: "Any", b1: "Any",
    records: "Any", page_table: "Any", ranks: "Any", partials: "Any", output_rows: "Any",
    projection0: "Any", projection1: "Any", layer: "Any", positions: "Any", size: "Any",
    PROJECTIONS: tl.constexpr, TABLE_PAGES: tl.constexpr, TABLE_LAYERS: tl.constexpr,
    LAYERS: tl.constexpr,
    MAX_RANK: tl.constexpr, HEADER: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (block of columns, tiles): out[t, n] = silu(gate'[t, n]) * up'[t, n].

    gate_up: [tokens, 2 * size], without deltas; out: [tokens, size]. Tiles of the base model's
    tokens too: they come last.
    """
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    num_adapted = tl.load(records + 2)
    num_tiles = tl.load(records + 3)
    if PDL:
        gdc_wait()
    for tile in range(tl.program_id(1), num_tiles, tl.num_programs(1)):
        record = records + tile * (HEADER + BLOCK_M)
        slot = tl.load(record)
        first = tl.load(record + 1)
        tokens = tl.load(record + HEADER + m)
        live = tokens >= 0
        mask = live[:, None] & (n < size)[None, :]
        at = tokens.to(tl.int64)[:, None] * 2 * size + n[None, :]
        gate = tl.load(gate_up + at, mask=mask, other=0.0)
        up = tl.load(gate_up + at + size, mask=mask, other=0.0)
        gate_sum, up_sum = gate.to(tl.float32), up.to(tl.float32)
        if tile < num_adapted:
            rows = (first + m) * MAX_RANK
            gate_sum = _changed(
                gate, b0, page_table, ranks, output_rows, partials,
                slot, projection0, layer, size, n, rows, live,
                PROJECTIONS, TABLE_PAGES, TABLE_LAYERS, LAYERS, BLOCK_R,
            )
            up_sum = _changed(
                up, b1, page_table, ranks, output_rows, partials + SPLITS * positions * MAX_RANK,
                slot, projection1, layer, size, n, rows, live,
                PROJECTIONS, TABLE_PAGES, TABLE_LAYERS, LAYERS, BLOCK_R,
            )
        # Rounded as the expand rounds them: steps of any number of tokens compute the same.
        wide = gate_sum.to(gate.dtype).to(tl.float32)
        product = wide * tl.sigmoid(wide) * up_sum.to(up.dtype).to(tl.float32)
        found = tokens.to(tl.int64)[:, None] * size + n[None, :]
        tl.store(out + found, product.to(gate.dtype), mask=mask)


# fmt: on
GATED_CONSTANTS = (
    *("PROJECTIONS", "TABLE_PAGES", "TABLE_LAYERS", "MAX_RANK", "HEADER", "SPLITS"),
    *("BLOCK_M", "BLOCK_R", "PDL"),
)
"""What `gated_kernel` takes of a step's constants."""


def gated_arguments(
    ends: tuple[Tensor, Tensor],
    tables: tuple[Tensor, ...],
    output_rows: Tensor,
    group: LaunchGroup,
    layer: int,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of `gated_kernel`, and its constants of the group; ends: gate_up and out."""
    tokens, size = ends[1].shape
    tensors = (*ends, *group.bt[:2], *tables, output_rows)
    return (*tensors, *group.projections[:2], layer, tokens, size), {"LAYERS": group.layers}

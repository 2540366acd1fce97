"""The multi-adapter product in steps of many tokens, in Triton: tiles of 64 tokens.

    shrink:  s[p, r] = sum_i x[token(p), i] * A[row(p, r), i]         of all targets at once
    gated:   out[t] = silu(gate'[t]) * up'[t],  gate', up' = y[t] with both deltas

Such steps are short of time for what they read and write, not for weights. So x is read once for
up to three targets, and the deltas of gate and up join where both are read anyway: a separate
expand would read and write them once more. Records, pools, partial sums and PDL are those of
triton_shrink.py; the base model's tokens have tiles of slot -1 behind the others, which the
product skips and `gated_kernel` takes. Tokens are the wide side of each product.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modeling.adapters.kernels.triton_groups import LaunchGroup
from modeling.adapters.kernels.triton_shrink import UNSPECIALIZED, pages_of, pool_rows

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
def _multiplied(
    x: "Any", a_rows: "Any", at: "Any", r: "Any", rank: "Any", width: "Any", s: "Any"
) -> "Any":
    """s[p, r] + sum_i x[p, i] A[r, i] of columns `at`."""
    mask = (r < rank)[:, None] & (at < width)[None, :]
    a = tl.load(a_rows[:, None] + at[None, :], mask=mask, other=0.0)
    return tl.dot(x, tl.trans(a), s, input_precision="ieee")


@triton.jit  # type: ignore[untyped-decorator]
def _sum_splits(
    partials: "Any", rows: "Any", live: "Any", rank: "Any", num_splits: "Any", split_stride: "Any",
    SPLITS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr,
) -> None:
    """Add a tile's partial sums into those of the first split; rows: offsets of its positions."""
    r = tl.arange(0, BLOCK_R)
    for _ in range(0, rank, BLOCK_R):
        at = rows[:, None] + r[None, :]
        mask = live[:, None] & (r < rank)[None, :]
        total = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
        for split in tl.static_range(SPLITS):
            one = partials + split * split_stride + at
            inside = mask & (split < num_splits)
            # .cg: past the first-level cache, which may lack other programs' stores.
            total += tl.load(one, mask=inside, other=0.0, cache_modifier=".cg")
        tl.store(partials + at, total, mask=mask)
        r += BLOCK_R


@triton.jit(do_not_specialize=UNSPECIALIZED)  # type: ignore[untyped-decorator]
def wide_shrink_kernel(
    x: "Any", a0: "Any", a1: "Any", a2: "Any",
    records: "Any", page_table: "Any", ranks: "Any",
    partials: "Any", arrived: "Any", arrived_stride: "Any",
    projection0: "Any", projection1: "Any", projection2: "Any", layer: "Any", width: "Any",
    x_stride: "Any", split_width: "Any", num_splits: "Any", positions: "Any",
    PROJECTIONS: tl.constexpr, TABLE_PAGES: tl.constexpr, TABLE_LAYERS: tl.constexpr,
    LAYERS: tl.constexpr,
    MAX_RANK: tl.constexpr, HEADER: tl.constexpr, SPLITS: tl.constexpr, COUNT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (split, tiles): the partial sums of all COUNT targets; the last split adds them."""
    if PDL:
        gdc_launch_dependents()
    split = tl.program_id(0)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    start = split * split_width
    stop = tl.minimum(start + split_width, width)
    split_stride = positions * MAX_RANK
    num_tiles = tl.load(records + 2)
    if PDL:
        gdc_wait()
    for tile in range(tl.program_id(1), num_tiles, tl.num_programs(1)):
        record = records + tile * (HEADER + BLOCK_M)
        slot = tl.load(record)
        first = tl.load(record + 1)
        tokens = tl.load(record + HEADER + m)
        live = tokens >= 0
        rank0 = _rank_of(ranks, slot, projection0, layer, PROJECTIONS, TABLE_LAYERS)
        rank1, rank2 = rank0 * 0, rank0 * 0
        if COUNT > 1:
            rank1 = _rank_of(ranks, slot, projection1, layer, PROJECTIONS, TABLE_LAYERS)
        if COUNT > 2:
            rank2 = _rank_of(ranks, slot, projection2, layer, PROJECTIONS, TABLE_LAYERS)
        most = tl.maximum(rank0, tl.maximum(rank1, rank2))
        x_rows = x + tokens.to(tl.int64) * x_stride
        # 32 bits are enough: TritonBuffers asserts it.
        rows = (first + m) * MAX_RANK
        r = tl.arange(0, BLOCK_R)
        for _ in range(0, most, BLOCK_R):
            s0 = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
            s1 = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
            s2 = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
            own0 = _rows_of(
                a0, page_table, slot, projection0, layer, r, width,
                PROJECTIONS, TABLE_PAGES, LAYERS,
            )
            own1, own2 = own0, own0
            if COUNT > 1:
                own1 = _rows_of(
                    a1, page_table, slot, projection1, layer, r, width,
                    PROJECTIONS, TABLE_PAGES, LAYERS,
                )
            if COUNT > 2:
                own2 = _rows_of(
                    a2, page_table, slot, projection2, layer, r, width,
                    PROJECTIONS, TABLE_PAGES, LAYERS,
                )
            for k0 in range(start, stop, BLOCK_K):
                at = k0 + k
                x_mask = live[:, None] & (at < width)[None, :]
                x_tile = tl.load(x_rows[:, None] + at[None, :], mask=x_mask, other=0.0)
                s0 = _multiplied(x_tile, own0, at, r, rank0, width, s0)
                if COUNT > 1:
                    s1 = _multiplied(x_tile, own1, at, r, rank1, width, s1)
                if COUNT > 2:
                    s2 = _multiplied(x_tile, own2, at, r, rank2, width, s2)
            out = partials + split * split_stride + rows[:, None] + r[None, :]
            tl.store(out, s0, mask=live[:, None] & (r < rank0)[None, :])
            if COUNT > 1:
                out += SPLITS * split_stride
                tl.store(out, s1, mask=live[:, None] & (r < rank1)[None, :])
            if COUNT > 2:
                out += SPLITS * split_stride
                tl.store(out, s2, mask=live[:, None] & (r < rank2)[None, :])
            r += BLOCK_R
        if most > 0:
            # One thread counts the arrival for all, as in triton_shrink.py.
            tl.debug_barrier()
            before = tl.atomic_add(arrived + tile, 1, sem="acq_rel")
            if before == num_splits - 1:
                _sum_splits(
                    partials, rows, live, rank0, num_splits, split_stride,
                    SPLITS, BLOCK_R, BLOCK_M,
                )
                if COUNT > 1:
                    _sum_splits(
                        partials + SPLITS * split_stride, rows, live, rank1, num_splits,
                        split_stride, SPLITS, BLOCK_R, BLOCK_M,
                    )
                if COUNT > 2:
                    _sum_splits(
                        partials + 2 * SPLITS * split_stride, rows, live, rank2, num_splits,
                        split_stride, SPLITS, BLOCK_R, BLOCK_M,
                    )
                # Zero again for the next launch, which begins only after this one has ended.
                tl.atomic_xchg(arrived + tile, 0, sem="relaxed")


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

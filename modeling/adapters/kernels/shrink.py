"""The multi-adapter product in Triton: here the shrink to rank rows, then expand.py.

    shrink:  s[p, r] = sum_i x[token(p), i] * A[row(p, r), i]
    expand:  y[token(p), o + j] += sum_r s[p, r] * Bt[row(p, r), j]

A step's tokens are sorted by slot and cut into tiles of one slot each; p is a token's position in
that order. A record describes a tile: int32 [HEADER + BLOCK_M], its slot, its first position, the
number of tiles in the step, then from HEADER on its tokens' indices (-1 beyond its end). Programs
read everything that varies between steps from device memory and stride over as many tiles as
there are, so that a captured launch serves any mix.

One launch serves up to three projections that share x. Tokens are the narrow side of each
product (rank rows x tokens, outputs x tokens): a tensor-core instruction takes eight of them.
Each split of x's width leaves a float32 partial sum; s is their sum in a fixed order, so equal
inputs give equal bits. Steps of few tokens are short of time and add them in the expand; in steps
of many, every block of outputs would read them all again, so the last split to arrive adds them
(SUMMED). Adapters of at most BLOCK_R rank rows take one pass, others several of MORE_ROWS each:
every pass waits for memory, but a larger first one costs small adapters more than it saves.

PDL is programmatic dependent launch: a kernel starts while the one before it ends, and reads what
that one wrote only after `gdc_wait`. Records, page tables, ranks and pools are written by copies,
never by a kernel, so they may be read before. Every program waits, even one with nothing to do:
the next kernel counts on all that came before this one.
"""

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

UNSPECIALIZED = ["layer", "projection0", "projection1", "projection2", "num_splits", "positions"]
"""Integers that are no reason to compile again where they are 1 or multiples of 16."""

# Arguments are grouped by what they describe; a line for each would hide the kernels.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def of_target(target: "Any", first: "Any", second: "Any", third: "Any") -> "Any":
    """The argument of a launch's first, second or third target."""
    value = first
    if target == 1:
        value = second
    if target == 2:
        value = third
    return value


@triton.jit  # type: ignore[untyped-decorator]
def pages_of(table: "Any", r: "Any", TABLE_PAGES: tl.constexpr) -> "Any":
    """Pages of rank rows r; page 0 beyond the adapter's own, of which every load is masked."""
    page = r // 8
    return tl.load(table + page, mask=page < TABLE_PAGES, other=0)


@triton.jit  # type: ignore[untyped-decorator]
def pool_rows(
    pool: "Any", pages: "Any", layer: "Any", r: "Any", width: "Any", LAYERS: tl.constexpr
) -> "Any":
    """Pointers to rank rows r of a [page, LAYERS, 8, width] pool."""
    return pool + ((pages.to(tl.int64) * LAYERS + layer) * 8 + r % 8) * width


@triton.jit  # type: ignore[untyped-decorator]
def _sum_splits(
    partials: "Any", arrived: "Any", rows: "Any", live: "Any", rank: "Any", num_splits: "Any",
    split_stride: "Any",
    SPLITS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr,
) -> None:
    """Add a tile's partial sums, if this split is its last; rows: offsets of its positions."""
    # One thread counts the arrival for all: the barrier puts every thread's stores before it, and
    # acq_rel makes them visible to the program that finds itself last.
    tl.debug_barrier()
    before = tl.atomic_add(arrived, 1, sem="acq_rel")
    if before == num_splits - 1:
        r = tl.arange(0, BLOCK_R)
        for _ in range(0, rank, BLOCK_R):
            at = rows[None, :] + r[:, None]
            mask = live[None, :] & (r < rank)[:, None]
            total = tl.zeros([BLOCK_R, BLOCK_M], dtype=tl.float32)
            for split in tl.static_range(SPLITS):
                one = partials + split * split_stride + at
                inside = mask & (split < num_splits)
                # .cg: past the first-level cache, which may lack other programs' stores.
                total += tl.load(one, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(partials + at, total, mask=mask)
            r += BLOCK_R
        # Zero again for the next launch, which begins only after this one has ended.
        tl.atomic_xchg(arrived, 0, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def _shrink_tile(
    a: "Any", table: "Any", rank: "Any", layer: "Any", width: "Any", x_rows: "Any", live: "Any",
    out: "Any", start: "Any", stop: "Any",
    TABLE_PAGES: tl.constexpr, LAYERS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """out[p, r] = sum_i x[p, i] * A[r, i] over a split's columns, ROWS rank rows at once."""
    r = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    pages = pages_of(table, r, TABLE_PAGES)
    # Page numbers come from a table that no kernel writes: their load overlaps the kernel before.
    if PDL:
        gdc_wait()
    for _ in range(0, rank, ROWS):
        a_rows = pool_rows(a, pages, layer, r, width, LAYERS)
        s = tl.zeros([ROWS, live.shape[0]], dtype=tl.float32)
        for k0 in range(start, stop, BLOCK_K):
            at = k0 + k
            a_mask = (r < rank)[:, None] & (at < width)[None, :]
            a_tile = tl.load(a_rows[:, None] + at[None, :], mask=a_mask, other=0.0)
            x_mask = live[None, :] & (at < width)[:, None]
            x_tile = tl.load(x_rows[None, :] + at[:, None], mask=x_mask, other=0.0)
            s = tl.dot(a_tile, x_tile, s, input_precision="ieee")
        out_mask = (r < rank)[:, None] & live[None, :]
        tl.store(out[None, :] + r[:, None], s, mask=out_mask)
        r += ROWS
        # For the next pass, while the dot products of this one still run.
        pages = pages_of(table, r, TABLE_PAGES)


@triton.jit  # type: ignore[untyped-decorator]
def shrink_tiles(
    block: "Any", first_tile: "Any", tile_stride: "Any",
    x: "Any", a0: "Any", a1: "Any", a2: "Any",
    records: "Any", page_table: "Any", ranks: "Any",
    partials: "Any", arrived: "Any", arrived_stride: "Any",
    projection0: "Any", projection1: "Any", projection2: "Any", layer: "Any", width: "Any",
    x_stride: "Any", split_width: "Any", num_splits: "Any", positions: "Any",
    PROJECTIONS: tl.constexpr, TABLE_PAGES: tl.constexpr, TABLE_LAYERS: tl.constexpr,
    LAYERS: tl.constexpr,
    MAX_RANK: tl.constexpr, HEADER: tl.constexpr, SPLITS: tl.constexpr, SUMMED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, MORE_ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The shrink's `block` (target x split) for tiles first_tile, first_tile + tile_stride, ...

    partials: float32 [3, SPLITS, positions, MAX_RANK]; written for the tiles' tokens, r below the
    true rank; SUMMED: the first split's part ends up with the sum. arrived: int32 zeros
    [3, tiles], zeros again afterwards. split_width: columns of a split, a multiple of BLOCK_K.
    MAX_RANK is a multiple of BLOCK_R and MORE_ROWS, so that a load past the true rank stays within
    its row.
    """
    target = block // num_splits
    split = block % num_splits
    a = of_target(target, a0, a1, a2)
    projection = of_target(target, projection0, projection1, projection2)
    m = tl.arange(0, BLOCK_M)
    start = split * split_width
    stop = tl.minimum(start + split_width, width)
    record = records + first_tile * (HEADER + BLOCK_M)
    slot = tl.load(record)
    num_tiles = tl.load(record + 2)
    for tile in range(first_tile, num_tiles, tile_stride):
        record = records + tile * (HEADER + BLOCK_M)
        entry = slot * PROJECTIONS + projection
        rank = tl.load(ranks + entry * TABLE_LAYERS + layer)
        table = page_table + entry * TABLE_PAGES
        first = tl.load(record + 1)
        tokens = tl.load(record + HEADER + m)
        # The next tile's slot is loaded now: rank and pages depend on it, one load after another.
        later = tile + tile_stride
        slot = tl.load(records + later * (HEADER + BLOCK_M), mask=later < num_tiles, other=0)
        live = tokens >= 0
        x_rows = x + tokens.to(tl.int64) * x_stride
        # 32 bits are enough: TritonBuffers asserts it.
        out = partials + ((target * SPLITS + split) * positions + first + m) * MAX_RANK
        if rank <= BLOCK_R:
            _shrink_tile(
                a, table, rank, layer, width, x_rows, live, out, start, stop,
                TABLE_PAGES, LAYERS, BLOCK_R, BLOCK_K, PDL,
            )
        else:
            _shrink_tile(
                a, table, rank, layer, width, x_rows, live, out, start, stop,
                TABLE_PAGES, LAYERS, MORE_ROWS, BLOCK_K, PDL,
            )
        if SUMMED and rank > 0:
            _sum_splits(
                partials + target * SPLITS * positions * MAX_RANK,
                arrived + target * arrived_stride + tile,
                (first + m) * MAX_RANK, live, rank, num_splits, positions * MAX_RANK,
                SPLITS, BLOCK_R, BLOCK_M,
            )
    # A program without tiles waits too: the next kernel relies on all work before this one.
    if PDL:
        gdc_wait()


@triton.jit(do_not_specialize=UNSPECIALIZED)  # type: ignore[untyped-decorator]
def shrink_kernel(
    x: "Any", a0: "Any", a1: "Any", a2: "Any",
    records: "Any", page_table: "Any", ranks: "Any",
    partials: "Any", arrived: "Any", arrived_stride: "Any",
    projection0: "Any", projection1: "Any", projection2: "Any", layer: "Any", width: "Any",
    x_stride: "Any", split_width: "Any", num_splits: "Any", positions: "Any",
    PROJECTIONS: tl.constexpr, TABLE_PAGES: tl.constexpr, TABLE_LAYERS: tl.constexpr,
    LAYERS: tl.constexpr,
    MAX_RANK: tl.constexpr, HEADER: tl.constexpr, SPLITS: tl.constexpr, SUMMED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, MORE_ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (target x split, tiles): partials[target, split, p, r] over the split's columns."""
    if PDL:
        gdc_launch_dependents()
    shrink_tiles(
        tl.program_id(0), tl.program_id(1), tl.num_programs(1),
        x, a0, a1, a2,
        records, page_table, ranks,
        partials, arrived, arrived_stride,
        projection0, projection1, projection2, layer, width,
        x_stride, split_width, num_splits, positions,
        PROJECTIONS, TABLE_PAGES, TABLE_LAYERS, LAYERS,
        MAX_RANK, HEADER, SPLITS, SUMMED, BLOCK_M, BLOCK_R, MORE_ROWS, BLOCK_K, PDL,
    )

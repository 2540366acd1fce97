"""Triton kernels of the multi-adapter product: a shrink to rank rows, then an expand.

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
(SUMMED).

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
"""Integers whose special values (1, multiples of 16) are no reason to compile again."""


@triton.jit  # type: ignore[untyped-decorator]
def _chosen(target: "Any", first: "Any", second: "Any", third: "Any") -> "Any":
    """What a launch was given for its first, second or third target."""
    value = first
    if target == 1:
        value = second
    if target == 2:
        value = third
    return value


@triton.jit  # type: ignore[untyped-decorator]
def _pages(table: "Any", r: "Any", TABLE_PAGES: tl.constexpr) -> "Any":
    """Pages of rank rows r; page 0 beyond the adapter's own, which no one reads through."""
    # Not masked by the rank: that is on its way too, and the two loads need not wait in line.
    page = r // 8
    return tl.load(table + page, mask=page < TABLE_PAGES, other=0)


@triton.jit  # type: ignore[untyped-decorator]
def _pool_rows(
    pool: "Any", pages: "Any", layer: "Any", r: "Any", width: "Any", LAYERS: tl.constexpr
) -> "Any":
    """Pointers to rank rows r of a [page, LAYERS, 8, width] pool."""
    return pool + ((pages.to(tl.int64) * LAYERS + layer) * 8 + r % 8) * width


@triton.jit  # type: ignore[untyped-decorator]
def _sum_splits(
    partials: "Any",
    arrived: "Any",
    rows: "Any",
    live: "Any",
    rank: "Any",
    num_splits: "Any",
    split_stride: "Any",
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> None:
    """Add a tile's partial sums, if this split is its last; rows: offsets of its positions."""
    # The barrier gathers this program's stores behind the one thread that tells of them.
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
                given = mask & (split < num_splits)
                total += tl.load(one, mask=given, other=0.0, cache_modifier=".cg")
            tl.store(partials + at, total, mask=mask)
            r += BLOCK_R
        tl.atomic_xchg(arrived, 0, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def shrink_tiles(
    block: "Any",
    first_tile: "Any",
    tile_stride: "Any",
    x: "Any",
    a0: "Any",
    a1: "Any",
    a2: "Any",
    records: "Any",
    page_table: "Any",
    ranks: "Any",
    partials: "Any",
    arrived: "Any",
    arrived_stride: "Any",
    projection0: "Any",
    projection1: "Any",
    projection2: "Any",
    layer: "Any",
    width: "Any",
    x_stride: "Any",
    split_width: "Any",
    num_splits: "Any",
    positions: "Any",
    PROJECTIONS: tl.constexpr,
    TABLE_PAGES: tl.constexpr,
    TABLE_LAYERS: tl.constexpr,
    LAYERS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    HEADER: tl.constexpr,
    SPLITS: tl.constexpr,
    SUMMED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The shrink's `block` (target x split) for tiles first_tile, first_tile + tile_stride, ...

    partials: float32 [3, SPLITS, positions, MAX_RANK]; written for the tiles' tokens, r below the
    true rank; SUMMED: the first split's place ends up with the sum. arrived: int32 zeros
    [3, tiles], zeros again afterwards. split_width: columns of a split, a multiple of BLOCK_K.
    MAX_RANK is a multiple of BLOCK_R, so that a load past the true rank stays within its row.
    """
    target = block // num_splits
    split = block % num_splits
    a = _chosen(target, a0, a1, a2)
    projection = _chosen(target, projection0, projection1, projection2)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    start = split * split_width
    stop = tl.minimum(start + split_width, width)
    record = records + first_tile * (HEADER + BLOCK_M)
    slot = tl.load(record)
    num_tiles = tl.load(record + 2)
    for tile in range(first_tile, num_tiles, tile_stride):
        record = records + tile * (HEADER + BLOCK_M)
        place = slot * PROJECTIONS + projection
        rank = tl.load(ranks + place * TABLE_LAYERS + layer)
        r = tl.arange(0, BLOCK_R)
        pages = _pages(page_table + place * TABLE_PAGES, r, TABLE_PAGES)
        first = tl.load(record + 1)
        tokens = tl.load(record + HEADER + m)
        later = tile + tile_stride
        slot = tl.load(records + later * (HEADER + BLOCK_M), mask=later < num_tiles, other=0)
        if PDL:
            gdc_wait()
        live = tokens >= 0
        x_rows = x + tokens.to(tl.int64) * x_stride
        out = partials + ((target * SPLITS + split) * positions + first + m) * MAX_RANK
        for _ in range(0, rank, BLOCK_R):
            a_rows = _pool_rows(a, pages, layer, r, width, LAYERS)
            s = tl.zeros([BLOCK_R, BLOCK_M], dtype=tl.float32)
            for k0 in range(start, stop, BLOCK_K):
                at = k0 + k
                a_mask = (r < rank)[:, None] & (at < width)[None, :]
                a_tile = tl.load(a_rows[:, None] + at[None, :], mask=a_mask, other=0.0)
                x_mask = live[None, :] & (at < width)[:, None]
                x_tile = tl.load(x_rows[None, :] + at[:, None], mask=x_mask, other=0.0)
                s = tl.dot(a_tile, x_tile, s, input_precision="ieee")
            out_mask = (r < rank)[:, None] & live[None, :]
            tl.store(out[None, :] + r[:, None], s, mask=out_mask)
            r += BLOCK_R
            pages = _pages(page_table + place * TABLE_PAGES, r, TABLE_PAGES)
        if SUMMED and rank > 0:
            _sum_splits(
                partials + target * SPLITS * positions * MAX_RANK,
                arrived + target * arrived_stride + tile,
                (first + m) * MAX_RANK,
                live,
                rank,
                num_splits,
                positions * MAX_RANK,
                SPLITS,
                BLOCK_R,
                BLOCK_M,
            )
    if PDL:
        gdc_wait()


@triton.jit(do_not_specialize=UNSPECIALIZED)  # type: ignore[untyped-decorator]
def shrink_kernel(
    x: "Any",
    a0: "Any",
    a1: "Any",
    a2: "Any",
    records: "Any",
    page_table: "Any",
    ranks: "Any",
    partials: "Any",
    arrived: "Any",
    arrived_stride: "Any",
    projection0: "Any",
    projection1: "Any",
    projection2: "Any",
    layer: "Any",
    width: "Any",
    x_stride: "Any",
    split_width: "Any",
    num_splits: "Any",
    positions: "Any",
    PROJECTIONS: tl.constexpr,
    TABLE_PAGES: tl.constexpr,
    TABLE_LAYERS: tl.constexpr,
    LAYERS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    HEADER: tl.constexpr,
    SPLITS: tl.constexpr,
    SUMMED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (target x split, tiles): partials[target, split, p, r] over the split's columns."""
    if PDL:
        gdc_launch_dependents()
    shrink_tiles(
        tl.program_id(0),
        tl.program_id(1),
        tl.num_programs(1),
        x,
        a0,
        a1,
        a2,
        records,
        page_table,
        ranks,
        partials,
        arrived,
        arrived_stride,
        projection0,
        projection1,
        projection2,
        layer,
        width,
        x_stride,
        split_width,
        num_splits,
        positions,
        PROJECTIONS,
        TABLE_PAGES,
        TABLE_LAYERS,
        LAYERS,
        MAX_RANK,
        HEADER,
        SPLITS,
        SUMMED,
        BLOCK_M,
        BLOCK_R,
        BLOCK_K,
        PDL,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _sums(
    partials: "Any",
    rows: "Any",
    live: "Any",
    r: "Any",
    rank: "Any",
    num_splits: "Any",
    split_stride: "Any",
    SPLITS: tl.constexpr,
    SUMMED: tl.constexpr,
) -> "Any":
    """s[r, p] of one target; rows: offsets of the positions in the first split's place."""
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
    """acc[j, p] + sum_r bt[r, j] s[r, p]; s keeps its precision as two halves in bt's type."""
    b = tl.trans(bt)
    if bt.dtype == tl.float32:
        acc = tl.dot(b, s, acc, input_precision="ieee")
    else:
        high = s.to(bt.dtype)
        low = (s - high.to(tl.float32)).to(bt.dtype)
        acc = tl.dot(b, high, acc)
        acc = tl.dot(b, low, acc)
    return acc


@triton.jit(do_not_specialize=UNSPECIALIZED)  # type: ignore[untyped-decorator]
def expand_kernel(
    y: "Any",
    b0: "Any",
    b1: "Any",
    b2: "Any",
    records: "Any",
    page_table: "Any",
    ranks: "Any",
    partials: "Any",
    projection0: "Any",
    projection1: "Any",
    projection2: "Any",
    layer: "Any",
    width0: "Any",
    width1: "Any",
    width2: "Any",
    offset0: "Any",
    offset1: "Any",
    offset2: "Any",
    y_stride: "Any",
    num_splits: "Any",
    positions: "Any",
    PROJECTIONS: tl.constexpr,
    TABLE_PAGES: tl.constexpr,
    TABLE_LAYERS: tl.constexpr,
    LAYERS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    HEADER: tl.constexpr,
    SPLITS: tl.constexpr,
    SUMMED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (block of a target's outputs, tiles): y[token, offset + j] += sum_r s Bt."""
    if PDL:
        gdc_launch_dependents()
    block = tl.program_id(0)
    blocks0 = tl.cdiv(width0, BLOCK_N)
    blocks1 = blocks0 + tl.cdiv(width1, BLOCK_N)
    target = (block >= blocks0).to(tl.int32) + (block >= blocks1).to(tl.int32)
    block -= _chosen(target, 0 * blocks0, blocks0, blocks1)
    bt = _chosen(target, b0, b1, b2)
    projection = _chosen(target, projection0, projection1, projection2)
    width = _chosen(target, width0, width1, width2)
    offset = _chosen(target, offset0, offset1, offset2)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    split_stride = positions * MAX_RANK
    record = records + tl.program_id(1) * (HEADER + BLOCK_M)
    slot = tl.load(record)
    num_tiles = tl.load(record + 2)
    for tile in range(tl.program_id(1), num_tiles, tl.num_programs(1)):
        record = records + tile * (HEADER + BLOCK_M)
        place = slot * PROJECTIONS + projection
        rank = tl.load(ranks + place * TABLE_LAYERS + layer)
        r = tl.arange(0, BLOCK_R)
        table = page_table + place * TABLE_PAGES
        first = tl.load(record + 1)
        tokens = tl.load(record + HEADER + m)
        later = tile + tl.num_programs(1)
        slot = tl.load(records + later * (HEADER + BLOCK_M), mask=later < num_tiles, other=0)
        # The first rows come while the shrink still runs.
        b_rows = _pool_rows(bt, _pages(table, r, TABLE_PAGES), layer, r, width, LAYERS)
        b_mask = (r < rank)[:, None] & (n < width)[None, :]
        b_tile = tl.load(b_rows[:, None] + n[None, :], mask=b_mask, other=0.0)
        if PDL:
            gdc_wait()
        if rank > 0:
            live = tokens >= 0
            out = y + (tokens.to(tl.int64) * y_stride + offset)[None, :] + n[:, None]
            out_mask = live[None, :] & (n < width)[:, None]
            old = tl.load(out, mask=out_mask, other=0.0)
            rows = target * SPLITS * split_stride + (first + m) * MAX_RANK
            s = _sums(partials, rows, live, r, rank, num_splits, split_stride, SPLITS, SUMMED)
            acc = _expanded(b_tile, s, tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32))
            for _ in range(BLOCK_R, tl.minimum(rank, MAX_RANK), BLOCK_R):
                r += BLOCK_R
                b_rows = _pool_rows(bt, _pages(table, r, TABLE_PAGES), layer, r, width, LAYERS)
                b_mask = (r < rank)[:, None] & (n < width)[None, :]
                b_tile = tl.load(b_rows[:, None] + n[None, :], mask=b_mask, other=0.0)
                s = _sums(partials, rows, live, r, rank, num_splits, split_stride, SPLITS, SUMMED)
                acc = _expanded(b_tile, s, acc)
            tl.store(out, (old.to(tl.float32) + acc).to(old.dtype), mask=out_mask)
    if PDL:
        gdc_wait()

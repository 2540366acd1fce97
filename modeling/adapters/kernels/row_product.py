"""The base product of up to 16 rows in 4 bits and the adapters' shrink, in one launch, in Gluon.

As product.py does it: the first programs are the shrink's. Here each warp takes columns of
its own of a split, and loads A and x straight into the registers of the tensor cores.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modeling.adapters.kernels.shrink import UNSPECIALIZED
from modeling.kernels.fp4_rows import fp4_row_tile
from modeling.kernels.integer_rows import row_tile

AT_ONCE = gl.constexpr(4)
"""Blocks of BLOCK_K columns that are all loaded at once."""

# Arguments are grouped by what they describe; a line for each would hide the kernels.
# fmt: off


@gluon.jit  # type: ignore[untyped-decorator]
def _of_target(target: "Any", first: "Any", second: "Any", third: "Any") -> "Any":
    """The argument of a launch's first, second or third target."""
    value = first
    if target == 1:
        value = second
    if target == 2:
        value = third
    return value


@gluon.jit  # type: ignore[untyped-decorator]
def _shrink_tile(
    a: "Any", table: "Any", rank: "Any", layer: "Any", width: "Any", x: "Any", x_stride: "Any",
    token: "Any", out: "Any", start: "Any", stop: "Any",
    TABLE_PAGES: gl.constexpr, LAYERS: gl.constexpr, MAX_RANK: gl.constexpr, ROWS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, PDL: gl.constexpr,
) -> None:
    """out[p, r] = sum_i x[p, i] * A[r, i] over a split's columns, ROWS rank rows at once.

    token: where the tile's BLOCK_M tokens stand. out: of the tile's first position.
    """
    PARTS: gl.constexpr = gl.num_warps()
    WIDE: gl.constexpr = BLOCK_K * AT_ONCE // PARTS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [PARTS, 1, 1], [1, 16, 8])
    OF_A: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 8)
    OF_X: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, 8)
    SUM: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    # Axes: parts, rank rows, columns; parts, columns, tokens for x.
    r = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, OF_A)))
    a_part = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(1, OF_A)))
    a_k = gl.arange(0, WIDE, gl.SliceLayout(0, gl.SliceLayout(1, OF_A)))
    a_at = gl.expand_dims(gl.expand_dims(a_part * WIDE, 1) + gl.expand_dims(a_k, 0), 1)
    x_part = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, OF_X)))
    x_k = gl.arange(0, WIDE, gl.SliceLayout(0, gl.SliceLayout(2, OF_X)))
    x_at = gl.expand_dims(gl.expand_dims(x_part * WIDE, 1) + gl.expand_dims(x_k, 0), 2)
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(1, OF_X)))
    tokens = gl.load(token + m)
    live = gl.expand_dims(gl.expand_dims(tokens >= 0, 0), 1)
    x_rows = x + gl.expand_dims(gl.expand_dims(tokens.to(gl.int64) * x_stride, 0), 1)
    sum_r = gl.arange(0, ROWS, gl.SliceLayout(1, SUM))
    sum_m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, SUM))
    is_live = gl.expand_dims(gl.load(token + sum_m) >= 0, 0)
    pages = gl.load(table + r // 8, mask=r // 8 < TABLE_PAGES, other=0)
    # Page numbers come from a table that no kernel writes: their load overlaps the kernel before.
    if PDL:
        gdc_wait()
    for _ in range(0, rank, ROWS):
        a_rows = a + ((pages.to(gl.int64) * LAYERS + layer) * 8 + r % 8) * width
        a_rows = gl.expand_dims(gl.expand_dims(a_rows, 0), 2)
        has_row = gl.expand_dims(gl.expand_dims(r < rank, 0), 2)
        s = gl.zeros([PARTS, ROWS, BLOCK_M], gl.float32, LAYOUT)
        for k0 in range(start, stop, BLOCK_K * AT_ONCE):
            a_tile = gl.load(a_rows + (k0 + a_at), mask=has_row & (k0 + a_at < stop), other=0.0)
            x_tile = gl.load(x_rows + (k0 + x_at), mask=live & (k0 + x_at < stop), other=0.0)
            s = mma_v2(a_tile, x_tile, s)
        found = gl.sum(s, axis=0)
        mask = gl.expand_dims(sum_r < rank, 1) & is_live
        at = gl.expand_dims(sum_m * MAX_RANK, 0) + gl.expand_dims(sum_r, 1)
        gl.store(out + at, found, mask=mask)
        r += ROWS
        sum_r += ROWS
        # For the next pass, while the products of this one still run.
        pages = gl.load(table + r // 8, mask=r // 8 < TABLE_PAGES, other=0)


@gluon.jit  # type: ignore[untyped-decorator]
def _shrink_tiles(
    block: "Any", first_tile: "Any", tile_stride: "Any",
    x: "Any", a0: "Any", a1: "Any", a2: "Any",
    records: "Any", page_table: "Any", ranks: "Any", partials: "Any",
    projection0: "Any", projection1: "Any", projection2: "Any", layer: "Any", width: "Any",
    x_stride: "Any", split_width: "Any", num_splits: "Any", positions: "Any",
    PROJECTIONS: gl.constexpr, TABLE_PAGES: gl.constexpr, TABLE_LAYERS: gl.constexpr,
    LAYERS: gl.constexpr,
    MAX_RANK: gl.constexpr, HEADER: gl.constexpr, SPLITS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_R: gl.constexpr, MORE_ROWS: gl.constexpr, BLOCK_K: gl.constexpr,
    PDL: gl.constexpr,
) -> None:
    """`shrink.shrink_tiles` of a step that leaves the splits' sums to the expand."""
    target = block // num_splits
    split = block % num_splits
    a = _of_target(target, a0, a1, a2)
    projection = _of_target(target, projection0, projection1, projection2)
    start = split * split_width
    stop = gl.minimum(start + split_width, width)
    record = records + first_tile * (HEADER + BLOCK_M)
    slot = gl.load(record)
    num_tiles = gl.load(record + 2)
    for tile in range(first_tile, num_tiles, tile_stride):
        record = records + tile * (HEADER + BLOCK_M)
        entry = slot * PROJECTIONS + projection
        rank = gl.load(ranks + entry * TABLE_LAYERS + layer)
        table = page_table + entry * TABLE_PAGES
        first = gl.load(record + 1)
        # The next tile's slot is loaded now: rank and pages depend on it, one load after another.
        later = tile + tile_stride
        slot = gl.load(records + later * (HEADER + BLOCK_M), mask=later < num_tiles, other=0)
        # 32 bits are enough: TritonBuffers asserts it.
        out = partials + ((target * SPLITS + split) * positions + first) * MAX_RANK
        if rank <= BLOCK_R:
            _shrink_tile(
                a, table, rank, layer, width, x, x_stride, record + HEADER, out, start, stop,
                TABLE_PAGES, LAYERS, MAX_RANK, BLOCK_R, BLOCK_M, BLOCK_K, PDL,
            )
        else:
            _shrink_tile(
                a, table, rank, layer, width, x, x_stride, record + HEADER, out, start, stop,
                TABLE_PAGES, LAYERS, MAX_RANK, MORE_ROWS, BLOCK_M, BLOCK_K, PDL,
            )
    # A program without tiles waits too: the next kernel relies on all work before this one.
    if PDL:
        gdc_wait()


@gluon.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[*UNSPECIALIZED, "num_rows", "num_shrinks", "num_tile_programs"]
)
def row_product_kernel(
    x_own: "Any", codes: "Any", scales: "Any", zeros: "Any", y: "Any",
    sums: "Any", arrived: "Any", num_rows: "Any", num_outputs: "Any", own_stride: "Any",
    y_stride: "Any", num_shrinks: "Any", num_tile_programs: "Any",
    x: "Any", a0: "Any", a1: "Any", a2: "Any",
    records: "Any", page_table: "Any", ranks: "Any",
    partials: "Any", summed: "Any", summed_stride: "Any",
    projection0: "Any", projection1: "Any", projection2: "Any", layer: "Any",
    x_stride: "Any", split_width: "Any", num_splits: "Any", positions: "Any",
    INPUTS: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr, MIDDLE: gl.constexpr,
    HAS_ZEROS: gl.constexpr, RAISED: gl.constexpr,
    ASM0: gl.constexpr, ASM1: gl.constexpr, ASM2: gl.constexpr, ASM3: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, TURN: gl.constexpr, SHARES: gl.constexpr,
    PROJECTIONS: gl.constexpr, TABLE_PAGES: gl.constexpr, TABLE_LAYERS: gl.constexpr,
    LAYERS: gl.constexpr,
    MAX_RANK: gl.constexpr, HEADER: gl.constexpr, SPLITS: gl.constexpr, SUMMED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_R: gl.constexpr, MORE_ROWS: gl.constexpr, BLOCK_K: gl.constexpr,
    PDL: gl.constexpr,
) -> None:
    """The first num_shrinks programs are the shrink's, the others the product's.

    x_own: x in the order of the codes. x: as the shrink reads it.
    """
    if PDL:
        gdc_launch_dependents()
    gl.static_assert(not SUMMED)
    program = gl.program_id(0)
    if program < num_shrinks:
        _shrink_tiles(
            program // num_tile_programs, program % num_tile_programs, num_tile_programs,
            x, a0, a1, a2,
            records, page_table, ranks, partials,
            projection0, projection1, projection2, layer, INPUTS,
            x_stride, split_width, num_splits, positions,
            PROJECTIONS, TABLE_PAGES, TABLE_LAYERS, LAYERS,
            MAX_RANK, HEADER, SPLITS, BLOCK_M, BLOCK_R, MORE_ROWS, BLOCK_K, PDL,
        )
    else:
        own = program - num_shrinks
        num_blocks = (gl.num_programs(0) - num_shrinks) // SHARES
        row_tile(
            own % num_blocks, own // num_blocks, num_blocks,
            x_own, codes, scales, zeros, y, y, sums, arrived,
            num_rows, num_outputs, own_stride, y_stride,
            INPUTS, CHUNK, CHUNKS, MIDDLE, HAS_ZEROS, RAISED, ASM0, ASM1, ASM2, ASM3,
            ROWS, BLOCK_N, TURN, SHARES, False, PDL,
        )


@gluon.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[*UNSPECIALIZED, "num_rows", "num_shrinks", "num_tile_programs"]
)
def fp4_row_product_kernel(
    x_own: "Any", codes: "Any", scales: "Any", outer: "Any", y: "Any",
    sums: "Any", arrived: "Any", num_rows: "Any", num_outputs: "Any", own_stride: "Any",
    y_stride: "Any", num_shrinks: "Any", num_tile_programs: "Any",
    x: "Any", a0: "Any", a1: "Any", a2: "Any",
    records: "Any", page_table: "Any", ranks: "Any",
    partials: "Any", summed: "Any", summed_stride: "Any",
    projection0: "Any", projection1: "Any", projection2: "Any", layer: "Any",
    x_stride: "Any", split_width: "Any", num_splits: "Any", positions: "Any",
    INPUTS: gl.constexpr, IS_NVFP4: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, TURN: gl.constexpr, SHARES: gl.constexpr,
    PROJECTIONS: gl.constexpr, TABLE_PAGES: gl.constexpr, TABLE_LAYERS: gl.constexpr,
    LAYERS: gl.constexpr,
    MAX_RANK: gl.constexpr, HEADER: gl.constexpr, SPLITS: gl.constexpr, SUMMED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_R: gl.constexpr, MORE_ROWS: gl.constexpr, BLOCK_K: gl.constexpr,
    PDL: gl.constexpr,
) -> None:
    """The same of weights in nvfp4 and mxfp4. x_own: x as the product sees it."""
    if PDL:
        gdc_launch_dependents()
    gl.static_assert(not SUMMED)
    program = gl.program_id(0)
    if program < num_shrinks:
        _shrink_tiles(
            program // num_tile_programs, program % num_tile_programs, num_tile_programs,
            x, a0, a1, a2,
            records, page_table, ranks, partials,
            projection0, projection1, projection2, layer, INPUTS,
            x_stride, split_width, num_splits, positions,
            PROJECTIONS, TABLE_PAGES, TABLE_LAYERS, LAYERS,
            MAX_RANK, HEADER, SPLITS, BLOCK_M, BLOCK_R, MORE_ROWS, BLOCK_K, PDL,
        )
    else:
        own = program - num_shrinks
        num_blocks = (gl.num_programs(0) - num_shrinks) // SHARES
        fp4_row_tile(
            own % num_blocks, own // num_blocks, num_blocks,
            x_own, codes, scales, outer, y, y, sums, arrived,
            num_rows, num_outputs, own_stride, y_stride,
            INPUTS, IS_NVFP4, ROWS, BLOCK_N, TURN, SHARES, False, PDL,
        )

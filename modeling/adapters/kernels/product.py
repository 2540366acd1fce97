"""The base product of a decode step and the adapters' shrink, in one launch.

    y[m, n] = sum_k W[n, k] x[m, k]           programs of blocks of outputs
    s[p, r] = sum_i x[token(p), i] * A[row(p, r), i]        programs of the shrink, ahead of them

Both read x and neither waits for the other, so the shrink costs a step only the bytes that it
reads: its launch and its chain of short loads overlap the product. Few rows are the narrow side of
the tensor cores' instruction, as in the adapters' kernels. With splits, the programs of a block of
outputs share the inputs and leave float32 partial sums; the last to arrive adds them in a fixed
order, so that equal inputs give equal bits.

The expand follows as a programmatic dependent: it loads B while this kernel ends.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modeling.adapters.kernels.shrink import UNSPECIALIZED, shrink_tiles
from modeling.kernels.fp4_tiles import fp4_tile
from modeling.kernels.integer_tiles import integer_tile
from modeling.kernels.tiles import prefetch, scaled_tile, store_tile


@dataclass(frozen=True)
class ProductForm:
    """How a product of up to `rows` rows is cut.

    outputs, inputs: of a tile of W.
    warps, stages: of every program of the launch, those of the shrink included.
    bulk: whether tiles come by the bulk tensor copy engine, which pays when a tile of x is about as
    many bytes as one of W.
    blocks: about how many programs share the product. A matrix of fewer blocks of outputs is split
    along its inputs, into at most eight shares.
    shrink_splits, shrink_columns: as in Form and Blocks.
    """

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    bulk: bool
    blocks: int = 192
    shrink_splits: int = 4
    shrink_columns: int = 256

    def splits(self, num_outputs: int) -> int:
        """Return how many programs share a block's inputs: a power of two."""
        num_blocks = -(-num_outputs // self.outputs)
        splits = 1
        while splits < 8 and num_blocks * splits * 2 <= self.blocks * 4 // 3:
            splits *= 2
        return splits


PRODUCTS = (
    ProductForm(16, 64, 128, 4, 4, bulk=False),
    ProductForm(32, 64, 128, 4, 4, bulk=True),
    ProductForm(64, 64, 64, 4, 5, bulk=True),
)
"""Found by timing on an H200: fewer than 16 columns get no warpgroup instruction, and beyond the
last one's rows the library's product is faster than these tiles."""


def product_form(num_rows: int) -> ProductForm | None:
    """Return how a step of so many rows is cut; None where a library's product is faster."""
    return next((form for form in PRODUCTS if num_rows <= form.rows), None)


AHEAD = 256
"""How many of each output's weights are prefetched before the kernel waits for x."""

MAX_BLOCKS = 1024
MAX_SUMS = 8 * 2**20
"""Counters and partial sums that a split product takes at most."""

# Arguments are grouped by what they describe; a line for each would hide the kernels.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def _product(
    block: "Any", split: "Any", num_blocks: "Any",
    x: "Any", weight: "Any", y: "Any",
    sums: "Any", arrived: "Any", num_rows: "Any", num_outputs: "Any",
    x_stride: "Any", y_stride: "Any",
    INPUTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SHARES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
    weight_tiles: "Any", x_tiles: "Any", BULK: tl.constexpr,
) -> None:
    """y[m, n] = sum_k W[n, k] x[m, k]: one block of outputs, all rows, one share of the inputs.

    AHEAD: weights of a row that are prefetched before the wait for x; 64 make a line of 128 bytes.
    """
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    inside = n < num_outputs
    live = m < num_rows
    share: tl.constexpr = (INPUTS // SHARES + BLOCK_K - 1) // BLOCK_K * BLOCK_K
    start = split * share
    stop = tl.minimum(start + share, INPUTS)
    w_rows = weight + n.to(tl.int64) * INPUTS
    x_rows = x + m.to(tl.int64) * x_stride
    # No kernel writes weights, so their first lines are fetched while the kernel before still runs.
    if PDL:
        ahead = tl.minimum(start + tl.arange(0, AHEAD // 64) * 64, stop - 64)
        first = weight + tl.minimum(n, num_outputs - 1).to(tl.int64) * INPUTS
        prefetch(first[:, None] + ahead[None, :])
        gdc_wait()
    acc = tl.zeros([BLOCK_N, ROWS], dtype=tl.float32)
    if BULK:  # Beyond the matrices' ends the copy engine writes zeros: no mask is needed.
        for k0 in range(start, stop, BLOCK_K):
            acc = tl.dot(weight_tiles.load([block * BLOCK_N, k0]), x_tiles.load([0, k0]).T, acc)
    else:
        for k0 in range(start, stop, BLOCK_K):
            at = k0 + k
            w_mask = inside[:, None]
            x_mask = live[None, :]
            if INPUTS % (SHARES * BLOCK_K) != 0:
                w_mask = w_mask & (at < stop)[None, :]
                x_mask = x_mask & (at < stop)[:, None]
            w_tile = tl.load(w_rows[:, None] + at[None, :], mask=w_mask, other=0.0)
            x_tile = tl.load(x_rows[None, :] + at[:, None], mask=x_mask, other=0.0)
            acc = tl.dot(w_tile, x_tile, acc)
    store_tile(
        acc, y, y, sums, arrived, block, split,
        num_blocks, m, n, live, inside, y_stride, ROWS, BLOCK_N, SHARES, False,
    )


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[*UNSPECIALIZED, "num_rows", "num_shrinks", "num_tile_programs"]
)
def product_kernel(
    weight_tiles: "Any", x_tiles: "Any",
    x: "Any", weight: "Any", y: "Any",
    sums: "Any", arrived: "Any", num_rows: "Any", num_outputs: "Any", y_stride: "Any",
    num_shrinks: "Any", num_tile_programs: "Any",
    a0: "Any", a1: "Any", a2: "Any",
    records: "Any", page_table: "Any", ranks: "Any",
    partials: "Any", summed: "Any", summed_stride: "Any",
    projection0: "Any", projection1: "Any", projection2: "Any", layer: "Any",
    x_stride: "Any", split_width: "Any", num_splits: "Any", positions: "Any",
    INPUTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SHARES: tl.constexpr,
    PRODUCT_K: tl.constexpr, AHEAD: tl.constexpr, BULK: tl.constexpr,
    PROJECTIONS: tl.constexpr, TABLE_PAGES: tl.constexpr, TABLE_LAYERS: tl.constexpr,
    LAYERS: tl.constexpr,
    MAX_RANK: tl.constexpr, HEADER: tl.constexpr, SPLITS: tl.constexpr, SUMMED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, MORE_ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The first num_shrinks programs are the shrink's, the others the product's.

    The shrink's come first, so that their chains of dependent loads overlap the product.
    """
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    if program < num_shrinks:
        shrink_tiles(
            program // num_tile_programs, program % num_tile_programs, num_tile_programs,
            x, a0, a1, a2,
            records, page_table, ranks,
            partials, summed, summed_stride,
            projection0, projection1, projection2, layer, INPUTS,
            x_stride, split_width, num_splits, positions,
            PROJECTIONS, TABLE_PAGES, TABLE_LAYERS, LAYERS,
            MAX_RANK, HEADER, SPLITS, SUMMED, BLOCK_M, BLOCK_R, MORE_ROWS, BLOCK_K, PDL,
        )
    else:
        own = program - num_shrinks
        num_blocks = (tl.num_programs(0) - num_shrinks) // SHARES
        _product(
            own % num_blocks, own // num_blocks, num_blocks,
            x, weight, y,
            sums, arrived, num_rows, num_outputs,
            x_stride, y_stride,
            INPUTS, ROWS, BLOCK_N, PRODUCT_K, SHARES, AHEAD, PDL,
            weight_tiles, x_tiles, BULK,
        )


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[*UNSPECIALIZED, "num_rows", "num_shrinks", "num_tile_programs"]
)
def scaled_product_kernel(
    x_codes: "Any", x_scales: "Any", codes: "Any", scales: "Any", y: "Any",
    sums: "Any", arrived: "Any", num_rows: "Any", num_outputs: "Any", y_stride: "Any",
    num_shrinks: "Any", num_tile_programs: "Any",
    x: "Any", a0: "Any", a1: "Any", a2: "Any",
    records: "Any", page_table: "Any", ranks: "Any",
    partials: "Any", summed: "Any", summed_stride: "Any",
    projection0: "Any", projection1: "Any", projection2: "Any", layer: "Any",
    x_stride: "Any", split_width: "Any", num_splits: "Any", positions: "Any",
    INPUTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SHARES: tl.constexpr,
    PRODUCT_K: tl.constexpr,
    PROJECTIONS: tl.constexpr, TABLE_PAGES: tl.constexpr, TABLE_LAYERS: tl.constexpr,
    LAYERS: tl.constexpr,
    MAX_RANK: tl.constexpr, HEADER: tl.constexpr, SPLITS: tl.constexpr, SUMMED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, MORE_ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The same of weights and activations in fp8 or int8: the shrink reads x, which is not."""
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    if program < num_shrinks:
        shrink_tiles(
            program // num_tile_programs, program % num_tile_programs, num_tile_programs,
            x, a0, a1, a2,
            records, page_table, ranks,
            partials, summed, summed_stride,
            projection0, projection1, projection2, layer, INPUTS,
            x_stride, split_width, num_splits, positions,
            PROJECTIONS, TABLE_PAGES, TABLE_LAYERS, LAYERS,
            MAX_RANK, HEADER, SPLITS, SUMMED, BLOCK_M, BLOCK_R, MORE_ROWS, BLOCK_K, PDL,
        )
    else:
        own = program - num_shrinks
        num_blocks = (tl.num_programs(0) - num_shrinks) // SHARES
        scaled_tile(
            own % num_blocks, own // num_blocks, num_blocks,
            x_codes, x_scales, codes, scales, y, y, sums, arrived,
            num_rows, num_outputs, y_stride,
            INPUTS, ROWS, BLOCK_N, PRODUCT_K, 0, SHARES, False, PDL,
        )


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[*UNSPECIALIZED, "num_rows", "num_shrinks", "num_tile_programs"]
)
def integer_product_kernel(
    x_own: "Any", codes: "Any", scales: "Any", zeros: "Any", y: "Any",
    sums: "Any", arrived: "Any", num_rows: "Any", num_outputs: "Any", own_stride: "Any",
    y_stride: "Any", num_shrinks: "Any", num_tile_programs: "Any",
    x: "Any", a0: "Any", a1: "Any", a2: "Any",
    records: "Any", page_table: "Any", ranks: "Any",
    partials: "Any", summed: "Any", summed_stride: "Any",
    projection0: "Any", projection1: "Any", projection2: "Any", layer: "Any",
    x_stride: "Any", split_width: "Any", num_splits: "Any", positions: "Any",
    INPUTS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, MIDDLE: tl.constexpr,
    HAS_ZEROS: tl.constexpr, RAISED: tl.constexpr,
    ASM0: tl.constexpr, ASM1: tl.constexpr, ASM2: tl.constexpr, ASM3: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SHARES: tl.constexpr,
    PROJECTIONS: tl.constexpr, TABLE_PAGES: tl.constexpr, TABLE_LAYERS: tl.constexpr,
    LAYERS: tl.constexpr,
    MAX_RANK: tl.constexpr, HEADER: tl.constexpr, SPLITS: tl.constexpr, SUMMED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, MORE_ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The same where weights are of 4 bits. x_own: x in the order of the codes."""
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    if program < num_shrinks:
        shrink_tiles(
            program // num_tile_programs, program % num_tile_programs, num_tile_programs,
            x, a0, a1, a2,
            records, page_table, ranks,
            partials, summed, summed_stride,
            projection0, projection1, projection2, layer, INPUTS,
            x_stride, split_width, num_splits, positions,
            PROJECTIONS, TABLE_PAGES, TABLE_LAYERS, LAYERS,
            MAX_RANK, HEADER, SPLITS, SUMMED, BLOCK_M, BLOCK_R, MORE_ROWS, BLOCK_K, PDL,
        )
    else:
        own = program - num_shrinks
        num_blocks = (tl.num_programs(0) - num_shrinks) // SHARES
        integer_tile(
            own % num_blocks, own // num_blocks, num_blocks,
            x_own, codes, scales, zeros, y, y, sums, arrived,
            num_rows, num_outputs, own_stride, y_stride,
            INPUTS, CHUNK, CHUNKS, MIDDLE, HAS_ZEROS, RAISED, ASM0, ASM1, ASM2, ASM3,
            ROWS, BLOCK_N, SHARES, False, PDL,
        )


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[*UNSPECIALIZED, "num_rows", "num_shrinks", "num_tile_programs"]
)
def fp4_product_kernel(
    x_own: "Any", codes: "Any", scales: "Any", outer: "Any", y: "Any",
    sums: "Any", arrived: "Any", num_rows: "Any", num_outputs: "Any", own_stride: "Any",
    y_stride: "Any", num_shrinks: "Any", num_tile_programs: "Any",
    x: "Any", a0: "Any", a1: "Any", a2: "Any",
    records: "Any", page_table: "Any", ranks: "Any",
    partials: "Any", summed: "Any", summed_stride: "Any",
    projection0: "Any", projection1: "Any", projection2: "Any", layer: "Any",
    x_stride: "Any", split_width: "Any", num_splits: "Any", positions: "Any",
    INPUTS: tl.constexpr, IS_NVFP4: tl.constexpr,
    ASM0: tl.constexpr, ASM1: tl.constexpr, ASM2: tl.constexpr, ASM3: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SHARES: tl.constexpr,
    PROJECTIONS: tl.constexpr, TABLE_PAGES: tl.constexpr, TABLE_LAYERS: tl.constexpr,
    LAYERS: tl.constexpr,
    MAX_RANK: tl.constexpr, HEADER: tl.constexpr, SPLITS: tl.constexpr, SUMMED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, MORE_ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The same where weights are nvfp4 or mxfp4. x_own: x as the product sees it."""
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    if program < num_shrinks:
        shrink_tiles(
            program // num_tile_programs, program % num_tile_programs, num_tile_programs,
            x, a0, a1, a2,
            records, page_table, ranks,
            partials, summed, summed_stride,
            projection0, projection1, projection2, layer, INPUTS,
            x_stride, split_width, num_splits, positions,
            PROJECTIONS, TABLE_PAGES, TABLE_LAYERS, LAYERS,
            MAX_RANK, HEADER, SPLITS, SUMMED, BLOCK_M, BLOCK_R, MORE_ROWS, BLOCK_K, PDL,
        )
    else:
        own = program - num_shrinks
        num_blocks = (tl.num_programs(0) - num_shrinks) // SHARES
        fp4_tile(
            own % num_blocks, own // num_blocks, num_blocks,
            x_own, codes, scales, outer, y, y, sums, arrived,
            num_rows, num_outputs, own_stride, y_stride,
            INPUTS, IS_NVFP4, ASM0, ASM1, ASM2, ASM3, ROWS, BLOCK_N, SHARES, False, PDL,
        )

"""Deltas of gate and up beside silu(gate) * up, in steps of many tokens, in Gluon.

    out[t] = silu(gate'[t]) * up'[t],  gate', up' = y[t] with both deltas

Such steps are short of time for what they read and write, not for weights: a separate expand would
read and write gate and up once more. Records, pools and PDL are those of shrink.py, which leaves
the sums of its partial sums; the base model's tokens have tiles of slot -1 behind the others, which
the other kernels skip. Tokens are the wide side of each product.

Triton brings what it loads into a product's layout before it loads the next, so a tile waited for
memory seven times. Gluon leaves the order to the program: gate, up and both B are on their way to
shared memory at once, so a tile waits for its record, for ranks and pages, and for these.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modeling.adapters.kernels.groups import LaunchGroup

COLUMNS = 16
"""Columns of gate that are a multiple of it: copies move 16 bytes."""


def _silu_asm(half: str) -> str:
    """Return PTX of silu(gate) * up for two numbers, each rounded before.

    Triton rounds number by number in the unit of exponentials, and divides in eight operations.
    """
    unpacked = {
        "bf16": "shl.b32 {0}0, {0}, 16; and.b32 {0}1, {0}, 0xffff0000;",
        "f16": "mov.b32 {{l, h}}, {0}; cvt.f32.f16 {0}0, l; cvt.f32.f16 {0}1, h;",
    }[half]
    lines = [".reg .b32 g, u, g0, g1, u0, u1, e; .reg .b16 l, h;"]
    for name, first, second in (("g", "$1", "$2"), ("u", "$3", "$4")):
        lines += [f"cvt.rn.{half}x2.f32 {name}, {second}, {first};", unpacked.format(name)]
    for at in (0, 1):
        # 1 / (1 + 2^(-g log2(e))).
        lines.append(f"mul.f32 e, g{at}, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e;")
        lines.append("add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 e, e;")
        lines.append(f"mul.f32 g{at}, g{at}, e; mul.f32 g{at}, g{at}, u{at};")
    return "{" + " ".join(lines) + f" cvt.rn.{half}x2.f32 $0, g1, g0;}}"


_HALVES = {torch.bfloat16: "bf16", torch.float16: "f16"}
_ASM = {
    dtype: {"ROUND": f"cvt.rn.{half}x2.f32 $0, $2, $1;", "SILU": _silu_asm(half)}
    for dtype, half in _HALVES.items()
}

# Arguments are grouped by what they describe; a line for each would hide the kernels.
# fmt: off


@gluon.jit  # type: ignore[untyped-decorator]
def _copy_rows(
    tile: "Any", bt: "Any", table: "Any", layer: "Any", r: "Any", rank: "Any", n: "Any",
    width: "Any", TABLE_PAGES: gl.constexpr, LAYERS: gl.constexpr,
) -> None:
    """Begin to copy rank rows r of Bt, columns n, to shared memory; zeros beyond the rank."""
    pages = gl.load(table + r // 8, mask=r // 8 < TABLE_PAGES, other=0)
    rows = bt + ((pages.to(gl.int64) * LAYERS + layer) * 8 + r % 8) * width
    mask = gl.expand_dims(r < rank, 1) & gl.expand_dims(n < width, 0)
    at = gl.expand_dims(rows, 1) + gl.expand_dims(n, 0)
    async_copy.async_copy_global_to_shared(tile, at, mask=mask)


@gluon.jit  # type: ignore[untyped-decorator]
def _sums(partials: "Any", rows: "Any", live: "Any", r: "Any", rank: "Any") -> "Any":
    """s[p, r] of one projection; rows: the positions' offsets."""
    mask = gl.expand_dims(live, 1) & gl.expand_dims(r < rank, 0)
    at = gl.expand_dims(rows, 1) + gl.expand_dims(r, 0)
    return gl.load(partials + at, mask=mask, other=0.0)


@gluon.jit  # type: ignore[untyped-decorator]
def _added(total: "Any", s: "Any", b: "Any", ROUND: gl.constexpr) -> "Any":
    """total[p, n] + sum_r s[p, r] b[r, n]; s keeps its precision as a sum of two in b's type."""
    high = gl.inline_asm_elementwise(ROUND, "=r,r,r", [s], dtype=b.dtype, is_pure=True, pack=2)
    # Tensor cores multiply in b's type: what rounding s takes away is multiplied too.
    rest = s - high.to(gl.float32)
    low = gl.inline_asm_elementwise(ROUND, "=r,r,r", [rest], dtype=b.dtype, is_pure=True, pack=2)
    return mma_v2(low, b, mma_v2(high, b, total))


@gluon.jit  # type: ignore[untyped-decorator]
def _output_row(bt: "Any", row: "Any", layer: "Any", width: "Any", n: "Any") -> "Any":
    """Row `row` of layer 0, at another layer: columns n, [1, n]; zeros where there is none."""
    at = (row.to(gl.int64) + layer * 8) * width
    found = gl.load(bt + at + n, mask=(n < width) & (row >= 0), other=0.0)
    return gl.expand_dims(found.to(gl.float32), 0)


@gluon.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["projection0", "projection1", "layer", "positions"]
)
def gated_kernel(
    gate_up: "Any", out: "Any", b0: "Any", b1: "Any",
    records: "Any", page_table: "Any", ranks: "Any", partials: "Any", output_rows: "Any",
    projection0: "Any", projection1: "Any", layer: "Any", positions: "Any", size: "Any",
    PROJECTIONS: gl.constexpr, TABLE_PAGES: gl.constexpr, TABLE_LAYERS: gl.constexpr,
    LAYERS: gl.constexpr,
    MAX_RANK: gl.constexpr, HEADER: gl.constexpr, SPLITS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_R: gl.constexpr, BLOCK_N: gl.constexpr,
    PDL: gl.constexpr, ROUND: gl.constexpr, SILU: gl.constexpr,
) -> None:
    """Program (block of columns, tiles): out[t, n] = silu(gate'[t, n]) * up'[t, n].

    gate_up: [tokens, 2 * size], without deltas; out: [tokens, size]. Tiles of the base model's
    tokens too: they come last.
    """
    if PDL:
        gdc_launch_dependents()
    # The size of the tensor cores' instruction.
    gl.static_assert(BLOCK_M == 16 and BLOCK_R == 16)
    WARPS: gl.constexpr = gl.num_warps()
    WIDE: gl.constexpr = min(32, BLOCK_N // 8)
    COPIES: gl.constexpr = gl.BlockedLayout([1, 8], [32 // WIDE, WIDE], [WARPS, 1], [1, 0])
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    OF_S: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    OF_B: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 2)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    gate_tile = gl.allocate_shared_memory(gate_up.dtype.element_ty, [BLOCK_M, BLOCK_N], SHARED)
    up_tile = gl.allocate_shared_memory(gate_up.dtype.element_ty, [BLOCK_M, BLOCK_N], SHARED)
    b0_tile = gl.allocate_shared_memory(b0.dtype.element_ty, [BLOCK_R, BLOCK_N], SHARED)
    b1_tile = gl.allocate_shared_memory(b1.dtype.element_ty, [BLOCK_R, BLOCK_N], SHARED)
    block = gl.program_id(0) * BLOCK_N
    n = block + gl.arange(0, BLOCK_N, gl.SliceLayout(0, COPIES))
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, COPIES))
    r = gl.arange(0, BLOCK_R, gl.SliceLayout(1, COPIES))
    s_m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, OF_S))
    s_r = gl.arange(0, BLOCK_R, gl.SliceLayout(0, OF_S))
    own_n = block + gl.arange(0, BLOCK_N, gl.SliceLayout(0, PRODUCT))
    num_tiles = gl.load(records + 3)
    for tile in range(gl.program_id(1), num_tiles, gl.num_programs(1)):
        record = records + tile * (HEADER + BLOCK_M)
        slot = gl.load(record)
        first = gl.load(record + 1)
        tokens = gl.load(record + HEADER + m)
        s_live = gl.load(record + HEADER + s_m) >= 0
        # Loaded together and without a branch; the base has neither ranks nor output rows.
        own = slot >= 0
        entry0 = gl.maximum(slot, 0) * PROJECTIONS + projection0
        entry1 = gl.maximum(slot, 0) * PROJECTIONS + projection1
        rank0 = gl.load(ranks + entry0 * TABLE_LAYERS + layer, mask=own, other=0)
        rank1 = gl.load(ranks + entry1 * TABLE_LAYERS + layer, mask=own, other=0)
        scale0 = gl.load(output_rows + entry0 * 2, mask=own, other=-1)
        bias0 = gl.load(output_rows + entry0 * 2 + 1, mask=own, other=-1)
        scale1 = gl.load(output_rows + entry1 * 2, mask=own, other=-1)
        bias1 = gl.load(output_rows + entry1 * 2 + 1, mask=own, other=-1)
        table0 = page_table + entry0 * TABLE_PAGES
        table1 = page_table + entry1 * TABLE_PAGES
        mask = gl.expand_dims(tokens >= 0, 1) & gl.expand_dims(n < size, 0)
        at = gl.expand_dims(tokens.to(gl.int64) * 2 * size, 1) + gl.expand_dims(n, 0)
        _copy_rows(b0_tile, b0, table0, layer, r, rank0, n, size, TABLE_PAGES, LAYERS)
        _copy_rows(b1_tile, b1, table1, layer, r, rank1, n, size, TABLE_PAGES, LAYERS)
        if PDL:
            gdc_wait()
        async_copy.async_copy_global_to_shared(gate_tile, gate_up + at, mask=mask)
        async_copy.async_copy_global_to_shared(up_tile, gate_up + at + size, mask=mask)
        async_copy.commit_group()
        rows = (first + s_m) * MAX_RANK
        up_partials = partials + SPLITS * positions * MAX_RANK
        s0 = _sums(partials, rows, s_live, s_r, rank0)
        s1 = _sums(up_partials, rows, s_live, s_r, rank1)
        async_copy.wait_group(0)
        gate = gate_tile.load(PRODUCT).to(gl.float32)
        up = up_tile.load(PRODUCT).to(gl.float32)
        # A layer that the adapter leaves alone has no output rows, though others have.
        if (rank0 > 0) & (gl.maximum(scale0, bias0) >= 0):
            scale = _output_row(b0, scale0, layer, size, own_n)
            gate += scale * gate + _output_row(b0, bias0, layer, size, own_n)
        if (rank1 > 0) & (gl.maximum(scale1, bias1) >= 0):
            scale = _output_row(b1, scale1, layer, size, own_n)
            up += scale * up + _output_row(b1, bias1, layer, size, own_n)
        gate = _added(gate, s0, b0_tile.load(OF_B), ROUND)
        up = _added(up, s1, b1_tile.load(OF_B), ROUND)
        for row in range(BLOCK_R, gl.maximum(rank0, rank1), BLOCK_R):
            _copy_rows(b0_tile, b0, table0, layer, row + r, rank0, n, size, TABLE_PAGES, LAYERS)
            _copy_rows(b1_tile, b1, table1, layer, row + r, rank1, n, size, TABLE_PAGES, LAYERS)
            async_copy.commit_group()
            s0 = _sums(partials, rows, s_live, row + s_r, rank0)
            s1 = _sums(up_partials, rows, s_live, row + s_r, rank1)
            async_copy.wait_group(0)
            gate = _added(gate, s0, b0_tile.load(OF_B), ROUND)
            up = _added(up, s1, b1_tile.load(OF_B), ROUND)
        # Rounded as the expand rounds them: steps of any number of tokens compute the same.
        product = gl.inline_asm_elementwise(
            SILU, "=r,r,r,r,r", [gate, up], dtype=gate_up.dtype.element_ty, is_pure=True, pack=2
        )
        # Through shared memory, so that a thread stores 16 bytes.
        gate_tile.store(product)
        found = gl.expand_dims(tokens.to(gl.int64) * size, 1) + gl.expand_dims(n, 0)
        gl.store(out + found, gate_tile.load(COPIES), mask=mask)
    # A program without tiles waits too: the next kernel relies on all work before this one.
    if PDL:
        gdc_wait()


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
    constants = {"LAYERS": group.layers, **_ASM[ends[1].dtype]}
    return (*tensors, *group.projections[:2], layer, tokens, size), constants

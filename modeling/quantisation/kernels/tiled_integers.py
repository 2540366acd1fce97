"""Products of many tokens with weights of 4 bits, in Triton: tiles of tokens too.

    y[m, n] = sum_k x[m, k] W[n, k]

W has the numbers that `integers.dequantise` writes, each rounded to x's type, but a program
makes those of its outputs in registers, in which the tensor cores take them; x comes through shared
memory. So results differ from a library's by the order of sums alone. Codes lie as
modeling/kernels/integer_tiles.py says, which has the products of fewer tokens.

Programs of the same outputs run side by side, so that all but one find the codes in the
second-level cache.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modeling.kernels.integer_tiles import (
    MANY,
    assembly,
    integer_arguments,
    integer_constants,
)
from modeling.kernels.launch import Launcher, aligned, has_dependent_launch, launch_options
from modeling.kernels.tiles import store_tile
from modeling.quantisation.kernels.scaled_product import MAX_BLOCKS, MAX_SUMS, product_memory
from sharding.linear_weight import Operands

Pointer = Any


@dataclass(frozen=True)
class TiledCut:
    """How a product of up to `rows` tokens is cut.

    tile, outputs: tokens and outputs of a program. outputs is 32 * warps, one for each thread: with
    fewer the compiler puts the numbers into shared memory.
    blocks: about how many programs are enough; where there are fewer they share the inputs too.
    """

    rows: int
    tile: int
    outputs: int
    warps: int
    stages: int
    blocks: int

    def shares(self, num_outputs: int, chunks: int) -> int:
        """Return how many programs share inputs: a power of two, the same for all `rows`."""
        programs = -(-num_outputs // self.outputs) * -(-self.rows // self.tile)
        cells = programs * self.outputs * self.tile
        shares = 1
        while (
            programs * shares * 2 <= min(self.blocks, 2 * MAX_BLOCKS)
            and cells * shares * 2 <= MAX_SUMS
            and chunks % (shares * 2) == 0
        ):
            shares *= 2
        return shares


_WIDE, _NARROW = (128, 256, 8, 3, 132), (64, 128, 4, 3, 400)

TILED_CUTS = {
    "wide": (TiledCut(128, *_WIDE), TiledCut(192, *_NARROW), TiledCut(512, *_WIDE)),
    "long": (
        TiledCut(128, *_NARROW),
        TiledCut(256, *_WIDE),
        TiledCut(384, *_NARROW),
        TiledCut(512, *_WIDE),
    ),
    "small": (TiledCut(256, *_NARROW),),
}
"""As measured on an H200: of at least MANY outputs, else of at least MANY inputs, and of others. A
library is as fast for more tokens, and faster for codes that stand for other numbers."""

FEW = TiledCut(64, *_NARROW)
FEW_OF_TABLE, FEW_OF_ZEROS = range(4, 65), range(33, 65)
"""Numbers of tokens up to 64 for which that cut is the fastest, where codes stand for other numbers
and where they have zero points."""


def _assembly(dtype: torch.dtype, has_table: bool) -> dict[str, str]:
    """Return what makes two numbers of the codes at each of the four places in two words.

    $1: the words. $2: twice what is subtracted, $3: twice the scale. With a table $2, $3: its
    address, $4, $5: the scale in float32.
    """
    pair = {torch.bfloat16: "bf16x2", torch.float16: "f16x2"}[dtype]
    if not has_table:
        return {
            name: f"{text.removesuffix('}')} mul.{pair} $0, $0, $3;}}"
            for name, text in assembly(dtype).items()
        }
    lookup = "and.b32 c, t, 15; mad.wide.u32 p, c, 4, {0}; ld.global.nc.f32 {1}, [p]; "
    return {
        f"ASM{place}": "{.reg .b32 t, c; .reg .b64 p; .reg .f32 a, b; "
        f"shr.u32 t, $1, {4 * place}; {lookup.format('$2', 'a')}"
        f"shr.u32 t, t, 16; {lookup.format('$3', 'b')}"
        f"mul.f32 a, a, $4; mul.f32 b, b, $5; cvt.rn.{pair}.f32 $0, b, a;}}"
        for place in range(4)
    }


# Arguments are grouped by what they describe; a line for each would hide the kernels.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def made_of_codes(words: "Any", middle: "Any", factors: "Any", ASM: tl.constexpr) -> "Any":
    """Codes at one place of the words, less `middle`, by the factors, in the factors' type."""
    return tl.inline_asm_elementwise(
        ASM, "=r,r,r,r", [words, middle, factors], dtype=factors.dtype, is_pure=True, pack=2
    )


@triton.jit  # type: ignore[untyped-decorator]
def made_of_table(
    words: "Any", address: "Any", factors: "Any", x: "Any", ASM: tl.constexpr
) -> "Any":
    """What codes at one place of the words stand for, by the factors, in the type of x."""
    return tl.inline_asm_elementwise(
        ASM, "=r,r,l,l,r,r", [words, address, factors],
        dtype=x.dtype.element_ty, is_pure=True, pack=2,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(
    words: "Any", beside: "Any", factors: "Any", x: "Any",
    ASM: tl.constexpr, HAS_TABLE: tl.constexpr,
) -> "Any":
    if HAS_TABLE:
        numbers = made_of_table(words, beside, factors, x, ASM)
    else:
        numbers = made_of_codes(words, beside, factors, ASM)
    return numbers


@triton.jit  # type: ignore[untyped-decorator]
def address_of(table: "Any", factors: "Any") -> "Any":
    """The table's address, once for each factor.

    It lies as factors do, so that the compiler makes numbers where the tensor cores take them; a
    number that is the same everywhere would keep it from that.
    """
    return tl.inline_asm_elementwise(
        "mov.b64 $0, $2;", "=l,r,l", [factors, table.to(tl.int64, bitcast=True)],
        dtype=tl.int64, is_pure=True, pack=1,
    )


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])  # type: ignore[untyped-decorator]
def _tiled(
    x: "Pointer", codes: "Pointer", scales: "Pointer", zeros: "Pointer", table: "Pointer",
    bias: "Pointer", y: "Pointer", sums: "Pointer", arrived: "Pointer",
    num_rows: "Any", num_tiles: "Any", num_outputs: "Any", x_stride: int, y_stride: int,
    INPUTS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    MIDDLE: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_TABLE: tl.constexpr, RAISED: tl.constexpr,
    ASM0: tl.constexpr, ASM1: tl.constexpr, ASM2: tl.constexpr, ASM3: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    SHARES: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """One block of outputs, one tile of tokens, one share of the inputs.

    CHUNK: inputs of a chunk. CHUNKS: chunks of a group.
    """
    if PDL:
        gdc_launch_dependents()
    num_blocks = tl.cdiv(num_outputs, BLOCK_N)
    tile = tl.program_id(0) % num_tiles
    block = tl.program_id(0) // num_tiles % num_blocks
    share = tl.program_id(0) // num_tiles // num_blocks
    WORDS: tl.constexpr = CHUNK // 4
    TOTAL: tl.constexpr = INPUTS // CHUNK
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, ROWS)
    word = tl.arange(0, WORDS)
    start = tile * ROWS
    inside, live = n < num_outputs, start + m < num_rows
    # What lies beyond the last output or token is computed as another is, and not stored. Tokens
    # take turns: many programs that read the same one wait for each other.
    row = tl.minimum(n, num_outputs - 1)
    token = (start + m) % num_rows
    first = share * (TOTAL // SHARES)
    step = num_outputs.to(tl.int64) * WORDS
    w_rows = codes + first * step + row * WORDS
    x_rows = x + token.to(tl.int64) * x_stride + first * CHUNK
    at_group = first // CHUNKS * num_outputs + row
    factors = tl.load(scales + at_group)
    zero = row
    if HAS_ZEROS:
        zero = tl.load(zeros + at_group)
    if PDL:
        gdc_wait()
    acc = tl.zeros([BLOCK_N, ROWS], dtype=tl.float32)
    for chunk in range(TOTAL // SHARES):
        # The next chunk's are loaded now: loads of 16 bits are not pipelined.
        at_group = tl.minimum(first + chunk + 1, TOTAL - 1) // CHUNKS * num_outputs + row
        next_factors = tl.load(scales + at_group)
        next_zero = row
        if HAS_ZEROS:
            next_zero = tl.load(zeros + at_group)
            # Whole numbers up to 143, or 1039 in float16: exact.
            beside = (zero.to(tl.float32) + RAISED).to(x.dtype.element_ty)[:, None]
        elif HAS_TABLE:
            beside = address_of(table, factors)[:, None]
        else:
            beside = tl.full([BLOCK_N, WORDS], RAISED + MIDDLE, x.dtype.element_ty)
        words = tl.load(w_rows[:, None] + word[None, :])
        xs = x_rows[None, :] + word[:, None]
        for place in tl.static_range(4):
            w = _numbers(
                words, beside, factors[:, None], x,
                ASM0 if place == 0 else ASM1 if place == 1 else ASM2 if place == 2 else ASM3,
                HAS_TABLE,
            )
            acc = tl.dot(w, tl.load(xs + place * WORDS), acc)
        factors, zero = next_factors, next_zero
        w_rows += step
        x_rows += CHUNK
    store_tile(
        acc, y + start.to(tl.int64) * y_stride, bias, sums, arrived, block * num_tiles + tile,
        share, num_blocks * num_tiles, m, n, live, inside, y_stride,
        ROWS, BLOCK_N, SHARES, HAS_BIAS,
    )


# fmt: on

_launch_tiled = Launcher(_tiled)


def tiled_cut(operands: Operands) -> TiledCut | None:
    """Return how a product is cut; None where numbers are made for a library's."""
    (rows, inputs), (_, outputs, _) = operands.x.shape, operands.weight.shape
    assert operands.groups is not None
    if operands.groups.table is not None:
        return FEW if rows in FEW_OF_TABLE else None
    if rows <= FEW.rows:
        return FEW if operands.groups.zeros is not None and rows in FEW_OF_ZEROS else None
    form = "wide" if outputs >= MANY else "long" if inputs >= MANY else "small"
    return next((cut for cut in TILED_CUTS[form] if rows <= cut.rows), None)


def tiled_product(operands: Operands, bias: Tensor | None, y: Tensor, cut: TiledCut) -> Tensor:
    """Write the product of x [tokens, in] and codes into y [tokens, out]; x is contiguous."""
    x, codes, groups = operands.x, operands.weight, operands.groups
    assert groups is not None
    assert groups.table is not None or groups.scales.dtype == x.dtype, groups.scales.dtype
    (rows, inputs), (chunks, outputs, _) = x.shape, codes.shape
    assert rows <= cut.rows, (rows, cut)
    shares, tiles = cut.shares(outputs, chunks), -(-rows // cut.tile)
    dependent = has_dependent_launch(x.device)
    sums, arrived = product_memory(x.device, torch.cuda.current_stream(x.device).cuda_stream)
    sizes = {"ROWS": cut.tile, "BLOCK_N": cut.outputs, "SHARES": shares}
    own = _assembly(x.dtype, groups.table is not None)
    _launch_tiled(
        (x.device, x.dtype, y.dtype, inputs, outputs, cut, shares, bias is None, chunks,
         groups.size, groups.middle, groups.zeros is None, groups.table is None,
         groups.scales.dtype, aligned(x, codes, y), y.stride(0)),
        (tiles * -(-outputs // cut.outputs) * shares,),
        (*integer_arguments(operands), groups.scales if groups.table is None else groups.table,
         y if bias is None else bias, y, sums, arrived,
         rows, tiles, outputs, x.stride(0), y.stride(0)),
        {**integer_constants(operands), **own, **sizes, "HAS_TABLE": groups.table is not None,
         "HAS_BIAS": bias is not None, "PDL": dependent},
        {"num_warps": cut.warps, "num_stages": cut.stages, **launch_options(dependent)},
    )  # fmt: skip
    return y

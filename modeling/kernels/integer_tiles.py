"""Products of few tokens with weights of 4 bits, in Triton: what kernels of several rooms share.

    y[m, n] = sum_g s[g, n] * sum_k x[m, k] (W[n, k] - z[g, n])     k of group g

Codes lie in chunks of inputs, see modeling/quantisation/integers.py: a word of 16 bits has four
codes whose inputs are a quarter of a chunk apart, so that the codes of one place in neighbouring
words belong to neighbouring inputs. A code in the lowest bits of a raised number of half precision
adds to it: two are made of a register by a shift, a mask and a subtraction, exactly.

Up to 16 tokens modeling/kernels/integer_rows.py is faster.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from modeling.kernels.tiles import ProductCut, cut_of, prefetch, store_tile
from sharding.linear_weight import OperandGroups, Operands

CUTS = (
    ProductCut(8, 64, 128, 4, 4, blocks=680),
    ProductCut(16, 64, 128, 4, 4, blocks=680),
    ProductCut(64, 128, 128, 4, 4, blocks=192),
)
"""Eight tokens take the tensor cores' instruction of a warp, more that of four warps. Beyond 64
numbers are made and multiplied by a library."""

MANY = 8192
"""Of outputs, or of inputs: from here on a product is cut otherwise."""

WIDE = ProductCut(32, 256, 128, 8, 3, blocks=132)
"""Of 17 to 32 tokens, where codes have no zero points or there are MANY outputs: programs that read
x half as often."""

NARROW, FEW_OUTPUTS = ProductCut(64, 64, 128, 4, 4, blocks=192), 4096
"""Of 33 to 64 tokens, up to FEW_OUTPUTS, without zero points: fewer shares are left to add."""

RAISED = {torch.bfloat16: 128, torch.float16: 1024}
"""Numbers of which the lowest four bits are the lowest four of a whole number."""

_BITS = {torch.bfloat16: ("0x43004300", "bf16x2"), torch.float16: ("0x64006400", "f16x2")}
"""Two of them in a register, and what PTX calls the pair."""


def assembly(dtype: torch.dtype) -> dict[str, str]:
    """Return what makes two numbers of the codes at each of the four places in two words.

    $1: the words. $2: twice what is subtracted.
    """
    bits, pair = _BITS[dtype]
    return {
        f"ASM{place}": f"{{.reg .b32 t; shr.u32 t, $1, {4 * place}; "
        f"lop3.b32 t, t, 0x000f000f, {bits}, 0xea; sub.{pair} $0, t, $2;}}"
        for place in range(4)
    }


# Arguments are grouped by what they describe; a line for each would hide the kernels.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(
    words: "Any", middle: "Any", ASM: tl.constexpr
) -> "Any":
    """Codes at one place of the words, less `middle`, in middle's type."""
    return tl.inline_asm_elementwise(
        ASM, "=r,r,r", [words, middle], dtype=middle.dtype, is_pure=True, pack=2
    )


@triton.jit  # type: ignore[untyped-decorator]
def integer_tile(
    block: "Any", share: "Any", num_blocks: "Any",
    x: "Any", codes: "Any", scales: "Any", zeros: "Any",
    bias: "Any", y: "Any", sums: "Any", arrived: "Any",
    num_rows: "Any", num_outputs: "Any", x_stride: "Any", y_stride: "Any",
    INPUTS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    MIDDLE: tl.constexpr, HAS_ZEROS: tl.constexpr, RAISED: tl.constexpr,
    ASM0: tl.constexpr, ASM1: tl.constexpr, ASM2: tl.constexpr, ASM3: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    SHARES: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """One block of outputs, all tokens, one share of the inputs.

    CHUNK: inputs of a chunk. CHUNKS: chunks of a group. MIDDLE: the zero point, or with zeros what
    is subtracted of codes first.
    """
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, ROWS)
    WORDS: tl.constexpr = CHUNK // 4
    word = tl.arange(0, WORDS)
    inside, live = n < num_outputs, m < num_rows
    chunks: tl.constexpr = INPUTS // CHUNK // SHARES
    first = share * chunks
    row = tl.minimum(n, num_outputs - 1)
    step = num_outputs.to(tl.int64) * WORDS
    w_rows = codes + first * step + row * WORDS
    x_rows = x + m.to(tl.int64) * x_stride + first * CHUNK
    if PDL:
        ahead = tl.minimum(tl.arange(0, 4), chunks - 1) * step
        prefetch(w_rows[:, None] + ahead[None, :])
        gdc_wait()
    acc = tl.zeros([BLOCK_N, ROWS], dtype=tl.float32)
    at_group = first // CHUNKS * num_outputs + row
    factors = tl.load(scales + at_group)
    zero = row
    if HAS_ZEROS:
        zero = tl.load(zeros + at_group)
    middle = tl.full([BLOCK_N, WORDS], RAISED + MIDDLE, x.dtype.element_ty)
    for chunk in range(chunks):
        # The next chunk's are loaded now: loads that no product takes are not pipelined.
        at_group = tl.minimum(first + chunk + 1, INPUTS // CHUNK - 1) // CHUNKS * num_outputs + row
        next_factors = tl.load(scales + at_group)
        next_zero = row
        if HAS_ZEROS:
            next_zero = tl.load(zeros + at_group)
        words = tl.load(w_rows[:, None] + word[None, :])
        xs = x_rows[None, :] + word[:, None]
        x0 = tl.load(xs, mask=live[None, :], other=0.0)
        w = _numbers(words, middle, ASM0)
        part = tl.dot(w, x0)
        x1 = tl.load(xs + WORDS, mask=live[None, :], other=0.0)
        w = _numbers(words, middle, ASM1)
        part = tl.dot(w, x1, part)
        x2 = tl.load(xs + 2 * WORDS, mask=live[None, :], other=0.0)
        w = _numbers(words, middle, ASM2)
        part = tl.dot(w, x2, part)
        x3 = tl.load(xs + 3 * WORDS, mask=live[None, :], other=0.0)
        w = _numbers(words, middle, ASM3)
        part = tl.dot(w, x3, part)
        if HAS_ZEROS:
            # A number for each output would keep the codes from going straight to the product.
            total = tl.sum(x0.to(tl.float32) + x1.to(tl.float32), axis=0)
            total += tl.sum(x2.to(tl.float32) + x3.to(tl.float32), axis=0)
            part -= (zero.to(tl.float32) - MIDDLE)[:, None] * total[None, :]
        acc += part * factors.to(tl.float32)[:, None]
        factors, zero = next_factors, next_zero
        w_rows += step
        x_rows += CHUNK
    store_tile(
        acc, y, bias, sums, arrived, block, share,
        num_blocks, m, n, live, inside, y_stride, ROWS, BLOCK_N, SHARES, HAS_BIAS,
    )


# fmt: on


def tile_cut(rows: int, groups: OperandGroups, outputs: int) -> ProductCut:
    """Return how a product of so many tokens, which `CUTS` must hold, is cut in a launch alone."""
    is_plain = groups.zeros is None
    if (is_plain or outputs >= MANY) and CUTS[1].rows < rows <= WIDE.rows:
        return WIDE
    if is_plain and outputs <= FEW_OUTPUTS and WIDE.rows < rows <= NARROW.rows:
        return NARROW
    found = cut_of(CUTS, rows)
    assert found is not None, rows
    return found


def tile_options(cut: ProductCut, rows: int, shares: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return a kernel's sizes and its options of compilation."""
    height = max(min(cut.rows, 16), triton.next_power_of_2(rows))
    sizes = {"ROWS": height, "BLOCK_N": cut.outputs, "SHARES": shares}
    return sizes, {"num_warps": cut.warps, "num_stages": cut.stages}


def integer_arguments(operands: Operands) -> tuple[Tensor, ...]:
    """Return what all kernels of these products read first."""
    codes, groups = operands.weight, operands.groups
    assert groups is not None
    zeros = codes if groups.zeros is None else groups.zeros
    return operands.x, codes.view(torch.int16), groups.scales, zeros


def integer_constants(operands: Operands) -> dict[str, Any]:
    """Return what all kernels of these products are compiled for."""
    x, codes, groups = operands.x, operands.weight, operands.groups
    assert groups is not None
    chunk = x.shape[1] // len(codes)
    return {
        "INPUTS": x.shape[1], "CHUNK": chunk, "CHUNKS": groups.size // chunk,
        "MIDDLE": groups.middle if groups.zeros is None else 8,
        "HAS_ZEROS": groups.zeros is not None, "RAISED": RAISED[x.dtype], **assembly(x.dtype),
    }  # fmt: skip

"""Numbers of 4 bits (e2m1) in Triton, nvfp4's and mxfp4's: what kernels of several rooms share.

    mxfp4   W[o, i] = code[o, i] * 2 ** (scale[o, i / 32] - 127)
    nvfp4   W[o, i] = code[o, i] * scale[o, i / 16] * outer[o]

A word of 16 bits has codes of four inputs, each of another quarter of 128, so that 32 words of a
row are 32 neighbours of each quarter, with one scale or two. The bits of a code are those of a
number of bfloat16, but for the exponent's beginning, so two are made of a register by masks, and
multiplied by the scale, exactly. nvfp4's `outer` multiplies whole sums.
"""

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from modeling.kernels.tiles import ProductCut, prefetch, store_tile

FEW, MORE = ProductCut(32, 128, 128, 4, 3, blocks=680), ProductCut(64, 128, 128, 4, 3, blocks=192)
FEW_LONG, MORE_WIDE = (
    replace(FEW, outputs=256, warps=8, blocks=192),
    replace(MORE, outputs=256, warps=8),
)
"""Of products of linear maps, as measured on an H200: those of many inputs, or of many outputs,
are faster in larger blocks."""

MANY = 8192
"""Of inputs, or of outputs."""

ASSEMBLY = {
    f"ASM{quarter}": (
        "{.reg .b32 s, t; "
        f"shl.b32 s, $1, {12 - 4 * quarter}; and.b32 s, s, 0x80008000; "
        + (
            f"shl.b32 t, $1, {6 - 4 * quarter}; "
            if quarter < 2
            else f"shr.b32 t, $1, {4 * quarter - 6}; "
        )
        + "lop3.b32 t, t, 0x01c001c0, s, 0xea; mul.bf16x2 $0, t, $2;}"
    )
    for quarter in range(4)
}
"""Makes two numbers of the codes at a quarter in two words. $1: the words. $2: twice the factor."""


# Arguments are grouped by what they describe.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def factors_of(
    scales: "Any", QUARTER: tl.constexpr, IS_NVFP4: tl.constexpr, LESS: tl.constexpr
) -> "Any":
    """What codes at one quarter are multiplied with, as bfloat16 in both halves of an int32.

    A code's bits are a number of 2 ** -126 of what it stands for. scales: of which the byte QUARTER
    counts. LESS: the power of two by which factors are too small: 8 for nvfp4, as 2 ** 126 times
    its largest is no number.
    """
    byte = (scales >> (8 * QUARTER)) & 255
    if IS_NVFP4:
        # These bits are a float32 of 2 ** -120 of the scale; 2 ** 119 twice.
        number = (byte << 20).to(tl.float32, bitcast=True)
        number = number * 6.646139978924579e35 * 6.646139978924579e35
        high = number.to(tl.int32, bitcast=True)
    else:
        high = (byte + (126 - LESS)) << 23
    return high | ((high >> 16) & 65535)


@triton.jit  # type: ignore[untyped-decorator]
def made_of_codes(words: "Any", factors: "Any", ASM: tl.constexpr) -> "Any":
    """Numbers of the codes at the quarter that ASM takes; factors: of each word."""
    # $2 and $3 are alike.
    return tl.inline_asm_elementwise(
        ASM, "=r,r,r,r", [words, factors], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(
    words: "Any", scales: "Any",
    QUARTER: tl.constexpr, IS_NVFP4: tl.constexpr, LESS: tl.constexpr, ASM: tl.constexpr,
) -> "Any":
    """Numbers of words at a quarter; scales: of each."""
    return made_of_codes(words, factors_of(scales, QUARTER, IS_NVFP4, LESS), ASM)


@triton.jit  # type: ignore[untyped-decorator]
def add_products(
    acc: "Any", w_rows: "Any", scales: "Any", x_rows: "Any", live: "Any", left: "Any",
    FIRST: tl.constexpr, WORDS: tl.constexpr, IS_NVFP4: tl.constexpr, LESS: tl.constexpr,
    ASM0: tl.constexpr, ASM1: tl.constexpr, ASM2: tl.constexpr, ASM3: tl.constexpr,
) -> "Any":
    """acc [rows, tokens] and the products of WORDS words of a chunk, from FIRST on, and x.

    w_rows, x_rows: where the chunk begins. scales: [rows], which those words share. left: inputs
    from the chunk's first one on. Scales are spread before factors are made of them, so that they
    alone, and not every factor, go through shared memory to the threads that have the words.
    """
    word = FIRST + tl.arange(0, WORDS)
    words = tl.load(w_rows[:, None] + word[None, :])
    shared = scales[:, None]
    xs = x_rows[None, :] + word[:, None]
    x0 = tl.load(xs, mask=live[None, :], other=0.0)
    acc = tl.dot(_numbers(words, shared, 0, IS_NVFP4, LESS, ASM0), x0, acc)
    x1 = tl.load(xs + 32, mask=live[None, :] & (left > 32), other=0.0)
    acc = tl.dot(_numbers(words, shared, 1, IS_NVFP4, LESS, ASM1), x1, acc)
    x2 = tl.load(xs + 64, mask=live[None, :] & (left > 64), other=0.0)
    acc = tl.dot(_numbers(words, shared, 2, IS_NVFP4, LESS, ASM2), x2, acc)
    x3 = tl.load(xs + 96, mask=live[None, :] & (left > 96), other=0.0)
    return tl.dot(_numbers(words, shared, 3, IS_NVFP4, LESS, ASM3), x3, acc)


@triton.jit  # type: ignore[untyped-decorator]
def fp4_tile(
    block: "Any", share: "Any", num_blocks: "Any",
    x: "Any", codes: "Any", scales: "Any", outer: "Any",
    bias: "Any", y: "Any", sums: "Any", arrived: "Any",
    num_rows: "Any", num_outputs: "Any", x_stride: "Any", y_stride: "Any",
    INPUTS: tl.constexpr, IS_NVFP4: tl.constexpr,
    ASM0: tl.constexpr, ASM1: tl.constexpr, ASM2: tl.constexpr, ASM3: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    SHARES: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """One block of outputs, all tokens, one share of the inputs.

    codes: int16 [INPUTS / 128, out, 32]. scales: int32 [INPUTS / 128, 2 or 1, out]. outer: float64
    [out], of nvfp4.
    """
    # Words of scales of a chunk's row.
    EACH: tl.constexpr = 2 if IS_NVFP4 else 1
    chunks: tl.constexpr = INPUTS // 128 // SHARES
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, ROWS)
    inside, live = n < num_outputs, m < num_rows
    first = share * chunks
    row = tl.minimum(n, num_outputs - 1)
    step = num_outputs.to(tl.int64) * 32
    w_rows = codes + first * step + row * 32
    s_rows = scales + first * EACH * num_outputs + row
    x_rows = x + m.to(tl.int64) * x_stride + first * 128
    if PDL:
        ahead = tl.minimum(tl.arange(0, 4), chunks - 1) * step
        prefetch(w_rows[:, None] + ahead[None, :])
    s0 = tl.load(s_rows)
    s1 = tl.load(s_rows + num_outputs) if IS_NVFP4 else s0
    if PDL:
        gdc_wait()
    acc = tl.zeros([BLOCK_N, ROWS], dtype=tl.float32)
    for chunk in range(chunks):
        # The next chunk's are loaded now: loads that no product takes are not pipelined.
        later = s_rows + tl.minimum(chunk + 1, chunks - 1) * EACH * num_outputs
        next_s0 = tl.load(later)
        next_s1 = tl.load(later + num_outputs) if IS_NVFP4 else next_s0
        acc = add_products(
            acc, w_rows, s0, x_rows, live, 128, 0, 32 // EACH, IS_NVFP4, 8, ASM0, ASM1, ASM2, ASM3
        )
        if IS_NVFP4:
            acc = add_products(
                acc, w_rows, s1, x_rows, live, 128, 16, 16, IS_NVFP4, 8, ASM0, ASM1, ASM2, ASM3
            )
        s0, s1 = next_s0, next_s1
        w_rows += step
        x_rows += 128
    acc *= 256.0
    if IS_NVFP4:
        acc *= tl.load(outer + row).to(tl.float32)[:, None]
    store_tile(
        acc, y, bias, sums, arrived, block, share,
        num_blocks, m, n, live, inside, y_stride, ROWS, BLOCK_N, SHARES, HAS_BIAS,
    )


# fmt: on


def tile_cut(rows: int, inputs: int, outputs: int) -> ProductCut:
    """Return how a product of up to 64 tokens is cut."""
    assert rows <= MORE.rows, rows
    if rows <= FEW.rows:
        return FEW_LONG if inputs >= MANY else FEW
    return MORE_WIDE if outputs >= MANY else MORE

"""Experts in nvfp4 and mxfp4, in Triton: the part of stored_experts.py that reads them.

    mxfp4   W[o, i] = code[o, i] * 2 ** (scale[o, i / 32] - 127)
    nvfp4   W[o, i] = code[o, i] * scale[o, i / 16] * outer[o]

A word of 16 bits has codes of four inputs, each of another quarter of 128, so that 32 words of a
row are 32 neighbours of each quarter, with one scale or two. The bits of a code are those of a
number of bfloat16, but for the exponent's beginning, so two are made of a register by masks, and
multiplied by the scale, exactly. nvfp4's `outer` multiplies whole sums.
"""

from typing import Any

import triton
import triton.language as tl

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
def factors_of(scales: "Any", QUARTER: tl.constexpr, IS_NVFP4: tl.constexpr) -> "Any":
    """What codes at one quarter are multiplied with, bfloat16; its scales are the byte QUARTER.

    A code's bits are a number of 2 ** -126 of what it stands for.
    """
    byte = (scales >> (8 * QUARTER)) & 255
    if IS_NVFP4:
        exponent = (byte >> 3) & 15
        # Eighths of 2 ** (exponent - 7), or of 2 ** -6 where the exponent is 0.
        eighths = (byte & 7) + tl.where(exponent > 0, 8, 0)
        # 2 ** 118 times the scale, as 2 ** 126 times the largest is no number: see `of_fp4`.
        power = (tl.maximum(exponent, 1) + 235) << 23
        factors = (eighths.to(tl.float32) * power.to(tl.float32, bitcast=True)).to(tl.bfloat16)
    else:
        factors = ((byte + 126) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return factors


@triton.jit  # type: ignore[untyped-decorator]
def made_of_codes(words: "Any", factors: "Any", ASM: tl.constexpr) -> "Any":
    """Numbers of the codes at the quarter that ASM takes."""
    return tl.inline_asm_elementwise(
        ASM, "=r,r,r", [words, factors], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(
    words: "Any", first: "Any", second: "Any",
    QUARTER: tl.constexpr, IS_NVFP4: tl.constexpr, ASM: tl.constexpr,
) -> "Any":
    """The same of words [rows, 32]; first, second: scales [rows] of their halves, or one of all."""
    factors = factors_of(first, QUARTER, IS_NVFP4)[:, None]
    if IS_NVFP4:
        others = factors_of(second, QUARTER, IS_NVFP4)[:, None]
        factors = tl.where(tl.arange(0, 32)[None, :] < 16, factors, others)
    return made_of_codes(words, factors, ASM)


@triton.jit  # type: ignore[untyped-decorator]
def of_fp4(
    x: "Any", codes: "Any", scales: "Any", outer: "Any",
    expert: "Any", row: "Any", at: "Any", live: "Any",
    HEIGHT: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
    IS_NVFP4: tl.constexpr,
    ASM0: tl.constexpr, ASM1: tl.constexpr, ASM2: tl.constexpr, ASM3: tl.constexpr,
) -> "Any":
    """Sums [ROWS, PAIRS] of an expert's rows and x's rows `at`."""
    CHUNKS: tl.constexpr = (INPUTS + 127) // 128
    # Words of scales of a chunk's row.
    EACH: tl.constexpr = 2 if IS_NVFP4 else 1
    word = tl.arange(0, 32)
    first = codes + (expert * CHUNKS * HEIGHT + row)[:, None] * 32 + word[None, :]
    s_rows = scales + expert * (CHUNKS * EACH * HEIGHT) + row
    x_rows = x + at[None, :] * INPUTS + word[:, None]
    s0 = tl.load(s_rows)
    s1 = tl.load(s_rows + HEIGHT) if IS_NVFP4 else s0
    acc = tl.zeros([ROWS, PAIRS], dtype=tl.float32)
    for chunk in range(CHUNKS):
        # The next chunk's are loaded now: loads that no product takes are not pipelined.
        later = s_rows + tl.minimum(chunk + 1, CHUNKS - 1) * (EACH * HEIGHT)
        next_s0 = tl.load(later)
        next_s1 = tl.load(later + HEIGHT) if IS_NVFP4 else next_s0
        words = tl.load(first + chunk * (HEIGHT * 32))
        xs = x_rows + chunk * 128
        left = INPUTS - chunk * 128
        x0 = tl.load(xs, mask=live[None, :], other=0.0)
        acc = tl.dot(_numbers(words, s0, s1, 0, IS_NVFP4, ASM0), x0, acc)
        mask = live[None, :] & (left > 32)
        x1 = tl.load(xs + 32, mask=mask, other=0.0)
        acc = tl.dot(_numbers(words, s0, s1, 1, IS_NVFP4, ASM1), x1, acc)
        mask = live[None, :] & (left > 64)
        x2 = tl.load(xs + 64, mask=mask, other=0.0)
        acc = tl.dot(_numbers(words, s0, s1, 2, IS_NVFP4, ASM2), x2, acc)
        mask = live[None, :] & (left > 96)
        x3 = tl.load(xs + 96, mask=mask, other=0.0)
        acc = tl.dot(_numbers(words, s0, s1, 3, IS_NVFP4, ASM3), x3, acc)
        s0, s1 = next_s0, next_s1
    if IS_NVFP4:
        # Its factors are 2 ** 8 too small.
        acc *= tl.load(outer + expert * HEIGHT + row)[:, None] * 256.0
    return acc

"""Experts in mxfp4, in Triton: the part of stored_experts.py that reads them.

    W[o, i] = code[o, i] * 2 ** (scale[o, i / 32] - 127)

Codes come packed as `modeling.quantisation.mxfp4.pack` does it: a word of 16 bits has codes of four
inputs that do not share a scale, so that 32 words of a row are 32 neighbours of each of four
scales. The bits of a code are those of a number of bfloat16, but for the exponent's beginning, so
two are made of a register by masks, and multiplied by a power of two, exactly.
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
def made_of_codes(
    words: "Any", scales: "Any", QUARTER: tl.constexpr, ASM: tl.constexpr
) -> "Any":
    """Numbers of the codes at one quarter; scales: the quarter's is the byte QUARTER."""
    # A code's bits are a number of 2 ** -126 of what it stands for.
    power = (((scales >> (8 * QUARTER)) & 255) + 126) << 7
    factors = power.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.inline_asm_elementwise(
        ASM, "=r,r,r", [words, factors], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit  # type: ignore[untyped-decorator]
def of_mxfp4(
    x: "Any", codes: "Any", scales: "Any", expert: "Any", row: "Any", at: "Any", live: "Any",
    HEIGHT: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
    ASM0: tl.constexpr, ASM1: tl.constexpr, ASM2: tl.constexpr, ASM3: tl.constexpr,
) -> "Any":
    """Sums [ROWS, PAIRS] of an expert's rows and x's rows `at`."""
    CHUNKS: tl.constexpr = (INPUTS + 127) // 128
    word = tl.arange(0, 32)
    first = codes + (expert * CHUNKS * HEIGHT + row)[:, None] * 32 + word[None, :]
    s_rows = scales + expert * CHUNKS * HEIGHT + row
    x_rows = x + at[None, :] * INPUTS + word[:, None]
    factors = tl.load(s_rows)
    acc = tl.zeros([ROWS, PAIRS], dtype=tl.float32)
    for chunk in range(CHUNKS):
        # The next chunk's are loaded now: loads that no product takes are not pipelined.
        next_factors = tl.load(s_rows + tl.minimum(chunk + 1, CHUNKS - 1) * HEIGHT)
        words = tl.load(first + chunk * (HEIGHT * 32))
        own = factors[:, None]
        xs = x_rows + chunk * 128
        left = INPUTS - chunk * 128
        x0 = tl.load(xs, mask=live[None, :], other=0.0)
        acc = tl.dot(made_of_codes(words, own, 0, ASM0), x0, acc)
        mask = live[None, :] & (left > 32)
        x1 = tl.load(xs + 32, mask=mask, other=0.0)
        acc = tl.dot(made_of_codes(words, own, 1, ASM1), x1, acc)
        mask = live[None, :] & (left > 64)
        x2 = tl.load(xs + 64, mask=mask, other=0.0)
        acc = tl.dot(made_of_codes(words, own, 2, ASM2), x2, acc)
        mask = live[None, :] & (left > 96)
        x3 = tl.load(xs + 96, mask=mask, other=0.0)
        acc = tl.dot(made_of_codes(words, own, 3, ASM3), x3, acc)
        factors = next_factors
    return acc

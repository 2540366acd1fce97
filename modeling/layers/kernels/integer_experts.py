"""Experts in integers of 4 bits, in Triton: the part of stored_experts.py that reads them.

    W[o, i] = round((code[o, i] - zero[o, g(i)]) * scale[o, g(i)])

Codes lie as those of mxfp4 do: a word of 16 bits has codes of four inputs, each of another quarter
of 128, so that 32 words of a row are 32 neighbours of each quarter. A group has whole quarters. A
code in the lowest bits of a raised number of half precision adds to it: two numbers are made of a
register by a shift, a mask, a subtraction and a product, rounded as the reference does it.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from modeling.kernels import integer_tiles

# Arguments are grouped by what they describe.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def made_of_words(words: "Any", raised: "Any", factors: "Any", ASM: tl.constexpr) -> "Any":
    """Numbers of the codes at one quarter, in the factors' type; raised: what is subtracted."""
    return tl.inline_asm_elementwise(
        ASM, "=r,r,r,r", [words, raised, factors], dtype=factors.dtype, is_pure=True, pack=2
    )


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(
    words: "Any", factors: "Any", zero: "Any",
    MIDDLE: tl.constexpr, HAS_ZEROS: tl.constexpr, RAISED: tl.constexpr, ASM: tl.constexpr,
) -> "Any":
    """The same; factors, zero: of each row."""
    if HAS_ZEROS:
        # Whole numbers up to 143, or 1039 in float16: exact.
        raised = (zero.to(tl.float32) + RAISED).to(factors.dtype)
    else:
        raised = tl.full(factors.shape, RAISED + MIDDLE, tl.float32).to(factors.dtype)
    return made_of_words(words, raised[:, None], factors[:, None], ASM)


@triton.jit  # type: ignore[untyped-decorator]
def _shared(
    scales: "Any", zeros: "Any", first: "Any",
    HEIGHT: tl.constexpr, INPUTS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
) -> "Any":
    """Scales and zero points of the group of input `first`, or of the last one."""
    at = tl.minimum(first // GROUP, (INPUTS - 1) // GROUP) * HEIGHT
    factors = tl.load(scales + at)
    zero = factors
    if HAS_ZEROS:
        zero = tl.load(zeros + at)
    return factors, zero


@triton.jit  # type: ignore[untyped-decorator]
def _inputs(
    x_rows: "Any", order: "Any", first: "Any", live: "Any",
    INPUTS: tl.constexpr, ORDERED: tl.constexpr,
) -> "Any":
    """x at 32 inputs of the groups' order."""
    k = first + tl.arange(0, 32)
    inside = live[None, :] & (first < INPUTS)
    if ORDERED:
        k = tl.load(order + k, mask=k < INPUTS, other=0)
    return tl.load(x_rows + k[:, None], mask=inside, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def of_integers(
    x: "Any", codes: "Any", scales: "Any", zeros: "Any", order: "Any",
    expert: "Any", row: "Any", at: "Any", live: "Any",
    HEIGHT: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
    GROUP: tl.constexpr, MIDDLE: tl.constexpr, HAS_ZEROS: tl.constexpr, ORDERED: tl.constexpr,
    RAISED: tl.constexpr,
    ASM0: tl.constexpr, ASM1: tl.constexpr, ASM2: tl.constexpr, ASM3: tl.constexpr,
) -> "Any":
    """Sums [ROWS, PAIRS] of an expert's rows and x's rows `at`.

    GROUP: inputs of a group, 32, 64, or whole chunks of 128; the last group may have less.
    """
    CHUNKS: tl.constexpr = (INPUTS + 127) // 128
    GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    word = tl.arange(0, 32)
    first = codes + (expert * CHUNKS * HEIGHT + row)[:, None] * 32 + word[None, :]
    s_rows = scales + expert * GROUPS * HEIGHT + row
    z_rows = zeros + expert * GROUPS * HEIGHT + row
    x_rows = x + at[None, :] * INPUTS
    o_rows = order + expert * INPUTS
    s0, z0 = _shared(s_rows, z_rows, 0, HEIGHT, INPUTS, GROUP, HAS_ZEROS)
    if GROUP < 128:
        s2, z2 = _shared(s_rows, z_rows, 64, HEIGHT, INPUTS, GROUP, HAS_ZEROS)
    if GROUP < 64:
        s1, z1 = _shared(s_rows, z_rows, 32, HEIGHT, INPUTS, GROUP, HAS_ZEROS)
        s3, z3 = _shared(s_rows, z_rows, 96, HEIGHT, INPUTS, GROUP, HAS_ZEROS)
    acc = tl.zeros([ROWS, PAIRS], dtype=tl.float32)
    for chunk in range(CHUNKS):
        # The next chunk's are loaded now: loads that no product takes are not pipelined.
        k = chunk * 128
        later = k + 128
        f0, p0 = s0, z0
        s0, z0 = _shared(s_rows, z_rows, later, HEIGHT, INPUTS, GROUP, HAS_ZEROS)
        f1, p1, f2, p2, f3, p3 = f0, p0, f0, p0, f0, p0
        if GROUP < 128:
            f2, p2, f3, p3 = s2, z2, s2, z2
            s2, z2 = _shared(s_rows, z_rows, later + 64, HEIGHT, INPUTS, GROUP, HAS_ZEROS)
        if GROUP < 64:
            f1, p1, f3, p3 = s1, z1, s3, z3
            s1, z1 = _shared(s_rows, z_rows, later + 32, HEIGHT, INPUTS, GROUP, HAS_ZEROS)
            s3, z3 = _shared(s_rows, z_rows, later + 96, HEIGHT, INPUTS, GROUP, HAS_ZEROS)
        words = tl.load(first + chunk * (HEIGHT * 32))
        x0 = _inputs(x_rows, o_rows, k, live, INPUTS, ORDERED)
        acc = tl.dot(_numbers(words, f0, p0, MIDDLE, HAS_ZEROS, RAISED, ASM0), x0, acc)
        x1 = _inputs(x_rows, o_rows, k + 32, live, INPUTS, ORDERED)
        acc = tl.dot(_numbers(words, f1, p1, MIDDLE, HAS_ZEROS, RAISED, ASM1), x1, acc)
        x2 = _inputs(x_rows, o_rows, k + 64, live, INPUTS, ORDERED)
        acc = tl.dot(_numbers(words, f2, p2, MIDDLE, HAS_ZEROS, RAISED, ASM2), x2, acc)
        x3 = _inputs(x_rows, o_rows, k + 96, live, INPUTS, ORDERED)
        acc = tl.dot(_numbers(words, f3, p3, MIDDLE, HAS_ZEROS, RAISED, ASM3), x3, acc)
    return acc


# fmt: on


@cache
def integer_constants(dtype: torch.dtype) -> dict[str, Any]:
    """Return what the kernels are compiled for; dtype: of x and of the scales."""
    pair = {torch.bfloat16: "bf16x2", torch.float16: "f16x2"}[dtype]
    made = {
        name: f"{text.removesuffix('}')} mul.{pair} $0, $0, $3;}}"
        for name, text in integer_tiles.assembly(dtype).items()
    }
    return {"RAISED": integer_tiles.RAISED[dtype], **made}

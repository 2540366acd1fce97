"""Experts in codes of 8 bits, in Triton: the part of stored_experts.py that reads them.

    by blocks   y[p, o] = sum_g a[p, g] b[o / 128, g] sum_{i of g} X[p, i] W[o, i]
    by outputs  y[p, o] = a[p] b[o] sum_i X[p, i] W[o, i]

Codes of both are multiplied. Sums of fp8 are float32, those of integers int32.
"""

from typing import Any

import triton
import triton.language as tl

# Arguments are grouped by what they describe.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def of_blocks(
    x: "Any", x_scales: "Any", num_x: "Any", codes: "Any", scales: "Any",
    expert: "Any", row: "Any", at: "Any", live: "Any",
    HEIGHT: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
) -> "Any":
    """Sums [ROWS, PAIRS] of an expert's rows and x's rows `at`; x_scales: [groups, num_x]."""
    GROUPS: tl.constexpr = INPUTS // 128
    k = tl.arange(0, 128)
    w_rows = codes + (expert * HEIGHT + row)[:, None] * INPUTS + k[None, :]
    s_rows = scales + (expert * (HEIGHT // 128) + row // 128) * GROUPS
    x_rows = x + at[None, :] * INPUTS + k[:, None]
    own = tl.load(s_rows)
    tokens = tl.load(x_scales + at, mask=live, other=0.0)
    acc = tl.zeros([ROWS, PAIRS], dtype=tl.float32)
    for group in range(GROUPS):
        later = tl.minimum(group + 1, GROUPS - 1)
        next_own = tl.load(s_rows + later)
        next_tokens = tl.load(x_scales + later * num_x + at, mask=live, other=0.0)
        x_tile = tl.load(x_rows + group * 128, mask=live[None, :], other=0.0)
        part = tl.dot(tl.load(w_rows + group * 128), x_tile)
        acc += part * own[:, None] * tokens[None, :]
        own, tokens = next_own, next_tokens
    return acc


@triton.jit  # type: ignore[untyped-decorator]
def of_outputs(
    x: "Any", x_scales: "Any", codes: "Any", scales: "Any",
    expert: "Any", row: "Any", at: "Any", live: "Any",
    HEIGHT: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
    ROUNDED: tl.constexpr,
) -> "Any":
    """The same; x_scales: [num_x], where x is ROUNDED to codes. Else codes become numbers."""
    k = tl.arange(0, 128)
    w_rows = codes + (expert * HEIGHT + row)[:, None] * INPUTS + k[None, :]
    x_rows = x + at[None, :] * INPUTS + k[:, None]
    factors = tl.load(scales + expert * HEIGHT + row)[:, None]
    if ROUNDED:
        factors = factors * tl.load(x_scales + at, mask=live, other=0.0)[None, :]
    sums_of: tl.constexpr = tl.int32 if codes.dtype.element_ty == tl.int8 else tl.float32
    acc = tl.zeros([ROWS, PAIRS], dtype=sums_of)
    for k0 in range(0, INPUTS, 128):
        x_mask = live[None, :]
        if INPUTS % 128 != 0:
            inside = k < INPUTS - k0
            x_mask = x_mask & inside[:, None]
            w_tile = tl.load(w_rows + k0, mask=inside[None, :], other=0.0)
        else:
            w_tile = tl.load(w_rows + k0)
        x_tile = tl.load(x_rows + k0, mask=x_mask, other=0.0)
        acc = tl.dot(w_tile.to(x.dtype.element_ty), x_tile, acc, out_dtype=sums_of)
    return acc.to(tl.float32) * factors

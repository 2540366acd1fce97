"""Experts in nvfp4 and mxfp4, in Triton: the part of stored_experts.py that reads them.

How codes become numbers: modeling/kernels/fp4_tiles.py.
"""

from typing import Any

import triton
import triton.language as tl

from modeling.kernels.fp4_tiles import add_products

# Arguments are grouped by what they describe.
# fmt: off


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
    w_rows = codes + (expert * CHUNKS * HEIGHT + row) * 32
    s_rows = scales + expert * (CHUNKS * EACH * HEIGHT) + row
    x_rows = x + at * INPUTS
    s0 = tl.load(s_rows)
    s1 = tl.load(s_rows + HEIGHT) if IS_NVFP4 else s0
    LESS: tl.constexpr = 8 if IS_NVFP4 else 0
    acc = tl.zeros([ROWS, PAIRS], dtype=tl.float32)
    for chunk in range(CHUNKS):
        # The next chunk's are loaded now: loads that no product takes are not pipelined.
        later = s_rows + tl.minimum(chunk + 1, CHUNKS - 1) * (EACH * HEIGHT)
        next_s0 = tl.load(later)
        next_s1 = tl.load(later + HEIGHT) if IS_NVFP4 else next_s0
        acc = add_products(
            acc, w_rows, s0, x_rows, live, INPUTS - chunk * 128,
            0, 32 // EACH, IS_NVFP4, LESS, ASM0, ASM1, ASM2, ASM3,
        )
        if IS_NVFP4:
            acc = add_products(
                acc, w_rows, s1, x_rows, live, INPUTS - chunk * 128,
                16, 16, IS_NVFP4, LESS, ASM0, ASM1, ASM2, ASM3,
            )
        w_rows += HEIGHT * 32
        x_rows += 128
        s0, s1 = next_s0, next_s1
    if IS_NVFP4:
        # Its factors are too small.
        acc *= tl.load(outer + expert * HEIGHT + row)[:, None] * 256.0
    return acc

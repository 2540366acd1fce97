"""Products of up to 16 tokens with weights of 4 bits: `row_tile` as a kernel of its own."""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents

from modeling.kernels.integer_rows import row_tile

# Arguments are grouped by what they describe; a line for each would hide the kernel.
# fmt: off


@gluon.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def row_kernel(
    x: "Any", codes: "Any", scales: "Any", zeros: "Any", bias: "Any",
    y: "Any", sums: "Any", arrived: "Any",
    num_rows: "Any", num_outputs: "Any", x_stride: "Any", y_stride: "Any",
    INPUTS: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr, MIDDLE: gl.constexpr,
    HAS_ZEROS: gl.constexpr, RAISED: gl.constexpr,
    ASM0: gl.constexpr, ASM1: gl.constexpr, ASM2: gl.constexpr, ASM3: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, TURN: gl.constexpr, SHARES: gl.constexpr,
    HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
) -> None:
    """One block of outputs, all tokens, one share of the inputs."""
    if PDL:
        gdc_launch_dependents()
    num_blocks = gl.num_programs(0) // SHARES
    row_tile(
        gl.program_id(0) % num_blocks, gl.program_id(0) // num_blocks, num_blocks,
        x, codes, scales, zeros, bias, y, sums, arrived,
        num_rows, num_outputs, x_stride, y_stride,
        INPUTS, CHUNK, CHUNKS, MIDDLE, HAS_ZEROS, RAISED, ASM0, ASM1, ASM2, ASM3,
        ROWS, BLOCK_N, TURN, SHARES, HAS_BIAS, PDL,
    )

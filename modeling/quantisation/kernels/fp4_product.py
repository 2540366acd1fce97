"""Launches of products with weights in nvfp4 and mxfp4, and their numbers made."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents

from modeling.kernels.fp4_rows import fp4_row_tile, rows_cut
from modeling.kernels.fp4_tiles import ASSEMBLY, fp4_tile, tile_cut
from modeling.kernels.integer_rows import rows_options
from modeling.kernels.integer_tiles import tile_options
from modeling.kernels.launch import Launcher, aligned, has_dependent_launch, launch_options
from modeling.quantisation.kernels.scaled_product import product_memory
from sharding.linear_weight import Operands

Pointer = Any

# Arguments are grouped by what they describe; a line for each would hide the kernels.
# fmt: off


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _tiles(
    x: "Pointer", codes: "Pointer", scales: "Pointer", outer: "Pointer",
    bias: "Pointer", y: "Pointer", sums: "Pointer", arrived: "Pointer",
    num_rows: "Any", num_outputs: "Any", x_stride: int, y_stride: int,
    INPUTS: tl.constexpr, IS_NVFP4: tl.constexpr,
    ASM0: tl.constexpr, ASM1: tl.constexpr, ASM2: tl.constexpr, ASM3: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    SHARES: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """One block of outputs, all tokens, one share of the inputs; see `fp4_tile`."""
    if PDL:
        gdc_launch_dependents()
    num_blocks = tl.num_programs(0) // SHARES
    fp4_tile(
        tl.program_id(0) % num_blocks, tl.program_id(0) // num_blocks, num_blocks,
        x, codes, scales, outer, bias, y, sums, arrived,
        num_rows, num_outputs, x_stride, y_stride,
        INPUTS, IS_NVFP4, ASM0, ASM1, ASM2, ASM3, ROWS, BLOCK_N, SHARES, HAS_BIAS, PDL,
    )


@gluon.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _rows(
    x: "Pointer", codes: "Pointer", scales: "Pointer", outer: "Pointer",
    bias: "Pointer", y: "Pointer", sums: "Pointer", arrived: "Pointer",
    num_rows: "Any", num_outputs: "Any", x_stride: int, y_stride: int,
    INPUTS: gl.constexpr, IS_NVFP4: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, TURN: gl.constexpr,
    SHARES: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
) -> None:
    """The same of up to 16 tokens; see `fp4_row_tile`."""
    if PDL:
        gdc_launch_dependents()
    num_blocks = gl.num_programs(0) // SHARES
    fp4_row_tile(
        gl.program_id(0) % num_blocks, gl.program_id(0) // num_blocks, num_blocks,
        x, codes, scales, outer, bias, y, sums, arrived,
        num_rows, num_outputs, x_stride, y_stride,
        INPUTS, IS_NVFP4, ROWS, BLOCK_N, TURN, SHARES, HAS_BIAS, PDL,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _dequantise(
    codes: "Pointer", scales: "Pointer", outer: "Pointer", y: "Pointer", num_outputs: int,
    INPUTS: tl.constexpr, IS_NVFP4: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:
    """y[out, in] = code * scale, for one chunk of BLOCK_N outputs, as packages round them."""
    EACH: tl.constexpr = 2 if IS_NVFP4 else 1
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    chunk = tl.program_id(1)
    word = tl.arange(0, 32)
    inside = n < num_outputs
    mask = inside[:, None] & (word >= 0)[None, :]
    row = chunk.to(tl.int64) * num_outputs + n
    words = tl.load(codes + row[:, None] * 32 + word[None, :], mask=mask, other=0).to(tl.int32)
    half = word // 16 if IS_NVFP4 else word * 0
    at = (chunk.to(tl.int64) * EACH + half)[None, :] * num_outputs + n[:, None]
    shared = tl.load(scales + at, mask=mask, other=0)
    factor = tl.full([BLOCK_N], 1.0, tl.float64)
    if IS_NVFP4:
        factor = tl.load(outer + n, mask=inside, other=0.0)
    out = y + n.to(tl.int64)[:, None] * INPUTS + chunk * 128 + word[None, :]
    for place in tl.static_range(4):
        byte = (shared >> (8 * place)) & 255
        if IS_NVFP4:
            # These bits are a float32 of 2 ** -120 of the scale.
            stored = (byte << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
            scale = (stored.to(tl.float64) * factor[:, None]).to(tl.float32)
        else:
            scale = tl.where(byte > 0, byte << 23, 1 << 22).to(tl.float32, bitcast=True)
        code = (words >> (4 * place)) & 15
        # Halves: 0, 1, 2, 3, 4, 6, 8, 12.
        low = code & 7
        halves = tl.where(low < 4, low, (2 + (low & 1)) << ((low >> 1) - 1))
        value = tl.where(code > 7, -halves, halves).to(tl.float32) * 0.5
        found = (value * scale).to(tl.bfloat16)
        tl.store(out + place * 32, found.to(y.dtype.element_ty), mask=mask)


# fmt: on

_launch_tiles = Launcher(_tiles)
_launch_rows = Launcher(_rows)
_launch_dequantise = Launcher(_dequantise)


def dequantise_fp4(operands: Operands, y: Tensor) -> Tensor:
    """Write the codes' numbers, which are of bfloat16, into y [out, in]."""
    own, block = operands.fp4, 64
    assert own is not None
    outputs, inputs = y.shape
    outer = own.scales if own.outer is None else own.outer
    codes = operands.weight
    _launch_dequantise(
        (y.device, y.dtype, inputs, outputs % 16, own.outer is None, aligned(codes, y)),
        (-(-outputs // block), len(codes)),
        (codes, own.scales, outer, y, outputs),
        {"INPUTS": inputs, "IS_NVFP4": own.outer is not None, "BLOCK_N": block},
        {"num_warps": 4},
    )
    return y


def fp4_product(operands: Operands, bias: Tensor | None, y: Tensor) -> Tensor:
    """Write the product of a few tokens, x [tokens, in] in bfloat16, into y [tokens, out]."""
    x, codes, own = operands.x, operands.weight, operands.fp4
    assert own is not None
    (rows, inputs), (chunks, outputs, _) = x.shape, codes.shape
    is_nvfp4 = own.outer is not None
    found = rows_cut(rows, inputs, outputs)
    made: dict[str, Any] = {}
    if found is None:
        launch, cut = _launch_tiles, tile_cut(rows, inputs, outputs)
        shares, width = cut.shares(outputs, inputs), cut.outputs
        sizes, options = tile_options(cut, rows, shares)
        made = ASSEMBLY
    else:
        launch, width = _launch_rows, found.outputs
        sizes, options = rows_options(found, outputs, chunks)
        shares = sizes["SHARES"]
    dependent = has_dependent_launch(x.device)
    sums, arrived = product_memory(x.device, torch.cuda.current_stream(x.device).cuda_stream)
    launch(
        (x.device, x.dtype, y.dtype, inputs, outputs, *sizes.values(), bias is None, is_nvfp4,
         aligned(x, codes, y), x.stride(0), y.stride(0)),
        (-(-outputs // width) * shares,),
        (x, codes, own.scales, own.scales if own.outer is None else own.outer,
         y if bias is None else bias, y, sums, arrived,
         rows, outputs, x.stride(0), y.stride(0)),
        {"INPUTS": inputs, "IS_NVFP4": is_nvfp4, **made, **sizes,
         "HAS_BIAS": bias is not None, "PDL": dependent},
        {**options, **launch_options(dependent)},
    )  # fmt: skip
    return y

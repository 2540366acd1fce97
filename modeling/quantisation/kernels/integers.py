"""Launches of products with weights of 4 bits, and their numbers made."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from modeling.kernels.integer_rows import rows_cut, rows_options
from modeling.kernels.integer_tiles import (
    integer_arguments,
    integer_constants,
    integer_tile,
    tile_cut,
    tile_options,
)
from modeling.kernels.launch import Launcher, aligned, has_dependent_launch, launch_options
from modeling.quantisation.kernels.integer_rows import row_kernel
from modeling.quantisation.kernels.scaled_product import product_memory
from sharding.linear_weight import OperandGroups, Operands

Pointer = Any

# Arguments are grouped by what they describe; a line for each would hide the kernels.
# fmt: off


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _integers(
    x: "Pointer", codes: "Pointer", scales: "Pointer", zeros: "Pointer",
    bias: "Pointer", y: "Pointer", sums: "Pointer", arrived: "Pointer",
    num_rows: "Any", num_outputs: "Any", x_stride: int, y_stride: int,
    INPUTS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    MIDDLE: tl.constexpr, HAS_ZEROS: tl.constexpr, RAISED: tl.constexpr,
    ASM0: tl.constexpr, ASM1: tl.constexpr, ASM2: tl.constexpr, ASM3: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    SHARES: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """One block of outputs, all tokens, one share of the inputs; see `integer_tile`."""
    if PDL:
        gdc_launch_dependents()
    num_blocks = tl.num_programs(0) // SHARES
    integer_tile(
        tl.program_id(0) % num_blocks, tl.program_id(0) // num_blocks, num_blocks,
        x, codes, scales, zeros, bias, y, sums, arrived,
        num_rows, num_outputs, x_stride, y_stride,
        INPUTS, CHUNK, CHUNKS, MIDDLE, HAS_ZEROS, RAISED, ASM0, ASM1, ASM2, ASM3,
        ROWS, BLOCK_N, SHARES, HAS_BIAS, PDL,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _dequantise(
    codes: "Pointer", scales: "Pointer", zeros: "Pointer", table: "Pointer", y: "Pointer",
    num_outputs: int,
    INPUTS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    MIDDLE: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_TABLE: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:
    """y = (code - zero) * scale, or table[code] * scale, for one chunk of BLOCK_N outputs.

    y: [out, in].
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    chunk = tl.program_id(1)
    WORDS: tl.constexpr = CHUNK // 4
    word = tl.arange(0, WORDS)
    inside = n < num_outputs
    mask = inside[:, None] & (word >= 0)[None, :]
    row = chunk.to(tl.int64) * num_outputs + n
    words = tl.load(codes + row[:, None] * WORDS + word[None, :], mask=mask, other=0).to(tl.int32)
    at_group = chunk // CHUNKS * num_outputs + n
    factors = tl.load(scales + at_group, mask=inside, other=0.0).to(tl.float32)
    middle = tl.full([BLOCK_N], MIDDLE, tl.float32)
    if HAS_ZEROS:
        middle = tl.load(zeros + at_group, mask=inside, other=0).to(tl.float32)
    out = y + n.to(tl.int64)[:, None] * INPUTS + chunk * CHUNK + word[None, :]
    for place in tl.static_range(4):
        code = (words >> (4 * place)) & 15
        if HAS_TABLE:
            found = tl.load(table + code) * factors[:, None]
        else:
            found = (code.to(tl.float32) - middle[:, None]) * factors[:, None]
        tl.store(out + place * WORDS, found.to(y.dtype.element_ty), mask=mask)


# fmt: on

_launch_integers = Launcher(_integers)
_launch_rows = Launcher(row_kernel)
_launch_dequantise = Launcher(_dequantise)


def dequantise(codes: Tensor, groups: OperandGroups, y: Tensor) -> Tensor:
    """Write codes [chunks, out, n] as numbers into y [out, in]."""
    scales, zeros, table = groups.scales, groups.zeros, groups.table
    middle, size = groups.middle, groups.size
    chunks, outputs, _ = codes.shape
    inputs = y.shape[1]
    block, chunk = 64, inputs // chunks
    _launch_dequantise(
        (y.device, y.dtype, scales.dtype, inputs, outputs % 16, chunk, size, middle, zeros is None,
         table is None, aligned(codes, y)),
        (-(-outputs // block), chunks),
        (codes.view(torch.int16), scales, codes if zeros is None else zeros,
         scales if table is None else table, y, outputs),
        {"INPUTS": inputs, "CHUNK": chunk, "CHUNKS": size // chunk, "MIDDLE": middle,
         "HAS_ZEROS": zeros is not None, "HAS_TABLE": table is not None, "BLOCK_N": block},
        {"num_warps": 4},
    )  # fmt: skip
    return y


def integer_product(operands: Operands, bias: Tensor | None, y: Tensor) -> Tensor:
    """Write the product of a few tokens into y [tokens, out]."""
    x, codes, groups = operands.x, operands.weight, operands.groups
    assert groups is not None
    (rows, inputs), (chunks, outputs, _) = x.shape, codes.shape
    found = rows_cut(rows, groups, inputs, outputs)
    if found is None:
        launch, cut = _launch_integers, tile_cut(rows, groups, outputs)
        shares, width = cut.shares(outputs, inputs), cut.outputs
        sizes, options = tile_options(cut, rows, shares)
    else:
        launch, width = _launch_rows, found.outputs
        sizes, options = rows_options(found, outputs, chunks)
        shares = sizes["SHARES"]
    dependent = has_dependent_launch(x.device)
    sums, arrived = product_memory(x.device, torch.cuda.current_stream(x.device).cuda_stream)
    launch(
        (x.device, x.dtype, y.dtype, inputs, outputs, *sizes.values(), bias is None, chunks,
         groups.size, groups.middle, groups.zeros is None,
         groups.scales.dtype, aligned(x, codes, y), x.stride(0), y.stride(0)),
        (-(-outputs // width) * shares,),
        (*integer_arguments(operands), y if bias is None else bias, y, sums, arrived,
         rows, outputs, x.stride(0), y.stride(0)),
        {**integer_constants(operands), **sizes, "HAS_BIAS": bias is not None, "PDL": dependent},
        {**options, **launch_options(dependent)},
    )  # fmt: skip
    return y

"""Products of many tokens in int8, in Triton, with scales of tokens and of outputs.

    y[m, n] = a[m] * b[n] * sum_k X[m, k] W[n, k]         codes of both in int8, sums in int32

torch's library writes the sums themselves, four bytes each, which another kernel then reads.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

Pointer = Any

NEIGHBOURS = 8
"""Blocks of tokens whose programs run together, so that they share their part of W in the cache."""


@dataclass(frozen=True)
class Int8Tile:
    """What one program computes.

    time: of a program beside another tile's, where each multiprocessor has one.
    """

    tokens: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    time: float

    def programs(self, rows: int, outputs: int) -> int:
        """Return how many compute a product."""
        return -(-rows // self.tokens) * -(-outputs // self.outputs)


TILES = (
    Int8Tile(128, 256, 128, 8, 4, 29.0),
    Int8Tile(128, 128, 128, 8, 4, 18.6),
    Int8Tile(64, 128, 128, 4, 5, 13.2),
    Int8Tile(64, 64, 256, 4, 4, 8.8),
)
"""Times are microseconds of 4,096 inputs on an H200."""


@cache
def num_processors(device: torch.device) -> int:
    """Return how many programs run at once."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@cache
def tile_of(rows: int, outputs: int, processors: int) -> Int8Tile:
    """Return the tile whose rounds of programs take the least time."""

    def time(tile: Int8Tile) -> float:
        return -(-tile.programs(rows, outputs) // processors) * tile.time

    return min(TILES, key=time)


# Arguments are grouped by what they describe.
# fmt: off


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _int8(
    x: "Any", codes: "Any", x_scales: "Pointer", scales: "Pointer", bias: "Pointer", y: "Pointer",
    num_rows: int, num_outputs: int, y_stride: int,
    INPUTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NEIGHBOURS: tl.constexpr, HAS_BIAS: tl.constexpr,
) -> None:
    """One block of tokens and outputs; x, codes: descriptors of [tokens, in] and [out, in]."""
    program = tl.program_id(0)
    high, wide = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_outputs, BLOCK_N)
    first = program // (NEIGHBOURS * wide) * NEIGHBOURS
    height = tl.minimum(high - first, NEIGHBOURS)
    rest = program % (NEIGHBOURS * wide)
    m0, n0 = (first + rest % height) * BLOCK_M, rest // height * BLOCK_N
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.int32)
    # Beyond the matrices' ends the copy engine writes zeros: no mask is needed.
    for k0 in range(0, INPUTS, BLOCK_K):
        acc = tl.dot(x.load([m0, k0]), codes.load([n0, k0]).T, acc, out_dtype=tl.int32)
    m, n = m0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
    live, inside = m < num_rows, n < num_outputs
    a = tl.load(x_scales + m, mask=live, other=0.0)
    b = tl.load(scales + n, mask=inside, other=0.0)
    found = acc.to(tl.float32) * (a[:, None] * b[None, :])
    if HAS_BIAS:
        found += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    out = y + m[:, None].to(tl.int64) * y_stride + n[None, :]
    tl.store(out, found.to(y.dtype.element_ty), mask=live[:, None] & inside[None, :])


# fmt: on


def int8_product(
    x: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, y: Tensor
) -> Tensor:
    """Write the product of int8 x [tokens, in] and codes [out, in] into y [tokens, out].

    x_scales: float32 [tokens, 1]. scales: float32 [out, 1].
    """
    (rows, inputs), outputs = x.shape, len(codes)
    tile = tile_of(rows, outputs, num_processors(x.device))
    _int8[(tile.programs(rows, outputs),)](
        TensorDescriptor.from_tensor(x, [tile.tokens, tile.inputs]),
        TensorDescriptor.from_tensor(codes, [tile.outputs, tile.inputs]),
        x_scales, scales, y if bias is None else bias, y,
        rows, outputs, y.stride(0),
        INPUTS=inputs, BLOCK_M=tile.tokens, BLOCK_N=tile.outputs, BLOCK_K=tile.inputs,
        NEIGHBOURS=NEIGHBOURS, HAS_BIAS=bias is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y

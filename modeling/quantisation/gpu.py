"""Products with quantised weights on GPUs, by torch's library and by kernels of ours."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType, scaled_mm

from modeling.kernels.integer_tiles import CUTS
from modeling.kernels.tiles import SCALED_CUTS, cut_of
from modeling.quantisation.activations import BLOCK
from modeling.quantisation.base import LEAST_CHUNK
from modeling.quantisation.kernels import rounding
from modeling.quantisation.kernels.fp4_product import dequantise_fp4, fp4_product
from modeling.quantisation.kernels.int8_product import int8_product
from modeling.quantisation.kernels.integers import dequantise, integer_product
from modeling.quantisation.kernels.scaled_product import scaled_product
from modeling.quantisation.kernels.tiled_integers import tiled_cut, tiled_product
from sharding.linear_weight import Operands, multiply


def rounded(x: Tensor, scale: Tensor | None, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `GpuProducts.rounded`."""
    return rounding.by_token(x.contiguous(), scale, kind)


def scaled(
    x: Tensor,
    x_scales: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    out: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """See `GpuProducts.scaled`."""
    cut = cut_of(SCALED_CUTS, len(x))
    if cut is not None:
        y = scales.new_empty(len(x), len(codes), dtype=dtype) if out is None else out
        return scaled_product(x, x_scales, codes, scales, bias, y, cut)
    if codes.dtype is torch.int8:
        y = scales.new_empty(len(x), len(codes), dtype=dtype) if out is None else out
        return int8_product(x, x_scales, codes, scales, bias, y)
    row = ScalingType.RowWise
    # Sums of few products in fp8's own accumulators are what the tensor cores do fastest.
    y = scaled_mm(
        x,
        codes.t(),
        x_scales,
        row,
        scales.t(),
        row,
        # With scales of rows the library writes no other type.
        output_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return _added(y.to(dtype), bias, out)


def fp8_blocks(
    x: Tensor, codes: Tensor, blocks: Tensor, bias: Tensor | None, out: Tensor | None
) -> Tensor:
    """See `GpuProducts.fp8_blocks`."""
    cut = cut_of(SCALED_CUTS, len(x))
    if cut is not None:
        inputs, own = rounding.by_group(x.contiguous(), BLOCK)
        y = x.new_empty(len(x), len(codes)) if out is None else out
        return scaled_product(inputs, own, codes, blocks, bias, y, cut, BLOCK)
    # The library takes no other number of tokens.
    inputs, own = rounding.by_group(F.pad(x, (0, 0, 0, -len(x) % 4)).contiguous(), BLOCK)
    # Nor scales of which an output's are not four, eight, ...
    blocks = F.pad(blocks, (0, -blocks.shape[1] % 4))
    y = scaled_mm(
        inputs,
        codes.t(),
        own,
        ScalingType.BlockWise1x128,
        blocks.t(),
        ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )[: len(x)]
    return _added(y.to(x.dtype), bias, out)


def integers(operands: Operands, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """See `GpuProducts.integers`."""
    x, codes, groups = operands.x, operands.weight, operands.groups
    assert groups is not None
    outputs, inputs = codes.shape[1], x.shape[1]
    own = replace(operands, x=x.contiguous())
    cut = tiled_cut(own)
    is_few = cut is None and groups.table is None and len(x) <= CUTS[-1].rows
    if (is_few or cut) and inputs // len(codes) >= LEAST_CHUNK:
        y = x.new_empty(len(x), outputs) if out is None else out
        if cut is None:
            return integer_product(own, bias, y)
        return tiled_product(own, bias, y, cut)
    weight = torch.empty(outputs, inputs, dtype=x.dtype, device=x.device)
    dequantise(codes, groups, weight)
    return multiply(x, weight, bias, out)


def fp4(operands: Operands, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """See `GpuProducts.fp4`."""
    x = operands.x
    y = x.new_empty(len(x), operands.weight.shape[1]) if out is None else out
    return fp4_product(replace(operands, x=x.contiguous()), bias, y)


def fp4_numbers(operands: Operands) -> Tensor:
    """See `GpuProducts.fp4_numbers`."""
    x = operands.x
    weight = x.new_empty(operands.weight.shape[1], x.shape[1])
    return dequantise_fp4(operands, weight)


def to_fp4(x: Tensor, size: int, global_scale: Tensor | None) -> Tensor:
    """See `GpuProducts.to_fp4`."""
    return rounding.to_fp4(x.contiguous(), size, global_scale)


def _added(y: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """Add the bias to y, and put it where it is wanted."""
    if bias is not None:
        y = y + bias
    return y if out is None else out.copy_(y)

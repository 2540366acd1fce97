"""Weights and activations in integers of 8 bits, as compressed-tensors stores and rounds them.

weight         int8 [out, in]
weight_scale   one, or [out, 1]
input_scale    of static activations

    stored = round(x / scale), scale = largest |x| / 127.5

and within -128 and 127.
"""

import torch
from torch import Tensor

from configs.quantisation import Activations, Quantisation
from modeling.quantisation.activations import LARGEST_INT8, SMALLEST
from modeling.quantisation.scaled import RowScaledWeight
from modeling.quantisation.stored_fp8 import indices, input_scale, row_scales
from sharding.checkpoint import CheckpointError
from sharding.linear_weight import LinearPart
from sharding.loader import Weights


class RoundedInt8Weight(RowScaledWeight):
    """W = codes * scales, with a scale for each output, and inputs that are rounded to 8 bits.

    codes: int8 [out, in]. scales: float32 [out, 1].
    """

    @property
    def form(self) -> str:
        """Return its name."""
        return "integers of 8 bits"

    def inputs(self, x: Tensor) -> Tensor:
        """Return x rounded to 8 bits, in its own type."""
        codes, scales = by_token(x, self.input_scale)
        return (codes.float() * scales).to(x.dtype)


def scales_of(largest: Tensor) -> Tensor:
    """Return the scales of numbers whose largest absolute values these are."""
    scales = largest.float() / LARGEST_INT8
    return torch.where(scales == 0, SMALLEST, scales)


def to_int8(x: Tensor, scales: Tensor) -> Tensor:
    """Return x / scales in int8; numbers that are too large become the largest."""
    return torch.round(x.float() / scales).clamp(-128, 127).to(torch.int8)


def by_token(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[tokens, in] to int8 of that shape and float32 scales [tokens, 1]; scale: of all tokens."""
    scales = scales_of(x.abs().amax(dim=-1, keepdim=True)) if scale is None else scale
    return to_int8(x, scales), scales


def read_rounded_int8(weights: Weights, part: LinearPart, how: Quantisation) -> RoundedInt8Weight:
    """Read a map whose weights have a scale for each output, or one for all."""
    codes = weights.read_stored(f"{part.name}.weight", part.shape, part.rows, part.columns)
    if codes.dtype is not torch.int8:
        raise CheckpointError(f"{part.name}.weight is stored as {codes.dtype}, not as int8")
    scales = row_scales(weights, part)[indices(part.rows, weights.device)][:, None]
    scale = input_scale(weights, part) if how.activations is Activations.STATIC else None
    return RoundedInt8Weight(codes.contiguous(), scales, how.activations, weights.dtype, scale)


def round_rows_to_int8(matrix: Tensor, largest: Tensor, dtype: torch.dtype) -> RoundedInt8Weight:
    """Round a matrix [out, in]; largest: [out], of all ranks' columns."""
    scales = scales_of(largest)[:, None]
    return RoundedInt8Weight(to_int8(matrix, scales), scales, Activations.TOKEN, dtype)

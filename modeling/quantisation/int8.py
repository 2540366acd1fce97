"""Weights and activations in integers of 8 bits, as compressed-tensors stores and rounds them.

weight         int8 [out, in]
weight_scale   one, or [out, 1]
input_scale    of static activations

    stored = round(x / scale), scale = largest |x| / 127.5

and within -128 and 127. A token's scale comes from the token alone, so a row never depends on its
neighbours. Where a layer's inputs are cut over ranks, each rank has scales of its own.
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from configs.quantisation import Activations, Quantisation
from modeling.quantisation.activations import SMALLEST
from modeling.quantisation.base import QuantisedWeight
from modeling.quantisation.stored_fp8 import indices, input_scale, row_scales
from sharding.checkpoint import CheckpointError
from sharding.linear_weight import LinearPart, LinearWeight
from sharding.loader import Weights

LARGEST = 127.5
"""Half of the range of 8 bits."""


class RoundedInt8Weight(QuantisedWeight):
    """W = codes * scales, and inputs that are rounded to 8 bits.

    codes: int8 [out, in]. scales: float32 [out, 1]. input_scale: [1], of STATIC activations.
    """

    def __init__(
        self, codes: Tensor, scales: Tensor, dtype: torch.dtype, input_scale: Tensor | None = None
    ) -> None:
        super().__init__((codes.shape[0], codes.shape[1]), dtype)
        self.codes = self.keep(codes)
        self.scales = self.keep(scales)
        self.input_scale = None if input_scale is None else self.keep(input_scale)

    @property
    def form(self) -> str:
        """Return its name."""
        return "integers of 8 bits"

    def joined(self, others: Sequence[LinearWeight]) -> Self | None:
        """Return one weight of all rows, where all round their inputs by the same rule."""
        parts = self.with_alike(others)
        if not parts or not all(self._rounds_like(part) for part in parts):
            return None
        codes = torch.cat([part.codes for part in parts])
        scales = torch.cat([part.scales for part in parts])
        return type(self)(codes, scales, self.dtype, self.input_scale)

    def _rounds_like(self, other: Self) -> bool:
        own, its = self.input_scale, other.input_scale
        return own is its if own is None or its is None else torch.equal(own, its)

    def inputs(self, x: Tensor) -> Tensor:
        """Return x rounded to 8 bits, in its own type."""
        own = self.input_scale
        scales = scales_of(x.abs().amax(dim=-1, keepdim=True)) if own is None else own
        return (to_int8(x, scales).float() * scales).to(x.dtype)

    def __getitem__(self, rows: slice) -> Tensor:
        """Return some rows in `dtype`."""
        return (self.codes[rows].float() * self.scales[rows]).to(self.dtype)


def scales_of(largest: Tensor) -> Tensor:
    """Return the scales of numbers whose largest absolute values these are."""
    scales = largest.float() / LARGEST
    return torch.where(scales == 0, SMALLEST, scales)


def to_int8(x: Tensor, scales: Tensor) -> Tensor:
    """Return x / scales in int8; numbers that are too large become the largest."""
    return torch.round(x.float() / scales).clamp(-128, 127).to(torch.int8)


def read_rounded_int8(weights: Weights, part: LinearPart, how: Quantisation) -> RoundedInt8Weight:
    """Read a map whose weights have a scale for each output, or one for all."""
    codes = weights.read_stored(f"{part.name}.weight", part.shape, part.rows, part.columns)
    if codes.dtype is not torch.int8:
        raise CheckpointError(f"{part.name}.weight is stored as {codes.dtype}, not as int8")
    scales = row_scales(weights, part)[indices(part.rows, weights.device)][:, None]
    scale = input_scale(weights, part) if how.activations is Activations.STATIC else None
    return RoundedInt8Weight(codes.contiguous(), scales, weights.dtype, scale)


def round_rows_to_int8(matrix: Tensor, largest: Tensor, dtype: torch.dtype) -> RoundedInt8Weight:
    """Round a matrix [out, in]; largest: [out], of all ranks' columns."""
    scales = scales_of(largest)[:, None]
    return RoundedInt8Weight(to_int8(matrix, scales), scales, dtype)

"""Weights in fp8 (e4m3): with a scale for each output, or one for each block of a matrix."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from configs.quantisation import Activations
from modeling.quantisation.activations import (
    BLOCK,
    FP8,
    rounded,
    rounded_by_group,
    rounded_by_token,
    scales_of,
    to_fp8,
)
from modeling.quantisation.products import gpu_products
from modeling.quantisation.scaled import RowScaledWeight, ScaledWeight, below
from sharding.linear_weight import LinearWeight

_ROUNDED_AT_ONCE = 2**24
"""Numbers of a matrix in float32 at a time: 64 MiB each for the copy and its quotient."""


class Fp8Weight(RowScaledWeight):
    """W = codes * scales, with a scale for each output.

    codes: fp8 [out, in]. scales: float32 [out, 1].
    """

    @property
    def form(self) -> str:
        """Return its name."""
        return "fp8"

    def inputs(self, x: Tensor) -> Tensor:
        """Return x as the product sees it."""
        if self.activations is Activations.NONE:
            return x
        if self.input_scale is not None:
            return rounded(x, self.input_scale)
        return rounded_by_token(x)


class BlockFp8Weight(ScaledWeight):
    """W = codes * scales, with a scale for some inputs of an output, as blocks of a matrix have.

    codes: fp8 [out, in]. scales: float32 [out, groups]. group_of: int64 [in], the group of each
    input. group: inputs of a group, where they are whole groups in order; only then can activations
    have scales of their groups.
    """

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        group_of: Tensor,
        group: int,
        activations: Activations,
        dtype: torch.dtype,
        input_scale: Tensor | None = None,
    ) -> None:
        """input_scale: float32 [1], of STATIC activations."""
        super().__init__(codes, scales, activations, dtype, input_scale)
        self.group_of = self.keep(group_of)
        self.group = group
        # What a GPU multiplies with: whole blocks, which parts of maps may not have.
        self.blocks = None
        if group == BLOCK and activations is Activations.GROUP and not codes.shape[0] % BLOCK:
            by_block = scales.view(-1, BLOCK, scales.shape[1])
            if bool((by_block == by_block[:, :1]).all()):
                self.blocks = self.keep(by_block[:, 0].contiguous())

    @property
    def form(self) -> str:
        """Return its name."""
        return "fp8 in blocks"

    def joined(self, others: Sequence[LinearWeight]) -> Self | None:
        """Return one weight of all rows; None beside other forms, and with scales of inputs."""
        parts = self.with_alike(others)
        if not parts or any(part.input_scale is not None for part in parts):
            return None
        codes, scales = below(parts)
        kind = type(self)
        return kind(codes, scales, self.group_of, self.group, self.activations, self.dtype)

    def inputs(self, x: Tensor) -> Tensor:
        """Return x as the product sees it."""
        if self.activations is Activations.GROUP:
            return rounded_by_group(x, self.group)
        return x if self.input_scale is None else rounded(x, self.input_scale)

    def forward(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """x W^T + bias."""
        gpu = gpu_products(x)
        if gpu is None or self.blocks is None:
            return super().forward(x, bias, out)
        return gpu.fp8_blocks(x, self.codes, self.blocks, bias, out)

    def __getitem__(self, rows: slice) -> Tensor:
        """Return some rows in `dtype`."""
        return (self.codes[rows].float() * self.scales[rows][:, self.group_of]).to(self.dtype)


def round_rows(matrix: Tensor, largest: Tensor, dtype: torch.dtype) -> Fp8Weight:
    """Round a matrix [out, in] to fp8; activations will have a scale for each token.

    largest: [out], the largest absolute value of each row; of all ranks' columns, where the
    matrix's columns are cut.
    """
    scales = scales_of(largest)[:, None]
    codes = torch.empty(matrix.shape, dtype=FP8, device=matrix.device)
    # A whole matrix in float32 would take more memory than the model in fp8 leaves free.
    for first in range(0, len(matrix), height := max(1, _ROUNDED_AT_ONCE // matrix.shape[1])):
        rows = slice(first, first + height)
        codes[rows] = to_fp8(matrix[rows], scales[rows])
    return Fp8Weight(codes, scales, Activations.TOKEN, dtype)


def round_blocks(
    matrix: Tensor, block: tuple[int, int], activations: Activations
) -> BlockFp8Weight:
    """Round a matrix [out, in] to fp8 with a scale for each block of outputs and inputs."""
    height, wide = block
    group_of = torch.arange(matrix.shape[1], device=matrix.device) // wide
    codes = torch.empty(matrix.shape, dtype=FP8, device=matrix.device)
    scales = []
    for first in range(0, len(matrix), height):
        rows = matrix[first : first + height]
        largest = torch.stack([part.abs().amax() for part in torch.split(rows, wide, dim=1)])
        own = scales_of(largest)
        codes[first : first + height] = to_fp8(rows, own[group_of])
        scales.append(own.expand(len(rows), -1))
    return BlockFp8Weight(codes, torch.cat(scales), group_of, wide, activations, matrix.dtype)

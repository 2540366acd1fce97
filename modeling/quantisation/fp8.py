"""Weights in fp8 (e4m3) with a scale for each block of a matrix."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from configs.quantisation import Activations
from modeling.quantisation.activations import (
    BLOCK,
    FP8,
    rounded_by_group,
    rounded_by_token,
    scales_of,
    to_fp8,
)
from modeling.quantisation.products import gpu_products
from modeling.quantisation.scaled import ScaledWeight, below
from sharding.linear_weight import LinearWeight


def scales_of_blocks(scales: Tensor, group: int) -> Tensor | None:
    """Return the scales of whole blocks of 128 by 128; None where there are others.

    scales: [..., out, groups], to [..., out / 128, groups]. group: inputs of a group.
    """
    *first, outputs, groups = scales.shape
    if group != BLOCK or outputs % BLOCK:
        return None
    by_block = scales.view(*first, -1, BLOCK, groups)
    own = by_block[..., 0, :]
    return own.contiguous() if bool((by_block == own.unsqueeze(-2)).all()) else None


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
        blocks = scales_of_blocks(scales, group) if activations is Activations.GROUP else None
        self.blocks = None if blocks is None else self.keep(blocks)

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
        return x if self.input_scale is None else rounded_by_token(x, self.input_scale)

    def forward(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """x W^T + bias."""
        gpu = gpu_products(x)
        if gpu is None or self.blocks is None:
            return super().forward(x, bias, out)
        return gpu.fp8_blocks(x, self.codes, self.blocks, bias, out)

    def __getitem__(self, rows: slice) -> Tensor:
        """Return some rows in `dtype`."""
        return (self.codes[rows].float() * self.scales[rows][:, self.group_of]).to(self.dtype)


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

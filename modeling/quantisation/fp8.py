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
from modeling.quantisation.base import QuantisedWeight
from modeling.quantisation.products import SIZES, gpu_products
from sharding.linear_weight import LinearWeight, Operands

_ROUNDED_AT_ONCE = 2**24
"""Numbers of a matrix in float32 at a time: 64 MiB each for the copy and its quotient."""


class _Fp8Codes(QuantisedWeight):
    """W = codes * scales, whatever share a scale.

    codes: fp8 [out, in]. scales: float32 [out, ...]. input_scale: [1], of STATIC activations.
    """

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        activations: Activations,
        dtype: torch.dtype,
        input_scale: Tensor | None = None,
    ) -> None:
        super().__init__((codes.shape[0], codes.shape[1]), dtype)
        self.codes = self.keep(codes)
        self.scales = self.keep(scales)
        self.activations = activations
        self.input_scale = None if input_scale is None else self.keep(input_scale)


def _below(parts: Sequence[_Fp8Codes]) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of all parts, each part's rows below another's."""
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(FP8)
    return codes, torch.cat([part.scales for part in parts])


class Fp8Weight(_Fp8Codes):
    """W = codes * scales, with a scale for each output.

    codes: fp8 [out, in]. scales: float32 [out, 1].
    """

    _taken: tuple[Tensor, Tensor, Tensor] | None = None
    """x, and x in fp8 with its scales, for one product."""

    @property
    def form(self) -> str:
        """Return its name."""
        return "fp8"

    def joined(self, others: Sequence[LinearWeight]) -> Self | None:
        """Return one weight of all rows, where all round their inputs alike."""
        parts = self.with_alike(others)
        if not parts or not all(self._rounds_like(part) for part in parts):
            return None
        return type(self)(*_below(parts), self.activations, self.dtype, self.input_scale)

    def inputs(self, x: Tensor) -> Tensor:
        """Return x as the product sees it."""
        if self.activations is Activations.NONE:
            return x
        if self.input_scale is not None:
            return rounded(x, self.input_scale)
        return rounded_by_token(x)

    def forward(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """x W^T + bias."""
        if not self.joins(x):
            return super().forward(x, bias, out)
        gpu = gpu_products(x)
        assert gpu is not None
        return gpu.fp8(*self._rounded(x), self.codes, self.scales, bias, out, x.dtype)

    def joins(self, x: Tensor) -> bool:
        """Return whether a GPU multiplies fp8 numbers of x and of these weights."""
        fits = not any(size % SIZES for size in self.shape)
        rounds = self.activations is not Activations.NONE
        return fits and rounds and gpu_products(x) is not None

    def operands(self, x: Tensor) -> Operands:
        """Return x and the weights in fp8."""
        codes, scales = self._rounded(x)
        return Operands(codes, self.codes, scales, self.scales)

    def takes_rounded(self, x: Tensor) -> bool:
        """Return whether tokens have scales of their own here, and x is multiplied in fp8."""
        return self.input_scale is None and self.joins(x)

    def take_rounded(self, x: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Take x as it is rounded already, for the product of x to come."""
        self._taken = x, codes, scales

    def _rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        taken, self._taken = self._taken, None
        if taken is not None and taken[0] is x:
            return taken[1:]
        gpu = gpu_products(x)
        assert gpu is not None
        return gpu.rounded(x, self.input_scale)

    def __getitem__(self, rows: slice) -> Tensor:
        """Return some rows in `dtype`."""
        return (self.codes[rows].float() * self.scales[rows]).to(self.dtype)

    def _rounds_like(self, other: "Fp8Weight") -> bool:
        mine, theirs = self.input_scale, other.input_scale
        same = mine is theirs if mine is None or theirs is None else torch.equal(mine, theirs)
        return same and self.activations is other.activations


class BlockFp8Weight(_Fp8Codes):
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
        codes, scales = _below(parts)
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

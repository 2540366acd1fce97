"""Codes of 8 bits, fp8 or integers, that are multiplied as they are, and scaled afterwards.

    y[m, n] = a[m] * b[n] * sum_k X[m, k] W[n, k]         codes of both

A token's scale comes from the token alone, or from the checkpoint, so a row never depends on its
neighbours. Where a layer's inputs are cut over ranks, each rank has scales of its own.
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from configs.quantisation import Activations
from modeling.quantisation.activations import FP8, rounded_by_token, scales_of, to_codes
from modeling.quantisation.base import QuantisedWeight
from modeling.quantisation.products import SIZES, gpu_products
from sharding.linear_weight import LinearWeight, Operands

_ROUNDED_AT_ONCE = 2**24
"""Numbers of a matrix in float32 at a time: 64 MiB each for the copy and its quotient."""


class ScaledWeight(QuantisedWeight):
    """W = codes * scales, whatever share a scale.

    codes: fp8 or int8 [out, in]. scales: float32 [out, ...]. input_scale: [1], of STATIC
    activations.
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


def below(parts: Sequence[ScaledWeight]) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of all parts, each part's rows below another's."""
    kind = parts[0].codes.dtype
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(kind)
    return codes, torch.cat([part.scales for part in parts])


class RowScaledWeight(ScaledWeight):
    """W = codes * scales, with a scale for each output.

    codes: fp8 or int8 [out, in]. scales: float32 [out, 1].
    """

    _taken: tuple[Tensor, Tensor, Tensor] | None = None
    """x, and codes of x with their scales, for one product."""

    @property
    def form(self) -> str:
        """Return its name."""
        return "fp8" if self.codes.dtype is FP8 else "integers of 8 bits"

    def joined(self, others: Sequence[LinearWeight]) -> Self | None:
        """Return one weight of all rows, where all round their inputs alike."""
        parts = self.with_alike(others)
        if not parts or not all(self._rounds_like(part) for part in parts):
            return None
        return type(self)(*below(parts), self.activations, self.dtype, self.input_scale)

    def inputs(self, x: Tensor) -> Tensor:
        """Return x as the product sees it."""
        if self.activations is Activations.NONE:
            return x
        return rounded_by_token(x, self.input_scale, self.codes.dtype)

    def forward(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """x W^T + bias."""
        if not self.joins(x):
            return super().forward(x, bias, out)
        gpu = gpu_products(x)
        assert gpu is not None
        return gpu.scaled(*self._rounded(x), self.codes, self.scales, bias, out, x.dtype)

    def joins(self, x: Tensor) -> bool:
        """Return whether a GPU multiplies codes of x and of these weights."""
        fits = not any(size % SIZES for size in self.shape)
        rounds = self.activations is not Activations.NONE
        return fits and rounds and gpu_products(x) is not None

    def operands(self, x: Tensor) -> Operands:
        """Return codes of x and of the weights."""
        codes, scales = self._rounded(x)
        return Operands(codes, self.codes, scales, self.scales)

    def rounded_type(self, x: Tensor) -> torch.dtype | None:
        """Return the codes' type where x is multiplied in codes with scales of its tokens."""
        return self.codes.dtype if self.input_scale is None and self.joins(x) else None

    def take_rounded(self, x: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Take x as it is rounded already, for the product of x to come."""
        self._taken = x, codes, scales

    def _rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        taken, self._taken = self._taken, None
        if taken is not None and taken[0] is x:
            return taken[1:]
        gpu = gpu_products(x)
        assert gpu is not None
        return gpu.rounded(x, self.input_scale, self.codes.dtype)

    def __getitem__(self, rows: slice) -> Tensor:
        """Return some rows in `dtype`."""
        return (self.codes[rows].float() * self.scales[rows]).to(self.dtype)

    def _rounds_like(self, other: "RowScaledWeight") -> bool:
        mine, theirs = self.input_scale, other.input_scale
        same = mine is theirs if mine is None or theirs is None else torch.equal(mine, theirs)
        return same and self.activations is other.activations


def round_rows(
    matrix: Tensor, largest: Tensor, dtype: torch.dtype, kind: torch.dtype = FP8
) -> RowScaledWeight:
    """Round a matrix [out, in]; activations will have a scale for each token.

    largest: [out], the largest absolute value of each row; of all ranks' columns, where the
    matrix's columns are cut. kind: of the codes, fp8 or int8.
    """
    scales = scales_of(largest, kind)[:, None]
    codes = torch.empty(matrix.shape, dtype=kind, device=matrix.device)
    # A whole matrix in float32 would take more memory than the model in fp8 leaves free.
    for first in range(0, len(matrix), height := max(1, _ROUNDED_AT_ONCE // matrix.shape[1])):
        rows = slice(first, first + height)
        codes[rows] = to_codes(matrix[rows], scales[rows], kind)
    return RowScaledWeight(codes, scales, Activations.TOKEN, dtype)

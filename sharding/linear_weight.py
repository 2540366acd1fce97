"""LinearWeight: this rank's part of a linear map, in the form that it is multiplied in."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sharding.slicing import Segments, width


@dataclass(frozen=True)
class LinearPart:
    """This rank's part of one linear map of a checkpoint.

    name: the module's path.
    shape: the whole (out, in).
    rows, columns: this rank's outputs and inputs.
    stored_transposed: whether the checkpoint's matrix is [in, out] (GPT-2's Conv1D).
    """

    name: str
    shape: tuple[int, int]
    rows: Segments
    columns: Segments
    stored_transposed: bool = False

    @property
    def local_shape(self) -> tuple[int, int]:
        """Return this rank's (out, in)."""
        return width(self.rows), width(self.columns)


class LinearWeight(nn.Module, ABC):
    """A matrix [out, in] of this rank, of one map or of several below each other.

    shape: (out, in).
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.shape = shape

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Return where it is."""

    @property
    @abstractmethod
    def form(self) -> str:
        """Return the name of its form, for reports."""

    @abstractmethod
    def forward(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """x W^T + bias: [tokens, in] to [tokens, out].

        out: memory for the result, if it may be any; it is returned.
        """

    @abstractmethod
    def __getitem__(self, rows: slice) -> Tensor:
        """Return some rows in a float type, as they count in the product."""


class DenseWeight(LinearWeight):
    """The matrix itself, in the type that is computed in."""

    def __init__(self, matrix: Tensor) -> None:
        """matrix: [out, in]."""
        super().__init__((matrix.shape[0], matrix.shape[1]))
        self.matrix = nn.Parameter(matrix, requires_grad=False)

    @property
    def device(self) -> torch.device:
        """Return where it is."""
        return self.matrix.device

    @property
    def form(self) -> str:
        """Return the name of its type."""
        return str(self.matrix.dtype).removeprefix("torch.")

    def forward(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """x W^T + bias."""
        if out is None:
            return F.linear(x, self.matrix, bias)
        if bias is None:
            return torch.mm(x, self.matrix.t(), out=out)
        return torch.addmm(bias, x, self.matrix.t(), out=out)

    def __getitem__(self, rows: slice) -> Tensor:
        """Return some rows."""
        return self.matrix[rows]


class WeightRows:
    """Some rows of a weight, with what a reader needs of a matrix.

    shape: (rows, in).
    """

    def __init__(self, weight: LinearWeight, start: int, stop: int) -> None:
        self._weight = weight
        self._start = start
        self.shape = (stop - start, weight.shape[1])

    @property
    def device(self) -> torch.device:
        """Return where they are."""
        return self._weight.device

    def __getitem__(self, rows: slice) -> Tensor:
        """Return some of the rows in a float type."""
        start, stop, _ = rows.indices(self.shape[0])
        return self._weight[self._start + start : self._start + stop]

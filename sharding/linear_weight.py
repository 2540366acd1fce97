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


@dataclass(frozen=True)
class OperandGroups:
    """What inputs of codes of 4 bits share.

    scales: [groups, out]. zeros: uint8 [groups, out]; None where `middle` is every zero point.
    table: [16], what codes stand for; None where that is themselves. size: inputs of a group.
    """

    scales: Tensor
    zeros: Tensor | None
    table: Tensor | None
    middle: int
    size: int


@dataclass(frozen=True)
class Fp4Scales:
    """What inputs of codes of e2m1 share, in the order of kernels (`quantisation.fp4.pack`).

    scales: int32 [in / 128, 32 / inputs of a group, out], four bytes each. outer: float64 [out],
    what they are multiplied by; None where they are powers of two.
    """

    scales: Tensor
    outer: Tensor | None


@dataclass(frozen=True)
class Operands:
    """What a product of few tokens reads, where a launch may join other work with it.

    x: [tokens, in].
    weight: [out, in].
    x_scales, scales: float32 [tokens, 1] and [out, 1], which the rows of both count by; None where
    they are numbers as they are.
    groups: of codes of 4 bits, which are then the weight: uint8 [chunks, out, bytes].
    fp4: of codes of e2m1, which are then the weight: int16 [in / 128, out, 32].
    """

    x: Tensor
    weight: Tensor
    x_scales: Tensor | None = None
    scales: Tensor | None = None
    groups: OperandGroups | None = None
    fp4: Fp4Scales | None = None


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

    def joins(self, x: Tensor) -> bool:
        """Return whether there are operands for x [tokens, in]."""
        return False

    @property
    def is_fast_alone(self) -> bool:
        """Return whether its own product is the faster one where nothing joins it."""
        return True

    def operands(self, x: Tensor) -> Operands:
        """Return what the product of x reads; call it only if `joins` returned true."""
        raise NotImplementedError

    def rounded_type(self, x: Tensor) -> torch.dtype | None:
        """Return fp8 or int8 if `take_rounded` spares the product of x [tokens, in] a launch."""
        return None

    def take_rounded(self, x: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Take x in codes of `rounded_type` [tokens, in], scales [tokens, 1], for its product."""
        raise NotImplementedError


def multiply(x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """x matrix^T + bias, as `LinearWeight.forward` says, by torch's library; matrix: [out, in]."""
    if out is None:
        return F.linear(x, matrix, bias)
    if bias is None:
        return torch.mm(x, matrix.t(), out=out)
    return torch.addmm(bias, x, matrix.t(), out=out)


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
        return multiply(x, self.matrix, bias, out)

    def __getitem__(self, rows: slice) -> Tensor:
        """Return some rows."""
        return self.matrix[rows]

    def joins(self, x: Tensor) -> bool:
        """Return whether rows of the matrix lie one after another."""
        return self.matrix.is_contiguous()

    @property
    def is_fast_alone(self) -> bool:
        """Return False: libraries read matrices of few tokens more slowly than kernels of ours."""
        return False

    def operands(self, x: Tensor) -> Operands:
        """Return x and the matrix as they are."""
        return Operands(x, self.matrix)


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

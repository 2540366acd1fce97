"""Tensor-parallel linear layers, each built straight from the checkpoint's slices."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sharding.group import Summand
from sharding.linear_weight import DenseWeight, LinearPart, LinearWeight
from sharding.loader import Weights
from sharding.slicing import Segments, whole, width


@dataclass(frozen=True)
class ColumnPart:
    """One linear map of a fused layer: its module path, whole output size, this rank's rows."""

    name: str
    out_features: int
    rows: Segments


def read_dense(weights: Weights, parts: Sequence[LinearPart]) -> DenseWeight:
    """Read maps that share their input as one matrix, in the type that is computed in."""
    if len(parts) == 1:
        return DenseWeight(_read_part(weights, parts[0]).contiguous())
    heights = [part.local_shape[0] for part in parts]
    matrix = weights.empty(sum(heights), parts[0].local_shape[1])
    # Part by part into the one matrix: no second copy of them all is in memory.
    for own, part in zip(torch.split(matrix, heights), parts, strict=True):
        own.copy_(_read_part(weights, part))
    return DenseWeight(matrix)


def _read_part(weights: Weights, part: LinearPart) -> Tensor:
    name = f"{part.name}.weight"
    if part.stored_transposed:
        return weights.read(name, part.shape[::-1], rows=part.columns, columns=part.rows).t()
    return weights.read(name, part.shape, rows=part.rows, columns=part.columns)


def _read_stored(weights: Weights, parts: Sequence[LinearPart]) -> LinearWeight:
    if weights.linear_format is None:
        return read_dense(weights, parts)
    return weights.linear_format.read(weights, parts)


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b, cut along the output: each rank computes its own columns, nothing is sent.

    Several parts that share x are one product; their outputs are side by side in y.
    sizes, offsets: each part's columns in y, and the first of them.
    """

    def __init__(
        self,
        in_features: int,
        parts: tuple[ColumnPart, ...],
        bias: bool,
        weights: Weights,
        stored_transposed: bool = False,
    ) -> None:
        """Read this rank's rows of every part into one matrix [local_out, in].

        stored_transposed: the checkpoint's matrices are [in, out] (GPT-2's Conv1D).
        """
        super().__init__()
        self.sizes = sizes = [width(part.rows) for part in parts]
        self.offsets = tuple(sum(sizes[:i]) for i in range(len(sizes)))
        self.stored = _read_stored(
            weights,
            [
                LinearPart(
                    part.name,
                    (part.out_features, in_features),
                    part.rows,
                    whole(in_features),
                    stored_transposed,
                )
                for part in parts
            ],
        )
        self.bias = nn.Parameter(weights.empty(sum(sizes)), requires_grad=False) if bias else None
        if self.bias is not None:
            for own, part in zip(torch.split(self.bias, sizes), parts, strict=True):
                own.copy_(weights.read(f"{part.name}.bias", (part.out_features,), rows=part.rows))

    @property
    def matrix(self) -> Tensor | None:
        """Return the weight [local_out, in] where it is kept as it is; None if quantised."""
        return self.stored.matrix if isinstance(self.stored, DenseWeight) else None

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, in] to [tokens, local_out]."""
        y: Tensor = self.stored(x, self.bias)
        return y


class RowParallelLinear(nn.Module):
    """y = x W^T + b, cut along the input: the ranks' partial products are summed, b joins once."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        columns: Segments,
        bias: bool,
        weights: Weights,
        stored_transposed: bool = False,
    ) -> None:
        """Read this rank's columns of the matrix; shape: the whole (out, in).

        stored_transposed: the checkpoint's matrix is [in, out] (GPT-2's Conv1D).
        """
        super().__init__()
        self._group = weights.group
        part = LinearPart(name, shape, whole(shape[0]), columns, stored_transposed)
        self.stored = _read_stored(weights, [part])
        # Added on rank 0 alone, or the sum over ranks would have it several times.
        self.has_bias = bias
        whole_bias = weights.parameter(f"{name}.bias", shape[:1]) if bias else None
        self.bias = whole_bias if weights.group.rank == 0 else None

    @property
    def matrix(self) -> Tensor | None:
        """Return the weight [out, local_in] where it is kept as it is; None if quantised."""
        return self.stored.matrix if isinstance(self.stored, DenseWeight) else None

    def partial(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[tokens, local_in] to this rank's summand of [tokens, out]; the bias is in rank 0's.

        out: memory for it; otherwise that which the ranks sum without a copy, where there is any.
        """
        y: Tensor = self.stored(x, self.bias, self.output_buffer(x) if out is None else out)
        return y

    def summand(self, x: Tensor) -> Summand | None:
        """Return memory for x's partial product that the next norm sums; None if none shall."""
        return self._group.summand((len(x), self.stored.shape[0]), x.dtype)

    def output_buffer(self, x: Tensor) -> Tensor | None:
        """Return memory [tokens, out] for x's partial product that is summed without a copy."""
        if x.dim() != 2:
            return None
        return self._group.output_buffer((len(x), self.stored.shape[0]), x.dtype)

    def reduce(self, partial: Tensor) -> Tensor:
        """Sum the ranks' summands."""
        return self._group.all_reduce(partial)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, local_in] to [tokens, out], the same on every rank."""
        return self.reduce(self.partial(x))

"""Tensor-parallel linear layers, each built straight from the checkpoint's slices."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sharding.loader import Weights
from sharding.slicing import Segments, width


@dataclass(frozen=True)
class ColumnPart:
    """One linear map of a fused layer: its module path, whole output size, this rank's rows."""

    name: str
    out_features: int
    rows: Segments


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
        self.weight = nn.Parameter(weights.empty(sum(sizes), in_features), requires_grad=False)
        self.bias = nn.Parameter(weights.empty(sum(sizes)), requires_grad=False) if bias else None
        for part, offset, size in zip(parts, self.offsets, sizes, strict=True):
            shape = (part.out_features, in_features)
            own = slice(offset, offset + size)
            name = f"{part.name}.weight"
            self.weight[own] = (
                weights.read(name, shape[::-1], columns=part.rows).t()
                if stored_transposed
                else weights.read(name, shape, rows=part.rows)
            )
            if self.bias is not None:
                self.bias[own] = weights.read(f"{part.name}.bias", shape[:1], rows=part.rows)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, in] to [tokens, local_out]."""
        return F.linear(x, self.weight, self.bias)


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
        matrix = (
            weights.read(f"{name}.weight", shape[::-1], rows=columns).t().contiguous()
            if stored_transposed
            else weights.read(f"{name}.weight", shape, columns=columns)
        )
        self.weight = nn.Parameter(matrix, requires_grad=False)
        # Added on rank 0 alone, or the sum over ranks would have it several times.
        self.has_bias = bias
        whole_bias = weights.parameter(f"{name}.bias", shape[:1]) if bias else None
        self.bias = whole_bias if weights.group.rank == 0 else None

    def partial(self, x: Tensor) -> Tensor:
        """[tokens, local_in] to this rank's summand of [tokens, out]; the bias is in rank 0's."""
        # Computed into the memory that the ranks sum, where there is any: no copy is needed.
        out = self.output_buffer(x)
        if out is None:
            return F.linear(x, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)

    def output_buffer(self, x: Tensor) -> Tensor | None:
        """Return memory [tokens, out] for x's partial product that is summed without a copy."""
        if x.dim() != 2:
            return None
        return self._group.output_buffer((len(x), len(self.weight)), x.dtype)

    def reduce(self, partial: Tensor) -> Tensor:
        """Sum the ranks' summands."""
        return self._group.all_reduce(partial)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, local_in] to [tokens, out], the same on every rank."""
        return self.reduce(self.partial(x))

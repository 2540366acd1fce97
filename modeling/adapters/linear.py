"""Linear layers with adapters: the base product, plus the deltas of the step's adapters."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from modeling.adapters.product import AdapterData, OutputSlice
from modeling.adapters.projection import ModulePosition
from sharding.linear import ColumnParallelLinear, RowParallelLinear


class AdapterColumnLinear(nn.Module):
    """Column-parallel: A is whole and B is cut like the base weight, so deltas need no exchange."""

    def __init__(
        self, base: ColumnParallelLinear, layer: int, projections: tuple[int, ...]
    ) -> None:
        """projections: for each part of the fused layer, its index in the model's projections."""
        super().__init__()
        self.base = base
        self._layer = layer
        self._targets = tuple(
            OutputSlice(projection, offset)
            for projection, offset in zip(projections, base.offsets, strict=True)
        )

    def forward(self, x: Tensor, adapter_data: AdapterData | None) -> Tensor:
        """[tokens, in] to [tokens, local_out]."""
        if adapter_data is None:
            plain: Tensor = self.base(x)
            return plain
        weight = self.base.weight
        # One launch computes the base product and x A^T, as both read x; it adds no bias.
        if self.base.bias is None and adapter_data.has_product(x, weight, self._targets):
            y = x.new_empty(len(x), len(weight))
            adapter_data.product(y, x, weight, self._layer, self._targets)
        else:
            y = self.base(x)
        adapter_data.add(y, x, self._layer, self._targets, self.base.bias)
        return y

    def weights(self) -> Iterator[tuple[ModulePosition, Tensor]]:
        """Yield this rank's rows of each adapted weight."""
        parts = torch.split(self.base.weight, self.base.sizes)
        for target, weight in zip(self._targets, parts, strict=True):
            yield ModulePosition(target.projection, self._layer), weight


class AdapterRowLinear(nn.Module):
    """Row-parallel: A is cut on its input, and the delta joins the partial product.

    B (A x) is linear in A's columns, so the base layer's one all-reduce sums both.
    """

    def __init__(self, base: RowParallelLinear, layer: int, projection: int) -> None:
        """projection: the layer's index in the model's projections."""
        super().__init__()
        self.base = base
        self._layer = layer
        self._targets = (OutputSlice(projection, 0),)

    def partial(self, x: Tensor, adapter_data: AdapterData | None) -> Tensor:
        """[tokens, local_in] to this rank's summand of [tokens, out], deltas included."""
        if adapter_data is None:
            return self.base.partial(x)
        weight = self.base.weight
        if self.base.bias is None and adapter_data.has_product(x, weight, self._targets):
            # Memory that the ranks sum without a copy, where there is any.
            buffer = self.base.output_buffer(x)
            y = x.new_empty(len(x), len(weight)) if buffer is None else buffer
            adapter_data.product(y, x, weight, self._layer, self._targets)
        else:
            y = self.base.partial(x)
        adapter_data.add(y, x, self._layer, self._targets, self.base.bias)
        return y

    def weights(self) -> Iterator[tuple[ModulePosition, Tensor]]:
        """Yield this rank's columns of the adapted weight."""
        yield ModulePosition(self._targets[0].projection, self._layer), self.base.weight

    def forward(self, x: Tensor, adapter_data: AdapterData | None) -> Tensor:
        """[tokens, local_in] to [tokens, out], the same on every rank."""
        return self.base.reduce(self.partial(x, adapter_data))


def adapted_weights(model: nn.Module) -> dict[ModulePosition, Tensor]:
    """Return this rank's part of every weight that adapters may change, by its position."""
    linears = (
        each for each in model.modules() if isinstance(each, AdapterColumnLinear | AdapterRowLinear)
    )
    return {position: weight for linear in linears for position, weight in linear.weights()}

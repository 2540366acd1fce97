"""Linear layers with adapters: the base product, plus the step's deltas in the right place."""

from torch import Tensor, nn

from modeling.adapters.kernels.base import AdapterData, Target
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
            Target(projection, offset)
            for projection, offset in zip(projections, base.offsets, strict=True)
        )

    def forward(self, x: Tensor, adapter_data: AdapterData | None) -> Tensor:
        """[tokens, in] to [tokens, local_out]."""
        y: Tensor = self.base(x)
        if adapter_data is not None:
            adapter_data.add(y, x, self._layer, self._targets)
        return y


class AdapterRowLinear(nn.Module):
    """Row-parallel: A is cut on its input, and the delta joins the partial product.

    B (A x) is linear in A's columns, so the base layer's one all-reduce sums both.
    """

    def __init__(self, base: RowParallelLinear, layer: int, projection: int) -> None:
        """projection: the layer's index in the model's projections."""
        super().__init__()
        self.base = base
        self._layer = layer
        self._targets = (Target(projection, 0),)

    def partial(self, x: Tensor, adapter_data: AdapterData | None) -> Tensor:
        """[tokens, local_in] to this rank's summand of [tokens, out], deltas included."""
        y = self.base.partial(x)
        if adapter_data is not None:
            adapter_data.add(y, x, self._layer, self._targets)
        return y

    def forward(self, x: Tensor, adapter_data: AdapterData | None) -> Tensor:
        """[tokens, local_in] to [tokens, out], the same on every rank."""
        return self.base.reduce(self.partial(x, adapter_data))

"""Linear layers with adapters: the base product, plus the deltas of the step's adapters."""

from collections.abc import Iterator

from torch import Tensor, nn

from modeling.adapters.product import AdapterData, GatedAdapters, OutputSlice, WholeAdapters
from modeling.adapters.projection import BaseLinear, ModulePosition
from sharding.group import Summand
from sharding.linear import ColumnParallelLinear, RowParallelLinear
from sharding.linear_weight import WeightRows


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
        y = self._unadapted(x, adapter_data)
        if adapter_data is not None:
            adapter_data.add(y, x, self._layer, self._targets)
        return y

    def gated(self, x: Tensor, adapter_data: AdapterData | None) -> tuple[Tensor, Tensor | None]:
        """[tokens, in] to (gate and up [tokens, 2 * n], silu(gate) * up [tokens, n]).

        The second is None where no kernel joins it with the adapters' deltas; where one does, the
        first lacks them.
        """
        y = self._unadapted(x, adapter_data)
        if adapter_data is None:
            return y, None
        if isinstance(adapter_data, GatedAdapters):
            inner = adapter_data.gated(y, x, self._layer, self._targets)
            if inner is not None:
                return y, inner
        adapter_data.add(y, x, self._layer, self._targets)
        return y, None

    def _unadapted(self, x: Tensor, adapter_data: AdapterData | None) -> Tensor:
        """Return y [tokens, local_out] before deltas: the base's, or whole maps of adapters."""
        if adapter_data is None:
            plain: Tensor = self.base(x)
            return plain
        # One launch computes the base product and x A^T, as both read x; it adds no bias. Where the
        # base product rounds x, the adapter reads it before.
        weight = self.base.stored
        if self.base.bias is None and adapter_data.has_product(x, weight, self._targets):
            y = x.new_empty(len(x), weight.shape[0])
            adapter_data.product(y, x, weight, self._layer, self._targets)
        else:
            y = self.base(x)
        if isinstance(adapter_data, WholeAdapters):
            adapter_data.replace(y, x, self._layer, self._targets, self.base.bias)
        return y

    @property
    def position(self) -> ModulePosition:
        """Return where adapters of its first map are."""
        return ModulePosition(self._targets[0].projection, self._layer)

    @property
    def has_bias(self) -> bool:
        """Return whether the base model's maps have biases."""
        return self.base.bias is not None

    def bases(self) -> Iterator[tuple[ModulePosition, BaseLinear]]:
        """Yield this rank's rows of each map."""
        for target, size in zip(self._targets, self.base.sizes, strict=True):
            start, stop, bias = target.offset, target.offset + size, self.base.bias
            rows = WeightRows(self.base.stored, start, stop)
            base = BaseLinear(rows, None if bias is None else bias[start:stop])
            yield ModulePosition(target.projection, self._layer), base


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

    def partial(
        self, x: Tensor, adapter_data: AdapterData | None, out: Tensor | None = None
    ) -> Tensor:
        """[tokens, local_in] to this rank's summand of [tokens, out], deltas included.

        out: memory for it, if it may not be any.
        """
        if adapter_data is None:
            return self.base.partial(x, out)
        weight = self.base.stored
        if self.base.bias is None and adapter_data.has_product(x, weight, self._targets):
            # Memory that the ranks sum without a copy, where there is any.
            buffer = self.base.output_buffer(x) if out is None else out
            y = x.new_empty(len(x), weight.shape[0]) if buffer is None else buffer
            adapter_data.product(y, x, weight, self._layer, self._targets)
        else:
            y = self.base.partial(x, out)
        if isinstance(adapter_data, WholeAdapters):
            adapter_data.replace(y, x, self._layer, self._targets, self.base.bias)
        adapter_data.add(y, x, self._layer, self._targets)
        return y

    def unsummed(self, x: Tensor, adapter_data: AdapterData | None) -> Tensor | Summand:
        """As `forward`, but for a norm: a summand where the norm's own kernel sums it faster."""
        summand = self.base.summand(x)
        if summand is None:
            summed: Tensor = self(x, adapter_data)
            return summed
        self.partial(x, adapter_data, summand.partial)
        return summand

    @property
    def has_bias(self) -> bool:
        """Return whether the base model's map has a bias, on whichever rank."""
        return self.base.has_bias

    def bases(self) -> Iterator[tuple[ModulePosition, BaseLinear]]:
        """Yield this rank's columns of the map."""
        position = ModulePosition(self._targets[0].projection, self._layer)
        yield position, BaseLinear(self.base.stored, self.base.bias)

    def forward(self, x: Tensor, adapter_data: AdapterData | None) -> Tensor:
        """[tokens, local_in] to [tokens, out], the same on every rank."""
        return self.base.reduce(self.partial(x, adapter_data))


def adapted_linears(model: nn.Module) -> list[AdapterColumnLinear | AdapterRowLinear]:
    """Return a model's layers that adapters may change."""
    kinds = AdapterColumnLinear | AdapterRowLinear
    return [each for each in model.modules() if isinstance(each, kinds)]


def base_linears(model: nn.Module) -> dict[ModulePosition, BaseLinear]:
    """Return this rank's part of every linear map that adapters may change, by its position."""
    return {at: base for linear in adapted_linears(model) for at, base in linear.bases()}


def biased_projections(model: nn.Module) -> frozenset[int]:
    """Return the projections that have biases in the base model."""
    biased = (linear for linear in adapted_linears(model) if linear.has_bias)
    return frozenset(at.projection for linear in biased for at, _ in linear.bases())

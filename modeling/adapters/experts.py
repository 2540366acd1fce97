"""Adapters of routed experts and of routers, in steps that are not captured.

    y[p, o + j] += sum_r (sum_i x[p, i] A[l, e(p), r, i]) Bt[l, e(p), r, j]

p: a token and one of the experts that compute it; e(p): that expert; l: the index of the layer
among those that have experts. Pairs are sorted by expert, so that each 8 rank rows are two grouped
products, of the experts that have some.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from modeling.adapters.device_adapter import DeviceAdapter, ExpertStacks
from modeling.adapters.product import TokenGroup
from modeling.adapters.projection import ModulePosition

ALIGNMENT = 16
"""Bytes of which rows must be a multiple in torch's grouped product."""


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """[rows, in] and [experts, in, out] to [rows, out].

    ends: int32 [experts], the row behind each expert's last one. What is behind all is undefined.
    """
    if is_aligned(x) and is_aligned(weight):
        return F.grouped_mm(x, weight, offs=ends)
    y, start = x.new_zeros(len(x), weight.shape[2]), 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(x[start:end], weight[expert], out=y[start:end])
        start = end
    return y


def is_aligned(tensor: Tensor) -> bool:
    """Whether torch's grouped product takes a tensor."""
    steps = (step * tensor.element_size() for step in tensor.stride() if step != 1)
    return not any(step % ALIGNMENT for step in steps)


def has_aligned_sides(weights: Tensor) -> bool:
    """Whether it takes matrices [experts, ...] and their products, whichever side is summed."""
    return not any(side * weights.element_size() % ALIGNMENT for side in weights.shape[1:])


@dataclass(frozen=True)
class RoutedPairs:
    """Pairs of a token and an expert, sorted by expert.

    rows: int64 [pairs], which pair each is: token * experts of a token + n.
    ends: int32 [experts], behind each expert's last pair.
    """

    rows: Tensor
    ends: Tensor

    @classmethod
    def of(cls, ids: Tensor, count: int) -> "RoutedPairs":
        """ids: the expert of each pair, int64 [pairs]; count: of this rank's experts.

        Pairs of number `count`, another rank's, come last.
        """
        rows = torch.argsort(ids, stable=True)
        every = torch.arange(count, device=ids.device)
        return cls(rows, torch.searchsorted(ids[rows], every, right=True).int())


@dataclass(frozen=True)
class OwnPairs:
    """The pairs of an adapter's tokens with experts of which it has factors, in their order.

    at: their rows in the step's sorted pairs; ends: as `RoutedPairs`. others: bool [pairs, 1],
    which pairs are of other experts, behind all; None without.
    """

    at: Tensor
    ends: Tensor
    others: Tensor | None


@dataclass(frozen=True)
class RoutedAdapter:
    """The pairs of one adapter's tokens.

    ids: int64 [pairs], their experts. at: their rows in the step's sorted pairs.
    """

    adapter: DeviceAdapter
    ids: Tensor
    at: Tensor
    _found: dict[tuple[int, ...], OwnPairs] = field(default_factory=dict)

    def add(self, y: Tensor, x: Tensor, projection: int, layer: int, offset: int) -> None:
        """Add the deltas of a projection to y [pairs, out], from column `offset` on.

        x: [pairs, in]. layer: its index among those with experts.
        """
        stacks = self.adapter.experts.get(projection)
        if stacks is None or not stacks.experts:
            return
        pairs = self._pairs(stacks)
        inputs = x[pairs.at]
        for a, bt in stacks.at(layer):
            shrunk = grouped_product(inputs, a.transpose(1, 2), pairs.ends)
            delta = grouped_product(shrunk, bt, pairs.ends)
            if pairs.others is not None:
                delta.masked_fill_(pairs.others, 0)
            y[:, offset : offset + delta.shape[1]].index_add_(0, pairs.at, delta)

    def _pairs(self, stacks: ExpertStacks) -> OwnPairs:
        """Return the pairs with some experts; most often they are the same for all maps."""
        if stacks.experts not in self._found:
            count = len(stacks.experts)
            numbers = stacks.numbers(self.ids)
            own = RoutedPairs.of(numbers, count)
            others = None if numbers is self.ids else (numbers[own.rows] == count).unsqueeze(1)
            self._found[stacks.experts] = OwnPairs(self.at[own.rows], own.ends, others)
        return self._found[stacks.experts]


def route(groups: Sequence[TokenGroup], ids: Tensor, pairs: RoutedPairs) -> list[RoutedAdapter]:
    """Find each adapter's pairs among a layer's; ids: int64 [tokens, experts of a token]."""
    sorted_at = torch.empty_like(pairs.rows)
    sorted_at[pairs.rows] = torch.arange(len(sorted_at), device=sorted_at.device)
    by_token = sorted_at.view(ids.shape)
    rows = ((group.adapter, group.rows) for group in groups)
    return [RoutedAdapter(own, ids[at].flatten(), by_token[at].flatten()) for own, at in rows]


def add_routing(y: Tensor, x: Tensor, groups: Sequence[TokenGroup], at: ModulePosition) -> Tensor:
    """Add the deltas of a router to its logits y [tokens, experts]; x: [tokens, in], of any type.

    Returns a new tensor of y's type.
    """
    y = y.clone()
    for group in groups:
        if group.adapter.rank(at.projection, at.layer):
            factors = group.adapter.factors(at.projection, at.layer)
            inputs = x[group.rows].to(factors.a.dtype)
            y[group.rows] += (inputs @ factors.a @ factors.bt).to(y.dtype)
    return y

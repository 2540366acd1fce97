"""Rows behind the LoRA rank rows of Bt: what adapters do to a module's outputs beside B A x.

    y[t, o + j] += c[t, j] y[t, o + j] + d[t, j]

y: the base product with the base layer's bias b. c: DoRA's scale m / ||W + B A|| less 1
(arXiv:2402.09353). d: what the adapter's biases add, less c b, because DoRA leaves b as it is. B
has the scale since it was staged, so the product B A x is added as any other's. A row-parallel
layer's y is this rank's summand: it scales as the sum does, and one rank has d.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from modeling.adapters.expert_pages import ExpertPages
from modeling.adapters.host_pages import PAGE_ROWS
from modeling.adapters.projection import (
    BaseLinear,
    ModulePosition,
    Projection,
    ProjectionKind,
    select_columns,
)
from modeling.adapters.stacks import LoraStack


class OutputRows(NamedTuple):
    """The rows of one projection's Bt, the same in all layers; -1 where there is none.

    scale: c.
    bias: d.
    """

    scale: int = -1
    bias: int = -1

    @property
    def changes_outputs(self) -> bool:
        """Return whether there is a row."""
        return max(self) >= 0

    def behind(self, rank: int) -> int:
        """Return how many rows there are with those of the largest rank."""
        return max(rank, max(self) + 1)


def output_rows(
    projections: Sequence[Projection], most: Sequence[int], scaled: bool, biased: bool
) -> tuple[OutputRows, ...]:
    """Return the rows of each projection; most: its largest rank, 0 without factors."""
    found = []
    for projection, rank in zip(projections, most, strict=True):
        own = OutputRows()
        if rank and projection.kind is ProjectionKind.LINEAR:
            has_bias = biased or (scaled and projection.has_bias)
            own = OutputRows(rank if scaled else -1, rank + scaled if has_bias else -1)
        found.append(own)
    return tuple(found)


def page_counts(
    most: Sequence[int], rows: Sequence[OutputRows], experts: Mapping[int, ExpertPages]
) -> tuple[int, ...]:
    """Return how many pages an adapter takes of each pool.

    most, rows: as `output_rows` takes and returns them. experts: by their projection.
    """
    return tuple(
        experts[i].num_pages if i in experts else -(-own.behind(rank) // PAGE_ROWS)
        for i, (rank, own) in enumerate(zip(most, rows, strict=True))
    )


def added_bias(
    stack: LoraStack,
    projection: Projection,
    base_linears: Mapping[ModulePosition, BaseLinear],
    scales: Tensor | None,
) -> Tensor:
    """Return d on this rank, float32 [layers, this rank's out]; scales: c, as it is kept.

    Of a row-parallel module one rank adds it, or the sum would have it several times.
    """
    shape = len(stack.layers), projection.local_outputs
    found = torch.zeros(shape)
    if projection.cuts_inputs and projection.inputs[0][0] > 0:
        return found
    if stack.biases is not None:
        found += select_columns(stack.biases, projection.outputs)
    for index, layer in enumerate(stack.layers if projection.has_bias else ()):
        base = base_linears[ModulePosition(stack.projection, layer)].bias
        if base is None:
            # Of some layers alone (Kimi Linear's that attend): the others have none to keep.
            assert index not in stack.base_biases, f"{projection.name} has no bias"
            continue
        own = base.float().cpu()
        if index in stack.base_biases:
            found[index] += select_columns(stack.base_biases[index], projection.outputs) - own
        if scales is not None:
            found[index] -= scales[index].float() * own
    return found

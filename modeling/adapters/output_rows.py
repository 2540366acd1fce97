"""Rows behind the LoRA rank rows of Bt: what adapters do to a module's outputs beside B A x."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

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

    scale: of the outputs' scales less 1 (DoRA).
    bias: of what is added to the outputs.
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
    return tuple(
        OutputRows(rank if scaled else -1, rank + scaled if biased else -1)
        if rank and projection.kind is ProjectionKind.LINEAR
        else OutputRows()
        for projection, rank in zip(projections, most, strict=True)
    )


def added_bias(
    stack: LoraStack, projection: Projection, bases: Mapping[ModulePosition, BaseLinear]
) -> Tensor:
    """Return what a stack's biases add on this rank, float32 [layers, this rank's out].

    Of a row-parallel module one rank adds it, or the sum would have it several times.
    """
    shape = len(stack.layers), projection.local_outputs
    found = torch.zeros(shape)
    if projection.cuts_inputs and projection.inputs[0][0] > 0:
        return found
    if stack.biases is not None:
        found += select_columns(stack.biases, projection.outputs)
    for index, bias in stack.base_biases.items():
        base = bases[ModulePosition(stack.projection, stack.layers[index])].bias
        assert base is not None, f"{projection.name} has no bias"
        found[index] += select_columns(bias, projection.outputs) - base.float().cpu()
    return found

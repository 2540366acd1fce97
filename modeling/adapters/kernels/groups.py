"""What one launch of the multi-adapter product reads: pools of up to three projections."""

from dataclasses import dataclass

from torch import Tensor

from modeling.adapters.bank import AdapterBank
from modeling.adapters.product import OutputSlice

MAX_TARGETS = 3
"""Projections of one launch."""


@dataclass(frozen=True)
class LaunchGroup:
    """Projections of one launch, padded to three by projections of width 0.

    key: the group's number among those of a plan.
    count: projections, without padding.
    a, bt: their pools.
    projections: their indices.
    outputs, offsets: how many columns of y each changes, from which one on.
    inputs: columns of x.
    layers: layers of a pool.
    """

    key: int
    count: int
    a: tuple[Tensor, ...]
    bt: tuple[Tensor, ...]
    projections: tuple[int, ...]
    outputs: tuple[int, ...]
    offsets: tuple[int, ...]
    inputs: int
    layers: int


def group_of(bank: AdapterBank, targets: tuple[OutputSlice, ...], key: int) -> LaunchGroup:
    """Gather the pools of up to three projections that share x."""
    indices = [target.projection for target in targets]
    layers = {bank.projections[index].num_layers for index in indices}
    inputs = {bank.projections[index].local_inputs for index in indices}
    assert len(layers) == len(inputs) == 1, f"projections of one x differ: {indices}"
    padding = MAX_TARGETS - len(targets)
    # Padded targets repeat the last pool; no program is launched for them.
    padded = indices + indices[-1:] * padding
    return LaunchGroup(
        key=key,
        count=len(targets),
        a=tuple(bank.pools[index].a for index in padded),
        bt=tuple(bank.pools[index].bt for index in padded),
        projections=tuple(padded),
        outputs=(*(bank.projections[i].local_outputs for i in indices), *[0] * padding),
        offsets=(*(target.offset for target in targets), *[0] * padding),
        inputs=inputs.pop(),
        layers=layers.pop(),
    )


def split_columns(inputs: int, columns: int, splits: int) -> tuple[int, int]:
    """Cut x's width into up to `splits` parts of whole tiles: a part's columns, and how many."""
    num_columns = -(-inputs // columns)
    split_width = -(-num_columns // splits) * columns
    return split_width, -(-inputs // split_width)

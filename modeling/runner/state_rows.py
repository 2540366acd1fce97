"""Which rows of a step recurrent layers compute together."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from modeling.adapters.product import AdapterData
from modeling.models.context import StateRows
from modeling.runner.input_batch import StepLayout

Adapters = Callable[[Sequence[int], Sequence[int]], AdapterData]
"""From the adapter slots and lengths of runs of tokens to what their rows compute with."""


def state_rows(
    layout: StepLayout, slots: Tensor | None, adapters: Adapters
) -> tuple[StateRows, ...]:
    """Return a step's rows, those of one token with a state together.

    slots: int64 [rows], the rows' batch slots on the device; None to keep no states.
    """
    found = []
    for rows, first, last, begins, kept in _together(layout):
        own = list(_runs(layout, first, last))
        adapter_slots = [slot for slot, _ in own]
        lengths = [length for _, length in own]
        found.append(
            StateRows(
                tokens=slice(first, last),
                single=last - first == len(rows),
                begins=begins,
                slots=None if slots is None else slots[rows.start : rows.stop],
                adapter_data=adapters(adapter_slots, lengths) if max(adapter_slots) >= 0 else None,
                kept=kept,
            )
        )
    return tuple(found)


class _Part(NamedTuple):
    """Rows of which the tokens first .. last - 1 are computed together.

    begins: whether they have no state yet. kept: as `StateRows` has it.
    """

    rows: range
    first: int
    last: int
    begins: bool
    kept: int = -1


def _together(layout: StepLayout) -> Iterator[_Part]:
    """Neighbouring rows of one token that all have a state, or none; each other row by itself.

    A row is cut where its states are kept.
    """
    bounds, starts = layout.bounds.tolist(), layout.row_starts.tolist()
    keeps = layout.row_keeps or ((),) * len(starts)
    first = 0
    for row in range(1, len(starts) + 1):
        if row < len(starts):
            both_single = bounds[row + 1] - bounds[first] == row + 1 - first
            same = (starts[row] == 0) == (starts[first] == 0)
            if both_single and same and not keeps[row] and not keeps[first]:
                continue
        rows, begin, begins = range(first, row), bounds[first], starts[first] == 0
        for position, number in keeps[first]:
            end = bounds[first] + position - starts[first]
            yield _Part(rows, begin, end, begins, number)
            begin, begins = end, False
        if begin < bounds[row]:
            yield _Part(rows, begin, bounds[row], begins)
        first = row


def _runs(layout: StepLayout, first: int, last: int) -> Iterator[tuple[int, int]]:
    """The adapter slots and lengths of the tokens first .. last - 1."""
    end = 0
    for slot, length in zip(layout.adapter_slots, layout.adapter_lengths, strict=True):
        start, end = end, end + length
        if (common := min(end, last) - max(start, first)) > 0:
            yield slot, common

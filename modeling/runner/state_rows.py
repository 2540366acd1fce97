"""Which rows of a step recurrent layers compute together."""

from collections.abc import Callable, Iterator, Sequence

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
    bounds = layout.bounds.tolist()
    found = []
    for rows, begins in _together(bounds, layout.row_starts.tolist()):
        first, last = bounds[rows.start], bounds[rows.stop]
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
            )
        )
    return tuple(found)


def _together(bounds: Sequence[int], starts: Sequence[int]) -> Iterator[tuple[range, bool]]:
    """Neighbouring rows of one token that all have a state, or none; each longer row by itself.

    The second is whether they begin.
    """
    first = 0
    for row in range(1, len(starts) + 1):
        if row < len(starts):
            both_single = bounds[row + 1] - bounds[first] == row + 1 - first
            if both_single and (starts[row] == 0) == (starts[first] == 0):
                continue
        yield range(first, row), starts[first] == 0
        first = row


def _runs(layout: StepLayout, first: int, last: int) -> Iterator[tuple[int, int]]:
    """The adapter slots and lengths of the tokens first .. last - 1."""
    end = 0
    for slot, length in zip(layout.adapter_slots, layout.adapter_lengths, strict=True):
        start, end = end, end + length
        if (common := min(end, last) - max(start, first)) > 0:
            yield slot, common

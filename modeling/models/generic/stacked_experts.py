"""Experts of which a checkpoint has a matrix each, where the module has one tensor of all."""

from collections import defaultdict
from dataclasses import dataclass, field

from torch import Tensor

from sharding.loader import Weights
from sharding.slicing import Segments, width


@dataclass
class StackedExperts:
    """One matrix for each expert, or several that lie below each other: parts[i][expert]."""

    parts: dict[int, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))

    def read(
        self,
        weights: Weights,
        shape: tuple[int, ...],
        rows: Segments,
        columns: Segments,
        experts: range | None = None,
    ) -> Tensor:
        """[experts, rows, columns] of the whole `shape`; rows: of all parts together.

        experts: those to read; None: all.
        """
        count, height, wide = shape
        experts = range(count) if experts is None else experts
        each = height // len(self.parts)
        made = weights.empty(len(experts), width(rows), width(columns))
        start = 0
        for part in sorted(self.parts):
            own = within(rows, part * each, each)
            stop = start + width(own)
            names = self.parts[part]
            for index, expert in enumerate(experts):
                made[index, start:stop] = weights.read(names[expert], (each, wide), own, columns)
            weights.leave(*(name for expert, name in names.items() if expert not in experts))
            start = stop
        return made


def within(segments: Segments, start: int, size: int) -> Segments:
    """Return the segments' indices of start .. start + size - 1, counted from start."""
    cut = ((max(a, start) - start, min(b, start + size) - start) for a, b in segments)
    return tuple((a, b) for a, b in cut if a < b)

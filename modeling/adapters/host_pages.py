"""Pages of staged adapters in host memory.

A page of a projection has two matrices, A and Bt, each [layers * 8, width].
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

PAGE_ROWS = 8


@dataclass(frozen=True)
class HostMatrix:
    """A or Bt of one page in host memory.

    ranges: row ranges [n, width], in order.
    firsts: the index of each range's first row.
    """

    ranges: tuple[Tensor, ...]
    firsts: tuple[int, ...]

    def write(self, first: int, rows: Tensor) -> None:
        """Write rows [n, width] from row `first` on, in the pools' type."""
        index, done = bisect_right(self.firsts, first) - 1, 0
        while self.ranges and done < len(rows):  # A rank without token ids has no ranges.
            part, start = self.ranges[index], first + done - self.firsts[index]
            count = min(len(part) - start, len(rows) - done)
            part[start : start + count].copy_(rows[done : done + count])
            done += count
            index += 1

    def write_layers(self, layers: Sequence[int], rows: Tensor) -> None:
        """Write the rows of several layers, [layers, n <= 8, width]; a page's other rows are 0.

        Consecutive layers are written as one range.
        """
        num_layers, count, width = rows.shape
        if tuple(layers) == tuple(range(layers[0], layers[0] + num_layers)):
            if count < PAGE_ROWS:
                padded = rows.new_zeros(num_layers, PAGE_ROWS, width)
                padded[:, :count] = rows
                rows = padded
            self.write(layers[0] * PAGE_ROWS, rows.flatten(0, 1))
        else:
            for layer, own in zip(layers, rows, strict=True):
                self.write(layer * PAGE_ROWS, own)

    def copy_to(self, page: Tensor) -> None:
        """Queue a copy of all rows to a page of a pool, [rows, width], on the current stream."""
        for first, part in zip(self.firsts, self.ranges, strict=True):
            page[first : first + len(part)].copy_(part, non_blocking=True)


@dataclass(frozen=True)
class HostPage:
    """One page of a projection: its two matrices."""

    a: HostMatrix
    bt: HostMatrix


def write_row(pages: Sequence[HostPage], row: int, layers: Sequence[int], values: Tensor) -> None:
    """Write one row of Bt in several layers, [layers, width]; row: counted through the pages."""
    page, within = divmod(row, PAGE_ROWS)
    for layer, own in zip(layers, values, strict=True):
        pages[page].bt.write(layer * PAGE_ROWS + within, own[None])

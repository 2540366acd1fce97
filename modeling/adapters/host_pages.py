"""Pages of staged adapters in host memory.

A page of a projection has two matrices, A and Bt, each [layers * 8, width]. All pages of a map of
experts are as one page, [layers * pages * 8, width].
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
    data: the bytes of each range.
    """

    ranges: tuple[Tensor, ...]
    firsts: tuple[int, ...]
    data: tuple[memoryview, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.ranges[0].shape[1] * self.ranges[0].itemsize

    def zero(self) -> None:
        """Set all rows to zero."""
        for part in self.ranges:
            part.zero_()

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

        Consecutive layers are written together.
        """
        num_layers, count, width = rows.shape
        if tuple(layers) != tuple(range(layers[0], layers[0] + num_layers)):
            for layer, own in zip(layers, rows, strict=True):
                self.write(layer * PAGE_ROWS, own)
            return
        if count < PAGE_ROWS:
            padded = rows.new_zeros(num_layers, PAGE_ROWS, width)
            padded[:, :count] = rows
            rows = padded
        self._write_pages(layers[0] * PAGE_ROWS, rows)

    def write_blocks(self, first: int, rows: Tensor) -> None:
        """Write rows [blocks, n <= 8, width], each block 8 rows behind the one before it."""
        num_blocks, count, _ = rows.shape
        done = 0
        while self.ranges and done < num_blocks:
            start = first + done * PAGE_ROWS
            index = bisect_right(self.firsts, start) - 1
            part = self.ranges[index][start - self.firsts[index] :]
            whole = min(len(part) // PAGE_ROWS, num_blocks - done)
            if whole:
                own = part[: whole * PAGE_ROWS].view(whole, PAGE_ROWS, -1)
                own[:, :count].copy_(rows[done : done + whole])
            else:  # A piece may end within a block.
                whole = 1
                self.write(start, rows[done])
            done += whole

    def _write_pages(self, first: int, rows: Tensor) -> None:
        """Write all rows of layers, [layers, 8, width], however they lie in memory.

        A piece may end within a layer: its rows are written alone.
        """
        done, total = 0, len(rows) * PAGE_ROWS
        while self.ranges and done < total:
            index = bisect_right(self.firsts, first + done) - 1
            part = self.ranges[index][first + done - self.firsts[index] :][: total - done]
            layer, within = divmod(done, PAGE_ROWS)
            if within or len(part) < PAGE_ROWS:
                own = rows[layer, within:][: len(part)]
                part[: len(own)].copy_(own)
                done += len(own)
            else:
                count = len(part) // PAGE_ROWS
                own = rows[layer : layer + count]
                part[: count * PAGE_ROWS].view(own.shape).copy_(own)
                done += count * PAGE_ROWS

    def copy_to(self, target: Tensor, begin: int = 0) -> None:
        """Queue a copy of rows from `begin` on to [rows, width], on the current stream."""
        for first, part in zip(self.firsts, self.ranges, strict=True):
            count = part.shape[0]
            start, stop = max(first, begin), min(first + count, begin + target.shape[0])
            if start < stop:
                own = part if stop - start == count else part[start - first : stop - first]
                is_whole = stop - start == target.shape[0]
                into = target if is_whole else target[start - begin : stop - begin]
                into.copy_(own, non_blocking=True)


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

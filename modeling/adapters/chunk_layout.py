"""How an adapter's matrices lie in the chunks of the pinned pool."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RowRange:
    """Rows of a matrix in one chunk.

    chunk: index among the adapter's chunks.
    offset: elements from the chunk's start.
    shape: (rows, width).
    """

    chunk: int
    offset: int
    shape: tuple[int, int]


@dataclass(frozen=True)
class ChunkLayout:
    """The row ranges of an adapter's matrices, and how many chunks they take."""

    matrices: tuple[tuple[RowRange, ...], ...]
    num_chunks: int


def lay_out(matrices: Sequence[tuple[int, int]], chunk: int) -> ChunkLayout:
    """Lay out matrices of (rows, width) in chunks of `chunk` elements; no row crosses a chunk."""
    laid = []
    index, offset = 0, 0
    for rows, width in matrices:
        assert width <= chunk, (width, chunk)
        ranges = []
        while rows and width:
            count = min(rows, (chunk - offset) // width)
            if count:
                ranges.append(RowRange(index, offset, (count, width)))
            rows -= count
            offset += count * width
            if rows:
                index, offset = index + 1, 0
        laid.append(tuple(ranges))
    return ChunkLayout(tuple(laid), index + 1 if offset else index)

"""How an adapter's matrices lie in pieces of the pinned pool.

A piece is one chunk or several neighbours. An adapter that fits into some chunks, each by itself,
fits into the same chunks in larger pieces.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RowRange:
    """Rows of a matrix in one piece.

    piece: index among the adapter's pieces.
    offset: elements from the piece's start.
    shape: (rows, width).
    """

    piece: int
    offset: int
    shape: tuple[int, int]


@dataclass(frozen=True)
class ChunkLayout:
    """The row ranges of an adapter's matrices, and how many pieces they take."""

    matrices: tuple[tuple[RowRange, ...], ...]
    num_pieces: int


def lay_out(matrices: Sequence[tuple[int, int]], pieces: Iterable[int]) -> ChunkLayout:
    """Lay out matrices of (rows, width) in pieces of so many elements; no row crosses a piece."""
    laid = []
    sizes = iter(pieces)
    index, offset, size = -1, 0, 0
    for rows, width in matrices:
        ranges = []
        while rows and width:
            count = min(rows, (size - offset) // width)
            if count:
                ranges.append(RowRange(index, offset, (count, width)))
            rows -= count
            offset += count * width
            if rows:
                index, offset, size = index + 1, 0, next(sizes)
                assert width <= size, (width, size)
        laid.append(tuple(ranges))
    return ChunkLayout(tuple(laid), index + 1)

"""The pinned pool: chunks are allocated once, and not before copies out of them are done."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modeling.adapters.chunk_layout import ChunkLayout, lay_out
from modeling.adapters.pinned_pool import PinnedPool
from modeling.adapters.pool_sizes import chunk_size
from tests.modeling.adapters.lora_files import DOWN, UP


@dataclass
class Copy:
    """A copy in progress, as an event shows it."""

    done: bool = False
    waits: list[str] = field(default_factory=list)

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.waits.append("waited")
        self.done = True


def chunks(pieces: Sequence[range] | None) -> list[int]:
    """All chunks of some pieces, sorted."""
    assert pieces is not None
    return sorted(chunk for piece in pieces for chunk in piece)


def test_all_chunks_are_given_out_once_in_any_order() -> None:
    pool = PinnedPool(20, 128, False)
    chooser = random.Random(1)
    held: list[list[range]] = []
    for _ in range(400):
        wanted = chooser.randrange(1, 7)
        free = 20 - pool.num_taken
        taken = pool.allocate(wanted)
        assert (taken is None) == (wanted > free), "any free chunks will do"
        if taken is not None:
            held.append(taken)
        if taken is None or chooser.random() < 0.4:
            pool.free(held.pop(chooser.randrange(len(held))))
        pool.check([piece for each in held for piece in each])


def test_chunks_that_are_still_copied_come_last_and_are_waited_for() -> None:
    pool = PinnedPool(4, 128, False)
    first, second = pool.allocate(2), pool.allocate(1)
    assert first is not None
    assert second is not None
    copy = Copy()
    pool.free(first, copy)
    assert pool.num_taken == 3
    assert chunks(pool.allocate(1)) == [3]
    assert copy.waits == [], "there was another one"
    pool.check([*second, range(3, 4)])
    assert chunks(pool.allocate(2)) == chunks(first)
    assert copy.waits == ["waited"]
    assert pool.allocate(1) is None


def test_chunks_whose_copy_ended_by_itself_are_not_waited_for() -> None:
    pool = PinnedPool(2, 128, False)
    taken = pool.allocate(2)
    assert taken is not None
    copy = Copy()
    pool.free(taken, copy)
    copy.done = True
    assert chunks(pool.allocate(2)) == [0, 1]
    assert copy.waits == []


def test_neighbours_are_taken_together() -> None:
    pool = PinnedPool(12, 128, False)
    held = [pool.allocate(count) for count in (2, 1, 3, 1, 5)]
    assert None not in held
    for index in (0, 4, 2):
        pool.free(held[index] or [])
    assert pool.allocate(3) == [range(3, 6)], "of the smallest piece that has so many"
    pool.free([range(3, 6)])
    pool.free(held[1] or [])
    assert pool.allocate(6) == [range(6)], "pieces that meet are one"
    assert pool.allocate(5) == [range(7, 12)]
    pool.check([range(12)])


def test_pieces_are_taken_where_no_single_one_is_large_enough() -> None:
    pool = PinnedPool(8, 128, False)
    held = [pool.allocate(2) or [] for _ in range(4)]
    pool.free(held[0])
    pool.free(held[2])
    taken = pool.allocate(3)
    assert taken == [range(2), range(4, 5)]
    pool.check([*taken, *held[1], *held[3]])


def test_a_check_finds_what_is_lost() -> None:
    pool = PinnedPool(4, 128, False)
    pool.allocate(2)
    with pytest.raises(AssertionError, match="lost"):
        pool.check([range(1)])


def cells(layout: ChunkLayout) -> list[tuple[int, int]]:
    """Every element of every run: (piece, offset)."""
    return [
        (run.piece, run.offset + i)
        for runs in layout.matrices
        for run in runs
        for i in range(run.shape[0] * run.shape[1])
    ]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), max_size=8),
    st.integers(12, 40),
)
def test_matrices_lie_in_whole_rows_one_after_the_other(
    halves: list[tuple[int, int]], chunk: int
) -> None:
    layout = lay_out(halves, repeat(chunk))
    found = cells(layout)
    assert found == sorted(set(found)), "no element twice, in order"
    assert all(0 <= index < layout.num_pieces and offset < chunk for index, offset in found)
    for (rows, width), runs in zip(halves, layout.matrices, strict=True):
        assert sum(run.shape[0] for run in runs) == (rows if width else 0)
        assert all(run.shape[1] == width for run in runs)
    # What is lost: less than a row at the end of each chunk but the last.
    widest = max((width for _, width in halves), default=0)
    used = {index: sum(1 for at, _ in found if at == index) for index in range(layout.num_pieces)}
    assert all(count > chunk - widest for index, count in used.items() if index + 1 < len(used))


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), max_size=8),
    st.integers(12, 40),
    st.lists(st.integers(1, 4)),
)
def test_what_fits_into_single_chunks_fits_into_pieces_of_them(
    halves: list[tuple[int, int]], chunk: int, pieces: list[int]
) -> None:
    num_chunks = lay_out(halves, repeat(chunk)).num_pieces
    sizes: list[int] = []
    for size in (*pieces, *repeat(1, num_chunks)):
        sizes.append(min(size, num_chunks - sum(sizes)))
    found = cells(lay_out(halves, [size * chunk for size in sizes if size]))
    assert found == sorted(set(found))
    assert len(found) == sum(rows * width for rows, width in halves)
    assert all(offset < sizes[index] * chunk for index, offset in found)


def test_a_chunk_holds_the_widest_row_and_is_small_beside_a_page() -> None:
    assert chunk_size((UP, DOWN), torch.float32) == 256
    assert chunk_size((UP,), torch.float64) % 128 == 0
    assert chunk_size((), torch.float32) > 0

"""The pinned pool: chunks are allocated once, and not before copies out of them are done."""

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modeling.adapters.chunk_layout import ChunkLayout, lay_out
from modeling.adapters.host_cache import chunk_size
from modeling.adapters.pinned_pool import PinnedPool
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


def test_all_chunks_are_given_out_once_in_any_order() -> None:
    pool = PinnedPool(20, 128, False)
    chooser = random.Random(1)
    held: list[list[int]] = []
    for _ in range(400):
        wanted = chooser.randrange(1, 7)
        free = 20 - pool.num_taken
        taken = pool.allocate(wanted)
        assert (taken is None) == (wanted > free), "any free chunks will do"
        if taken is not None:
            held.append(taken)
        if taken is None or chooser.random() < 0.4:
            pool.free(held.pop(chooser.randrange(len(held))))
        pool.check([chunk for each in held for chunk in each])


def test_chunks_that_are_still_copied_come_last_and_are_waited_for() -> None:
    pool = PinnedPool(4, 128, False)
    first, second = pool.allocate(2), pool.allocate(1)
    assert first is not None
    assert second is not None
    copy = Copy()
    pool.free(first, copy)
    assert pool.num_taken == 3
    assert pool.allocate(1) == [3]
    assert copy.waits == [], "there was another one"
    pool.check([*second, 3])
    assert sorted(pool.allocate(2) or []) == sorted(first)
    assert copy.waits == ["waited"]
    assert pool.allocate(1) is None


def test_chunks_whose_copy_ended_by_itself_are_not_waited_for() -> None:
    pool = PinnedPool(2, 128, False)
    taken = pool.allocate(2)
    assert taken is not None
    copy = Copy()
    pool.free(taken, copy)
    copy.done = True
    assert sorted(pool.allocate(2) or []) == [0, 1]
    assert copy.waits == []


def test_a_check_finds_what_is_lost() -> None:
    pool = PinnedPool(4, 128, False)
    pool.allocate(2)
    with pytest.raises(AssertionError, match="lost"):
        pool.check([0])


def cells(layout: ChunkLayout) -> list[tuple[int, int]]:
    """Every element of every run: (chunk, offset)."""
    return [
        (run.chunk, run.offset + i)
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
    layout = lay_out(halves, chunk)
    found = cells(layout)
    assert found == sorted(set(found)), "no element twice, in order"
    assert all(0 <= index < layout.num_chunks and offset < chunk for index, offset in found)
    for (rows, width), runs in zip(halves, layout.matrices, strict=True):
        assert sum(run.shape[0] for run in runs) == (rows if width else 0)
        assert all(run.shape[1] == width for run in runs)
    # What is lost: less than a row at the end of each chunk but the last.
    widest = max((width for _, width in halves), default=0)
    used = {index: sum(1 for at, _ in found if at == index) for index in range(layout.num_chunks)}
    assert all(count > chunk - widest for index, count in used.items() if index + 1 < len(used))


def test_a_chunk_holds_the_widest_row_and_is_small_beside_a_page() -> None:
    assert chunk_size((UP, DOWN), torch.float32) == 256
    assert chunk_size((UP,), torch.float64) % 128 == 0
    assert chunk_size((), torch.float32) > 0

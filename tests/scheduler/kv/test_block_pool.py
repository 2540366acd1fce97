"""Blocks: counted, kept, evicted in the right order, never in two states."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.kv.block_pool import BlockPool


def ignore(block: int) -> None:
    """Ignore which block is forgotten."""


def test_blocks_are_taken_and_given_back() -> None:
    pool = BlockPool(4, ignore)
    taken = pool.allocate(3)
    assert len(set(taken)) == 3
    assert pool.available == 1
    pool.check([taken])
    pool.release(taken)
    assert pool.available == 4
    pool.check([])


def test_more_than_there_is_cannot_be_taken() -> None:
    pool = BlockPool(2, ignore)
    with pytest.raises(AssertionError):
        pool.allocate(3)


def test_a_block_cannot_be_released_twice() -> None:
    pool = BlockPool(2, ignore)
    taken = pool.allocate(1)
    pool.release(taken)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(taken)


def test_a_shared_block_stays_until_its_last_holder_releases_it() -> None:
    pool = BlockPool(2, ignore)
    taken = pool.allocate(1)
    pool.share(taken)
    pool.check([taken, taken])
    pool.release(taken)
    assert pool.available == 1
    pool.release(taken)
    assert pool.available == 2


def test_kept_content_survives_its_holders_and_can_be_shared_again() -> None:
    pool = BlockPool(2, ignore)
    (block,) = pool.allocate(1)
    pool.keep(block)
    pool.release([block])
    assert pool.is_idle(block)
    assert pool.available == 2
    pool.share([block])
    assert not pool.is_idle(block)
    pool.check([[block]])


def test_free_blocks_are_taken_before_kept_ones_and_ends_of_chains_first() -> None:
    forgotten: list[int] = []
    pool = BlockPool(4, forgotten.append)
    chain = pool.allocate(3)
    for block in chain:
        pool.keep(block)
    pool.release(chain)
    pool.allocate(1)
    assert forgotten == []
    pool.allocate(2)
    assert forgotten == [chain[2], chain[1]]


def test_the_least_recently_used_content_goes_first() -> None:
    forgotten: list[int] = []
    pool = BlockPool(2, forgotten.append)
    first, second = pool.allocate(2)
    for block in (first, second):
        pool.keep(block)
        pool.release([block])
    pool.share([first])
    pool.release([first])
    pool.allocate(1)
    assert forgotten == [second]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), max_size=60))
def test_every_block_is_always_in_one_state(steps: list[tuple[int, int]]) -> None:
    pool = BlockPool(8, ignore)
    tables: list[list[int]] = []
    for kind, number in steps:
        if kind == 0 and number % 4 <= pool.available:
            tables.append(pool.allocate(number % 4))
        elif kind == 1 and tables:
            pool.release(tables.pop(number % len(tables)))
        elif kind == 2 and tables:
            table = list(tables[number % len(tables)])
            pool.share(table)
            tables.append(table)
        elif kind == 3 and tables:
            for block in tables[number % len(tables)]:
                pool.keep(block)
        pool.check(tables)

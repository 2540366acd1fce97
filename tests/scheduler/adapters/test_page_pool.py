"""Slots and pages: each held once or free."""

import pytest

from scheduler.adapters.page_pool import AdapterPages


def test_slots_and_pages_are_taken_and_given_back() -> None:
    pages = AdapterPages(num_pages=(4, 4), num_slots=2)
    slot, taken = pages.allocate((3, 1))
    assert [len(each) for each in taken] == [3, 1]
    pages.check([slot], [taken])
    assert not pages.fits((2, 1), 0, (0, 0))
    assert pages.fits((1, 3), 0, (0, 0))
    assert pages.fits((2, 1), 0, (1, 0))
    pages.release(slot, taken)
    pages.check([], [])


def test_an_adapter_gets_neighbours_where_there_are_some() -> None:
    pages = AdapterPages(num_pages=(7,), num_slots=9)
    held = [pages.allocate((count,)) for count in (2, 1, 3)]
    for slot, taken in (held[2], held[0]):
        pages.release(slot, taken)
    assert pages.allocate((3,))[1] == [[0, 1, 3]]
    assert pages.allocate((2,))[1] == [[4, 5]]


def test_pools_may_differ_in_size() -> None:
    pages = AdapterPages(num_pages=(4, 1, 0), num_slots=3)
    slot, taken = pages.allocate((1, 1, 0))
    pages.check([slot], [taken])
    assert taken[1] == [0]
    assert pages.fits((3, 0, 0), 0, (0, 0, 0))
    assert not pages.fits((1, 1, 0), 0, (0, 0, 0))
    assert not pages.fits((1, 0, 1), 0, (4, 4, 0))


def test_without_a_slot_nothing_fits() -> None:
    pages = AdapterPages(num_pages=(4,), num_slots=1)
    pages.allocate((0,))
    assert not pages.fits((0,), 0, (0,))
    assert pages.fits((0,), 1, (0,))


def test_a_page_held_twice_is_noticed() -> None:
    pages = AdapterPages(num_pages=(4,), num_slots=2)
    slot, taken = pages.allocate((2,))
    with pytest.raises(AssertionError, match="pages of projection 0"):
        pages.check([slot], [[[*taken[0], taken[0][0]]]])
    with pytest.raises(AssertionError, match="slots"):
        pages.check([slot, slot], [taken])
    with pytest.raises(AssertionError):
        pages.allocate((3,))

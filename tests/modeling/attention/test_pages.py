import numpy as np
import pytest

from modeling.attention.pages import RowPages, leading_decodes, starts


@pytest.mark.parametrize("page_size", [1, 7, 16, 128])
def test_pages_hold_exactly_the_keys(page_size: int) -> None:
    lengths = [1, 15, 16, 17, 128, 129, 400]
    pages = RowPages.of(lengths, page_size)
    counts = np.diff(pages.indptr)
    assert ((counts - 1) * page_size + pages.last).tolist() == lengths
    assert pages.total == counts.sum()
    assert pages.indptr[0] == 0
    assert pages.last.min() >= 1
    assert pages.last.max() <= page_size
    assert pages.indptr.dtype == pages.last.dtype == np.int32


def test_the_ragged_list_is_the_tables_without_their_rest() -> None:
    tables = np.array([[4, 9, 9], [7, 1, 3], [2, 9, 9]], dtype=np.int32)
    pages = RowPages.of([16, 33, 3], 16)
    assert tables[pages.within(3)].tolist() == [4, 7, 1, 3, 2]
    assert np.flatnonzero(pages.within(3)).tolist() == [0, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([1, 1, 1], 3), ([5, 1], 0), ([1, 5, 1], 1), ([1, 1, 8, 8], 2), ([], 0)],
)
def test_leading_decodes(lengths: list[int], expected: int) -> None:
    assert leading_decodes(lengths) == expected


def test_starts() -> None:
    assert starts([3, 1, 5]).tolist() == [0, 3, 4, 9]
    assert starts([]).tolist() == [0]

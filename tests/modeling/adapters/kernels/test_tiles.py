import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from modeling.adapters.kernels.tiles import HEADER, cut_tiles


@given(st.lists(st.integers(-1, 5), max_size=60), st.sampled_from([1, 2, 8, 16]), st.booleans())
def test_every_token_of_an_adapter_is_in_one_tile_of_its_slot(
    slots: list[int], size: int, with_base: bool
) -> None:
    of_token = np.array(slots, dtype=np.int32)
    distinct = min(7 if with_base else 6, len(slots))
    most = distinct + (len(slots) - distinct) // size
    records, count = cut_tiles(of_token, size, most, with_base)
    assert records.shape == (most, HEADER + size)
    assert (records[:, 2] == count).all()
    number = int(records[0, 3]) if most else 0
    assert (records[:, 3] == number).all()
    assert (records[:count, 0] >= 0).all()
    assert (records[count:, 0] == -1).all()
    assert (np.delete(records[number:], [2, 3], axis=1) == -1).all()
    seen: list[int] = []
    for record in records[:number]:
        tokens = record[HEADER:]
        used = tokens[tokens >= 0]
        assert len(used) >= 1
        assert (tokens[: len(used)] >= 0).all(), "tokens lie together at the front"
        assert (of_token[used] == record[0]).all()
        assert record[1] == len(seen), "positions follow the order of the tiles"
        seen += used.tolist()
    assert sorted(seen) == [t for t, slot in enumerate(slots) if slot >= 0 or with_base]


def test_tokens_keep_their_order_and_tiles_are_full() -> None:
    of_token = np.array([2, -1, 0, 2, 2, 0, 2], dtype=np.int32)
    records, count = cut_tiles(of_token, 2, 6)
    assert count == 3
    assert records[:3, :2].tolist() == [[0, 0], [2, 2], [2, 4]]
    assert records[:3, HEADER:].tolist() == [[2, 5], [0, 3], [4, 6]]


def test_the_base_alone_has_no_tile() -> None:
    records, count = cut_tiles(np.full(5, -1, dtype=np.int32), 8, 5)
    assert count == 0
    assert (records[:, 2] == 0).all()

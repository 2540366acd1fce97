"""Cuts cover everything, in order, and fit each other."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.slicing import (
    Segments,
    cut_heads,
    cut_vocabulary,
    cut_width,
    even_cut,
    fused_heads,
    spread_experts,
    whole,
    width,
)


def indices(segments: Segments) -> list[int]:
    return [i for start, stop in segments for i in range(start, stop)]


@settings(deadline=None)
@given(share=st.integers(1, 9), ranks=st.integers(1, 8))
def test_even_cuts_partition(share: int, ranks: int) -> None:
    size = share * ranks
    joined = [i for rank in range(ranks) for i in indices(even_cut(size, rank, ranks, "x"))]
    assert joined == list(range(size)) == indices(whole(size))


def test_whole_experts_are_spread() -> None:
    assert [spread_experts(6, rank, 4) for rank in range(4)] == [
        range(1),
        range(1, 3),
        range(3, 4),
        range(4, 6),
    ]
    with pytest.raises(ValueError, match=r"2 experts are less than tensor_parallel = 4"):
        spread_experts(2, 0, 4)


def test_an_uneven_cut_says_what_to_change() -> None:
    with pytest.raises(ValueError, match=r"intermediate_size \(50\).*tensor_parallel = 4.*divisor"):
        even_cut(50, 0, 4, "intermediate_size")


@settings(deadline=None)
@given(
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    group=st.sampled_from([1, 2, 4, 7]),
    ranks=st.sampled_from([1, 2, 4, 8]),
    head_dim=st.sampled_from([1, 3, 8]),
)
def test_every_query_head_has_its_own_kv_head(
    kv_heads: int, group: int, ranks: int, head_dim: int
) -> None:
    heads = kv_heads * group
    if heads % ranks:
        return
    seen: list[int] = []
    for rank in range(ranks):
        cut = cut_heads(heads, kv_heads, head_dim, rank, ranks)
        assert width(cut.queries) == cut.num_heads * head_dim
        assert width(cut.keys) == cut.num_kv_heads * head_dim
        queries, keys = indices(cut.queries), indices(cut.keys)
        seen += queries
        for local, column in enumerate(queries):
            local_kv = (local // head_dim) // (cut.num_heads // cut.num_kv_heads)
            assert keys[local_kv * head_dim] // head_dim == (column // head_dim) // group
    assert seen == list(range(heads * head_dim))


def test_kv_heads_are_replicated_when_there_are_fewer_than_ranks() -> None:
    cuts = [cut_heads(8, 2, 4, rank, 4) for rank in range(4)]
    assert [cut.keys for cut in cuts] == [((0, 4),), ((0, 4),), ((4, 8),), ((4, 8),)]


def test_heads_that_do_not_fit_the_ranks() -> None:
    with pytest.raises(ValueError, match="neither cut nor replicated"):
        cut_heads(12, 3, 4, 0, 2)
    with pytest.raises(ValueError, match=r"num_attention_heads \(12\)"):
        cut_heads(12, 3, 4, 0, 8)


def test_products_of_heads_in_blocks() -> None:
    """Each of two blocks is q, q, k, v; or, where values come first, q, q, v, k."""
    heads = cut_heads(4, 2, 1, 0, 1)
    cut = fused_heads(heads.queries, heads.keys, 1, (2, 1))
    assert indices(cut) == [0, 1, 4, 5, 2, 6, 3, 7]
    cut = fused_heads(heads.queries, heads.keys, 1, (2, 1), "qvk")
    assert indices(cut) == [0, 1, 4, 5, 3, 7, 2, 6]
    heads = cut_heads(4, 2, 3, 1, 2)
    assert fused_heads(heads.queries, heads.keys, 3, (2, 1)) == ((12, 24),), "one run"


@settings(deadline=None)
@given(vocab=st.integers(1, 60), ranks=st.integers(1, 8))
def test_vocabulary_is_padded_to_equal_ranges(vocab: int, ranks: int) -> None:
    cuts = [cut_vocabulary(vocab, rank, ranks) for rank in range(ranks)]
    assert [i for cut in cuts for i in indices(cut.rows)] == list(range(vocab))
    assert len({cut.num_rows for cut in cuts}) == 1
    assert vocab <= cuts[0].num_rows * ranks < vocab + ranks
    for rank, cut in enumerate(cuts):  # gathered logits stand in vocabulary order
        assert cut.start == min(rank * cut.num_rows, vocab)


@given(st.integers(1, 40_000), st.integers(1, 9))
def test_widths_of_any_size_are_cut(size: int, ranks: int) -> None:
    if size < ranks:
        with pytest.raises(ValueError, match=rf"intermediate_size \({size}\) is less"):
            cut_width(size, 0, ranks, "intermediate_size")
        return
    cuts = [cut_width(size, rank, ranks, "x") for rank in range(ranks)]
    assert [i for cut in cuts for i in indices(cut)] == list(range(size))
    shares = [width(cut) for cut in cuts]
    assert min(shares) > 0
    # A line more at most, and lines are an eighth of a share at most but for the smallest widths.
    assert max(shares) - min(shares) <= max(2, size // ranks // 2)


@pytest.mark.parametrize(("size", "ranks"), [(11008, 3), (14336, 3), (18944, 3), (4864, 5)])
def test_widths_of_real_models_are_cut_in_whole_lines(size: int, ranks: int) -> None:
    shares = [width(cut_width(size, rank, ranks, "x")) for rank in range(ranks)]
    assert all(share % 64 == 0 for share in shares)
    assert max(shares) - min(shares) == 64

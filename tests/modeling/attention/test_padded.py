"""Padded attention against the equation of padded.py, written as a loop, and the growing cache."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers import LlamaConfig as CacheConfig

from modeling.attention.padded import GrowingCache, PaddedAttention, local_head_mask
from sharding.group import SingleRank, TensorParallel
from tests.ranks import run_ranks
from tests.sharding.views import LoneRank

BATCH, HEADS, WIDTH, PLACES = 3, 4, 8, 6
SCALE = 0.4
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]])


def random_qkv() -> list[Tensor]:
    """q, k and v of all places, [batch, places, heads, width] each."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(BATCH, PLACES, HEADS, WIDTH, generator=generator) for _ in range(3)]


def naive(q: Tensor, k: Tensor, v: Tensor, head_mask: Tensor | None = None) -> Tensor:
    """One token and one head at a time, in float64; tokens that see nothing see all alike."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros_like(q)
    for row in range(BATCH):
        for i in range(PLACES):
            seen = [j for j in range(i + 1) if MASK[row, j]]
            for head in range(HEADS):
                places = seen or list(range(PLACES))
                scores = SCALE * k[row, places, head] @ q[row, i, head]
                weights = (scores if seen else torch.zeros(PLACES).double()).softmax(0)
                factor = 1.0 if head_mask is None else float(head_mask[head])
                out[row, i, head] = factor * weights @ v[row, places, head]
    return out


def attend(parts: list[Tensor], mask: Tensor, cache: GrowingCache, layer: int = 0) -> Tensor:
    """[batch, n, heads, width] for n new places."""
    attention = PaddedAttention(mask, cache, SCALE, SingleRank())
    packed = [part.flatten(0, 1) for part in parts]
    return attention.attend(layer, *packed).view(parts[0].shape)


def test_equals_the_equation() -> None:
    parts = random_qkv()
    out = attend(parts, MASK, GrowingCache(None))
    torch.testing.assert_close(out.double(), naive(parts[0], parts[1], parts[2]), atol=1e-5, rtol=0)


def test_heads_can_be_masked() -> None:
    parts, head_mask = random_qkv(), torch.tensor([1.0, 0.0, 0.5, 1.0])
    rows = local_head_mask(head_mask, 2, HEADS, SingleRank())
    attention = PaddedAttention(MASK, GrowingCache(None), SCALE, SingleRank(), rows)
    out = attention.attend(1, *(part.flatten(0, 1) for part in parts)).view(parts[0].shape)
    torch.testing.assert_close(
        out.double(), naive(parts[0], parts[1], parts[2], head_mask), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("kind", ["pairs", "dynamic", "static"])
def test_a_cache_grows_in_its_own_kind(kind: str) -> None:
    parts = random_qkv()
    whole = attend(parts, MASK, GrowingCache(None))
    config = CacheConfig(num_hidden_layers=1)
    made: dict[str, Any] = {
        "dynamic": DynamicCache(),
        "static": StaticCache(config, max_cache_len=9),
    }
    past = made.get(kind)
    outs = []
    for start, stop in ((0, 4), (4, 5), (5, 6)):
        cache = GrowingCache(past)
        assert cache.length == start
        outs.append(attend([part[:, start:stop] for part in parts], MASK[:, :stop], cache))
        assert kind == "pairs" or cache.result is past
        past = cache.result
    # Rows of padding alone see other places when fewer are there.
    torch.testing.assert_close(torch.cat(outs, 1)[:, 2:], whole[:, 2:])
    if kind == "pairs":
        assert isinstance(past, tuple)
        keys, values = past[0]
        assert torch.equal(keys, parts[1].transpose(1, 2))
        assert torch.equal(values, parts[2].transpose(1, 2))


def test_given_pairs_are_left_as_they_were() -> None:
    k, v = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    cache = GrowingCache([[k, v]])
    grown, _ = cache.grow(0, torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))
    assert (k.shape[2], grown.shape[2], cache.length) == (3, 4, 3)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_weights_are_those_of_all_ranks(ranks: int) -> None:
    q, k, v = random_qkv()

    def on_rank(group: TensorParallel) -> list[Tensor]:
        share = HEADS // group.size
        own = slice(group.rank * share, (group.rank + 1) * share)
        attention = PaddedAttention(MASK, GrowingCache(None), SCALE, group, keep_weights=True)
        attention.attend(0, *(part[:, :, own].flatten(0, 1) for part in (q, k, v)))
        assert attention.weights is not None
        return attention.weights

    results = run_ranks(ranks, on_rank)
    for (weights,) in results:
        assert weights.shape == (BATCH, HEADS, PLACES, PLACES)
        torch.testing.assert_close(weights, run_ranks(1, on_rank)[0][0])
        torch.testing.assert_close(weights.sum(-1), torch.ones(BATCH, HEADS, PLACES))
        assert not weights[1, :, 2:, :2].any()


def test_a_head_mask_is_cut_by_ranks() -> None:
    rows = torch.arange(8.0).view(2, 4)
    cut = local_head_mask(rows, 2, 2, LoneRank(1, 2))
    assert cut is not None
    assert cut.tolist() == [[2, 3], [6, 7]]
    assert local_head_mask(None, 2, 2, SingleRank()) is None
    with pytest.raises(ValueError, match=r"head_mask has shape \(3,\), it must be \(4,\) or \(2,"):
        local_head_mask(torch.ones(3), 2, 2, LoneRank(0, 2))

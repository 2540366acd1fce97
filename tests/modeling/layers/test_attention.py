"""Splitting a fused q, k, v: what is rotated, what is stored, what comes back."""

import pytest
import torch

from configs.architectures.llama import Rope
from modeling.attention.kv_cache import CacheSpec, LayerCache, allocate
from modeling.layers.attention import norm_heads, rotate_and_store, rotate_queries, split_heads
from modeling.layers.head_norms import HeadNorms
from modeling.layers.norm import RMSNorm
from modeling.layers.rotary import Rotary, rotate
from sharding.checkpoint import DummySource
from sharding.group import SingleRank
from sharding.loader import Weights
from sharding.slicing import cut_heads

CPU = torch.device("cpu")
HEADS = cut_heads(4, 2, 8, 0, 1)
SLOTS = torch.tensor([3, 0, 6])


@pytest.fixture
def cache() -> LayerCache:
    return allocate(CacheSpec(1, 4, 2, 8, torch.float32), 2, CPU)[0]


@pytest.mark.parametrize("rotated", [True, False])
def test_q_k_and_v_are_split_and_stored(cache: LayerCache, rotated: bool) -> None:
    q, k, v = torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    fused = torch.cat([part.flatten(1) for part in (q, k, v)], dim=1)
    angles = Rotary(Rope(), 8, torch.float32, CPU).angles(torch.arange(3)) if rotated else None
    got = rotate_and_store(split_heads(fused, HEADS), angles, cache, SLOTS, None)
    if angles is not None:
        q, k = rotate(q, *angles), rotate(k, *angles)
    assert torch.equal(got, q)
    assert torch.equal(cache.flat_keys[SLOTS], k)
    assert torch.equal(cache.flat_values[SLOTS], v)


def test_only_selected_tokens_are_stored(cache: LayerCache) -> None:
    fused = torch.randn(3, 8 * 8)
    rotate_and_store(split_heads(fused, HEADS), None, cache, SLOTS, torch.tensor([0, 2]))
    assert cache.flat_keys[SLOTS].flatten(1).any(dim=1).tolist() == [True, False, True]


def test_a_part_of_the_head_is_rotated_and_all_of_it_stored(cache: LayerCache) -> None:
    fused = torch.randn(3, 8 * 8)
    angles = Rotary(Rope(fraction=0.5), 8, torch.float32, CPU).angles(torch.arange(5, 8))
    q = rotate_and_store(split_heads(fused, HEADS), angles, cache, SLOTS, None)
    split = fused.view(3, 8, 8)
    assert torch.equal(q[..., 4:], split[:, :4, 4:])
    assert torch.equal(cache.flat_keys[SLOTS][..., 4:], split[:, 4:6, 4:])
    assert torch.equal(q[..., :4], rotate(split[:, :4, :4], *angles))


def test_each_head_of_q_and_k_is_normed_by_itself() -> None:
    weights = Weights(DummySource(CPU, torch.float32), SingleRank(), torch.float32, CPU)
    q_norm, k_norm = (RMSNorm(name, 8, 1e-6, weights) for name in ("q_norm", "k_norm"))
    k_norm.weight.data.fill_(3.0)
    fused = torch.randn(3, 8 * 8)
    split = fused.view(3, 8, 8)
    got = norm_heads(fused, HEADS, q_norm, k_norm).view(3, 8, 8)
    scale = split.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
    torch.testing.assert_close(got[:, :4], split[:, :4] * scale[:, :4])
    torch.testing.assert_close(got[:, 4:6], 3 * split[:, 4:6] * scale[:, 4:6])
    assert torch.equal(got[:, 6:], split[:, 6:])


@pytest.mark.parametrize("with_values", [False, True])
def test_norms_come_before_the_rotation_and_values_have_one_if_given(
    cache: LayerCache, with_values: bool
) -> None:
    parts = [torch.randn(3, heads, 8) for heads in (4, 2, 2)]
    count = 3 if with_values else 2
    weights = tuple(torch.rand(8) + 0.5 for _ in range(count))
    angles = Rotary(Rope(), 8, torch.float32, CPU).angles(torch.arange(3))
    norms = HeadNorms(weights, (1e-6, 1e-2, 1.0)[:count])
    q = rotate_and_store(parts, angles, cache, SLOTS, None, norms)
    normed = [
        part * (part.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
        for part, weight, eps in zip(parts, weights, norms.eps, strict=False)
    ]
    torch.testing.assert_close(q, rotate(normed[0], *angles))
    torch.testing.assert_close(cache.flat_keys[SLOTS], rotate(normed[1], *angles))
    values = normed[2] if with_values else parts[2]
    torch.testing.assert_close(cache.flat_values[SLOTS], values)
    alone = rotate_queries(parts[0], angles, HeadNorms(weights[:1], norms.eps[:1]))
    torch.testing.assert_close(alone, q)

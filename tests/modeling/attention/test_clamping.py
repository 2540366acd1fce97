"""Marks of clamped values reach people, once for each layer, and only after they were made."""

import pytest
import torch

from modeling.attention.clamping import STEPS_A_LOOK, ClampWatch
from modeling.attention.kv_cache import FP8, CacheScales, CacheSpec, LayerCache, allocate

CPU = torch.device("cpu")
LARGE, SMALL = torch.full((1, 1, 8), 1e4), torch.ones(1, 1, 8)
SLOTS = torch.tensor([1])


@pytest.fixture
def layers() -> list[LayerCache]:
    return allocate(CacheSpec(3, 4, 1, 8, FP8, (CacheScales(),) * 3), 2, CPU)


def looks(watch: ClampWatch, count: int) -> None:
    for _ in range(count * STEPS_A_LOOK):
        watch.stepped()


def test_each_layer_is_told_of_once(
    layers: list[LayerCache], caplog: pytest.LogCaptureFixture
) -> None:
    watch = ClampWatch(layers)
    looks(watch, 2)
    assert not caplog.records
    layers[1].store(SMALL, LARGE, SLOTS)
    looks(watch, 5)
    (first,) = caplog.messages
    assert "keys of layers (none) and values of layers [1]" in first
    layers[0].store(LARGE, SMALL, SLOTS)
    layers[2].store(LARGE, LARGE, SLOTS)
    looks(watch, 5)
    (second,) = caplog.messages[1:]
    assert "keys of layers [0, 2] and values of layers [2]" in second
    assert "set engine.cache.dtype to auto" in second


def test_a_cache_in_another_type_is_let_be(caplog: pytest.LogCaptureFixture) -> None:
    layers = allocate(CacheSpec(2, 4, 1, 8, torch.float32), 2, CPU)
    watch = ClampWatch(layers)
    layers[0].clamped.fill_(1)
    looks(watch, 3)
    assert not caplog.records

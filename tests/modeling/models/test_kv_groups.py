"""Layers in groups: which belong together, and blocks of equal bytes for all of them."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modeling.attention.kv_layout import KvLayout, allocate_blocks
from modeling.models.base import AttentionLayer, PagedModel
from modeling.models.kv_groups import kv_layout

CPU = torch.device("cpu")
FULL = AttentionLayer(4, 2, 8, 0.5)
SLIDING = AttentionLayer(4, 2, 8, 0.5, window=32)
WIDE = AttentionLayer(4, 1, 64, 0.5)
CHUNKED = AttentionLayer(4, 2, 8, 0.5, chunk=64)


def layout(*layers: AttentionLayer, longest: int | None = 512) -> KvLayout:
    model = SimpleNamespace(attention_layers=layers, dtype=torch.float32)
    return kv_layout(cast(PagedModel, model), 16, longest)


def test_a_window_as_long_as_any_sequence_is_none() -> None:
    assert len(layout(FULL, SLIDING, longest=32).groups) == 1
    assert len(layout(FULL, SLIDING, longest=None).groups) == 1
    full, sliding = layout(SLIDING, FULL, SLIDING).groups
    assert (full.layers, full.kv.window, sliding.layers, sliding.kv.window) == (
        (1,),
        None,
        (0, 2),
        32,
    )


def test_a_model_without_attention_has_blocks_without_memory() -> None:
    found = layout()
    (only,) = found.groups
    assert (only.layers, only.kv.block_size, found.bytes_per_block) == ((), 16, 0)
    assert allocate_blocks(found, 3, CPU) == []


def test_a_layer_that_reads_anothers_pages_has_none() -> None:
    sharing = AttentionLayer(4, 2, 8, 0.5, window=32, source=0)
    found = layout(SLIDING, FULL, sharing)
    assert [group.layers for group in found.groups] == [(1,), (0,)]
    caches = allocate_blocks(found, 3, CPU)
    assert caches[2] is caches[0]
    assert [cache.group for cache in caches] == [1, 0, 1]


@pytest.mark.parametrize(
    ("counts", "sizes"),
    [((21, 21), (16, 16)), ((5, 29), (96, 16)), ((4, 22), (96, 16)), ((12, 36), (48, 16))],
    ids=["Gemma 2 9B", "Gemma 3 4B", "Gemma 3 1B", "Llama 4"],
)
def test_a_group_of_few_layers_has_more_tokens_in_a_block(
    counts: tuple[int, int], sizes: tuple[int, int]
) -> None:
    full, sliding = layout(*[FULL] * counts[0], *[SLIDING] * counts[1]).groups
    assert (full.kv.block_size, sliding.kv.block_size) == sizes


def test_chunks_are_made_of_whole_blocks() -> None:
    assert layout(FULL, CHUNKED).groups[1].kv.chunk == 64
    odd = AttentionLayer(4, 2, 8, 0.5, chunk=40)
    assert [group.kv.block_size for group in layout(FULL, odd).groups] == [8, 8]


@given(st.lists(st.sampled_from([FULL, SLIDING, WIDE, CHUNKED]), min_size=1, max_size=12))
def test_no_page_of_one_layer_lies_on_anothers(layers: list[AttentionLayer]) -> None:
    """Each layer writes all of its pages of a block that its group holds; nothing else changes."""
    found = layout(*layers)
    caches = allocate_blocks(found, len(found.groups), CPU)
    for layer, cache in enumerate(caches):
        group = found.groups[cache.group]
        assert group.stride == 1 or group.page_values * len(group.layers) * 4 * 2 <= (
            found.bytes_per_block
        )
        cache.keys[cache.group * group.stride] = layer + 1
        cache.values[cache.group * group.stride] = -layer - 1
    for layer, cache in enumerate(caches):
        page = cache.group * found.groups[cache.group].stride
        assert (cache.keys[page] == layer + 1).all()
        assert (cache.values[page] == -layer - 1).all()
    memory = {cache.keys.untyped_storage().data_ptr(): cache for cache in caches}.values()
    taken = sum(2 * cache.keys.untyped_storage().nbytes() for cache in memory)
    assert taken == len(found.groups) * found.bytes_per_block

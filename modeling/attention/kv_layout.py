"""Where the keys and values of all layers lie in the blocks of one pool.

One group: every layer has tensors of its own, in which a block is a page. Several groups: all
layers share two tensors, one of keys and one of values, in which a block is as many bytes for any
group. A group's layers have their pages behind each other in each of its blocks; so the pages of
one layer are `stride` apart, and its page of block b is b * stride, counted from the layer's first.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from configs.kv_groups import KvGroup
from modeling.attention.kv_cache import UNSCALED, CacheSpec, LayerCache, allocate


@dataclass(frozen=True)
class CachedGroup:
    """The layers of one KV group.

    kv: tokens of a block, and how long they are needed. spec: of the group's pages. layers: their
    numbers in the model. stride: pages from one block to the next.
    """

    kv: KvGroup
    spec: CacheSpec
    layers: tuple[int, ...]
    stride: int = 1

    @property
    def page_values(self) -> int:
        """Numbers in a layer's page of keys, or of values."""
        return self.spec.page_size * self.spec.num_kv_heads * self.spec.head_dim


@dataclass(frozen=True)
class KvLayout:
    """All groups; sources: for each layer of the model, the layer that has the pages it reads."""

    groups: tuple[CachedGroup, ...]
    sources: tuple[int, ...]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, keys and values together."""
        first = self.groups[0]
        if len(self.groups) == 1:
            return first.spec.bytes_per_page
        return first.spec.parts * first.stride * first.page_values * first.spec.dtype.itemsize


def allocate_blocks(layout: KvLayout, num_blocks: int, device: torch.device) -> list[LayerCache]:
    """Memory for `num_blocks` blocks; returns each layer's view of it."""
    made: dict[int, LayerCache] = {}
    if len(layout.groups) == 1:
        (only,) = layout.groups
        made = dict(zip(only.layers, allocate(only.spec, num_blocks, device), strict=True))
    else:
        first = layout.groups[0]
        assert len({group.spec.keys_only for group in layout.groups}) == 1, layout
        keys = _shared(first, num_blocks, device)
        values = keys if first.spec.keys_only else _shared(first, num_blocks, device)
        for index, group in enumerate(layout.groups):
            for at, layer in enumerate(group.layers):
                scales = group.spec.scales[at] if group.spec.scales else UNSCALED
                own = _pages(group, at, keys)
                beside = own if values is keys else _pages(group, at, values)
                made[layer] = LayerCache(own, beside, scales, index)
    return [made[source] for source in layout.sources]


def _shared(group: CachedGroup, num_blocks: int, device: torch.device) -> Tensor:
    size = num_blocks * group.stride * group.page_values
    return torch.zeros(size, dtype=group.spec.dtype, device=device)


def _pages(group: CachedGroup, at: int, shared: Tensor) -> Tensor:
    """All pages from the first of the group's layer number `at` on."""
    spec = group.spec
    return shared[at * group.page_values :].view(
        -1, spec.page_size, spec.num_kv_heads, spec.head_dim
    )

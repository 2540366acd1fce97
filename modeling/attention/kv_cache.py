"""Paged keys and values: memory that a rank owns, under block indices that the scheduler owns."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CacheSpec:
    """What one page is on this rank.

    page_size: tokens in a page. num_kv_heads: this rank's. dtype: of the cached values.
    """

    num_layers: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers, keys and values together."""
        values = self.page_size * self.num_kv_heads * self.head_dim
        return 2 * self.num_layers * values * self.dtype.itemsize


class LayerCache:
    """One layer's keys and values, [num_pages, page_size, kv_heads, head_dim] each."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Wrap the two tensors, which must be contiguous and of one shape."""
        assert keys.shape == values.shape, (keys.shape, values.shape)
        self.keys = keys
        self.values = values
        # Slots address tokens, whatever the page size.
        self.flat_keys = keys.view(-1, *keys.shape[2:])
        self.flat_values = values.view(-1, *values.shape[2:])

    def store(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Put keys and values [tokens, kv_heads, head_dim] at slots int64 [tokens].

        A slot is page * page_size + offset. Values are cast to the cache's type.
        """
        self.flat_keys.index_copy_(0, slots, keys.to(self.keys.dtype))
        self.flat_values.index_copy_(0, slots, values.to(self.values.dtype))


def allocate(spec: CacheSpec, num_pages: int, device: torch.device) -> list[LayerCache]:
    """Memory for `num_pages` pages of every layer: num_pages * spec.bytes_per_page bytes."""
    shape = (num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim)

    def pages() -> Tensor:
        return torch.zeros(shape, dtype=spec.dtype, device=device)

    return [LayerCache(pages(), pages()) for _ in range(spec.num_layers)]

"""Paged keys and values: memory that a rank owns, under block indices that the scheduler owns.

An fp8 cache holds K[j] / s in e4m3, and s * stored is what attention sees: three bits after the
leading one, so a value between 2^-6 s and 448 s is off by a sixteenth of itself at most, a smaller
one by 2^-10 s. Scores take the keys' s into their scale, outputs are multiplied by the values'.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max


@dataclass(frozen=True)
class CacheScales:
    """What one layer's stored keys and values are multiplied by to be the true ones."""

    keys: float = 1.0
    values: float = 1.0


UNSCALED = CacheScales()


@dataclass(frozen=True)
class CacheSpec:
    """What one page is on this rank.

    page_size: tokens in a page. num_kv_heads: this rank's. dtype: of the cached values.
    scales: of an fp8 cache, one for each layer, the same on every rank; else none.
    keys_only: whether values are the keys' first numbers, so that they have no memory.
    """

    num_layers: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scales: tuple[CacheScales, ...] = ()
    keys_only: bool = False

    @property
    def parts(self) -> int:
        """Tensors of a layer: keys and values, or keys alone."""
        return 1 if self.keys_only else 2

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers, keys and values together."""
        values = self.page_size * self.num_kv_heads * self.head_dim
        return self.parts * self.num_layers * values * self.dtype.itemsize


class LayerCache:
    """One layer's keys and values, [num_pages, page_size, kv_heads, head_dim] each.

    keys_only: whether both are the same memory, as values are the keys' first numbers.
    quantised: whether they are e4m3. scales: of a quantised cache, else ones. clamped: int32 [2],
    not 0 once a key, or a value, was beyond what its scale can hold and the nearest was stored.
    group: the KV group that has the tables of these pages.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, scales: CacheScales = UNSCALED, group: int = 0
    ) -> None:
        """Wrap the two tensors, which must be contiguous and of one shape."""
        assert keys.shape == values.shape, (keys.shape, values.shape)
        self.keys = keys
        self.values = values
        self.keys_only = keys is values
        self.quantised = keys.dtype == FP8
        assert self.quantised or scales == UNSCALED, (keys.dtype, scales)
        self.scales = scales
        self.group = group
        self.clamped = torch.zeros(2, dtype=torch.int32, device=keys.device)
        # Slots address tokens, whatever the page size.
        self.flat_keys = keys.view(-1, *keys.shape[2:])
        self.flat_values = values.view(-1, *values.shape[2:])

    def store(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Put keys and values [tokens, kv_heads, head_dim] at slots int64 [tokens].

        A slot is page * page_size + offset. Values are cast to the cache's type.
        """
        self._put(self.flat_keys, keys, slots, self.scales.keys, self.clamped[0])
        if not self.keys_only:
            self._put(self.flat_values, values, slots, self.scales.values, self.clamped[1])

    def read(self, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values at slots int64 [n], both [n, kv_heads, head_dim] of `dtype`."""
        keys = self._taken(self.flat_keys, slots, dtype, self.scales.keys)
        if self.keys_only:
            return keys, keys
        return keys, self._taken(self.flat_values, slots, dtype, self.scales.values)

    def _put(self, flat: Tensor, new: Tensor, slots: Tensor, scale: float, clamped: Tensor) -> None:
        if not self.quantised:
            flat.index_copy_(0, slots, new.to(flat.dtype))
            return
        scaled = new.float() * (1 / scale)
        beyond = (scaled.abs() > FP8_MAX).any()
        torch.maximum(clamped, beyond.to(clamped.dtype), out=clamped)
        # Not every cast ends at the largest number: torch's own made NaN of what is beyond it.
        stored = scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8)
        _movable(flat).index_copy_(0, slots, _movable(stored))

    def _taken(self, flat: Tensor, slots: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
        if not self.quantised:
            return flat.index_select(0, slots).to(dtype)
        found = _movable(flat).index_select(0, slots).view(FP8).to(dtype)
        return found if scale == 1.0 else found * scale


def allocate(spec: CacheSpec, num_pages: int, device: torch.device) -> list[LayerCache]:
    """Memory for `num_pages` pages of every layer: num_pages * spec.bytes_per_page bytes."""
    shape = (num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim)
    scales = spec.scales or (UNSCALED,) * spec.num_layers
    assert len(scales) == spec.num_layers, (len(scales), spec.num_layers)

    def pages() -> Tensor:
        return torch.zeros(shape, dtype=spec.dtype, device=device)

    def layer(own: CacheScales) -> LayerCache:
        keys = pages()
        return LayerCache(keys, keys if spec.keys_only else pages(), own)

    return [layer(own) for own in scales]


def _movable(eighths: Tensor) -> Tensor:
    """The same bytes as integers: torch does not move fp8 by index."""
    return eighths.view(torch.uint8)

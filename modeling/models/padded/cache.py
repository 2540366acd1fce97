"""Cut and joined caches of keys and values: transformers' own kind, and legacy tuples of tensors.

Values are [rows, heads, length, head_dim]. Keys are the same, or [rows, heads, head_dim, length]
where a model keeps them ready to multiply (keys_head_dim_last False). Old code folds the first
two into one: [rows * heads, ...]. Positions are aligned on the right; what is left of a row's
first token is padding that the attention mask hides.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import Cache

KeyValue = tuple[Tensor, Tensor]
Past = Cache | tuple[KeyValue, ...]


@dataclass(frozen=True)
class CachePart:
    """One batch's cache on its way into a larger one: how many rows it has, how long it is."""

    past: Past
    num_rows: int
    length: int


def cached_layers(past: Past) -> list[KeyValue]:
    """Return the layers that hold something; some models share one layer's keys among several."""
    if not isinstance(past, Cache):
        return list(past)
    layers: list[Any] = past.layers
    return [(layer.keys, layer.values) for layer in layers if layer.keys is not None]


def twin(past: Past) -> Past:
    """A cache of the same tensors, which may be cut without the other being."""
    if not isinstance(past, Cache):
        return past
    result = copy.copy(past)
    result.layers = [copy.copy(layer) for layer in past.layers]
    return result


def filter_cache(
    past: Past, num_rows: int, rows: Tensor, length: int, keys_head_dim_last: bool
) -> Past:
    """Keep `rows` (int64 indices of the num_rows) and the last `length` positions.

    A Cache is changed in place, layer by layer, so that old and new never lie in memory at once.
    """

    def cut(layers: list[KeyValue]) -> KeyValue:
        ((keys, values),) = layers
        return (
            _take(keys, num_rows, rows, length, _axis(keys_head_dim_last)),
            _take(values, num_rows, rows, length, -2),
        )

    return _rebuild([past], cut)


def concatenate_caches(parts: Sequence[CachePart], keys_head_dim_last: bool) -> Past:
    """Put batches below each other, left-padded with zeros to the longest.

    The first part's Cache becomes the result and the others are emptied, layer by layer.
    """
    counts = [part.num_rows for part in parts]
    longest = max(part.length for part in parts)

    def stack(layers: list[KeyValue]) -> KeyValue:
        keys, values = ([layer[index] for layer in layers] for index in (0, 1))
        return (
            _stack(keys, counts, longest, _axis(keys_head_dim_last)),
            _stack(values, counts, longest, -2),
        )

    return _rebuild([part.past for part in parts], stack)


def _axis(head_dim_last: bool) -> int:
    """Where a tensor's positions run."""
    return -2 if head_dim_last else -1


def _rebuild(pasts: Sequence[Past], change: Callable[[list[KeyValue]], KeyValue]) -> Past:
    """Make one cache of several by what `change` makes of each layer's keys and values."""
    caches = [past for past in pasts if isinstance(past, Cache)]
    if not caches:
        legacy = [past for past in pasts if not isinstance(past, Cache)]
        return tuple(change(list(layers)) for layers in zip(*legacy, strict=True))
    assert len(caches) == len(pasts), "a model answers with one kind of cache"
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        first, *others = layers
        if first.keys is None:
            continue
        first.keys, first.values = change([(layer.keys, layer.values) for layer in layers])
        for other in others:
            other.reset()
    return caches[0]


def _take(tensor: Tensor, num_rows: int, rows: Tensor, length: int, axis: int) -> Tensor:
    """Keep some rows and their last positions; the result owns its memory."""
    whole = _unfolded(tensor, num_rows)
    first = whole.shape[axis] - length
    kept = whole.narrow(axis, first, length).index_select(0, rows.to(whole.device))
    return _like(kept, tensor)


def _stack(tensors: Sequence[Tensor], counts: Sequence[int], longest: int, axis: int) -> Tensor:
    """Put tensors below each other, aligned on the right of `longest` positions."""
    parts = [_unfolded(tensor, count) for tensor, count in zip(tensors, counts, strict=True)]
    shape = list(parts[0].shape)
    shape[0], shape[axis] = sum(counts), longest
    whole = parts[0].new_zeros(shape)
    row = 0
    for part, count in zip(parts, counts, strict=True):
        length = part.shape[axis]
        whole[row : row + count].narrow(axis, longest - length, length).copy_(part)
        row += count
    return _like(whole, tensors[0])


def _unfolded(tensor: Tensor, num_rows: int) -> Tensor:
    """[rows * heads, a, b] as [rows, heads, a, b]; four dimensions are left as they are."""
    if tensor.dim() == 4:
        return tensor
    return tensor.reshape(num_rows, -1, *tensor.shape[1:])


def _like(tensor: Tensor, model: Tensor) -> Tensor:
    """Fold rows and heads again where `model` has them so."""
    return tensor.flatten(0, 1) if model.dim() == 3 else tensor


def cache_bytes(past: Past) -> int:
    """Bytes of everything in a cache."""
    return sum(keys.nbytes + values.nbytes for keys, values in cached_layers(past))


def keys_head_dim_last(past: Past, num_rows: int, length: int) -> bool:
    """Return the keys' layout; ValueError for a cache that cannot be cut and padded.

    num_rows, length: those of the batch that filled the cache; no head_dim may equal `length`.
    """
    layers = cached_layers(past)
    for keys, values in layers:
        good = keys.dim() == values.dim() and keys.dim() in (3, 4)
        if not good or values.shape[-2] != length or keys.shape[0] % num_rows:
            break
        if length not in keys.shape[-2:] or values.shape[0] % num_rows:
            break
    else:
        if layers:
            return bool(layers[0][0].shape[-2] == length)
    raise ValueError(
        "the model's cache is not one key and value for each position (a recurrent or compressed "
        "state?): rows of different lengths cannot share a batch; it is not served"
    )

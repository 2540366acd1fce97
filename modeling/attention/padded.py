"""Attention of the padded interface: rows of one length under a mask, over a cache that grows.

    w[b, h, i, j] = softmax_j( scale * q[b, h, i] . k[b, h, j] ), over the j that i may see
    o[b, h, i] = sum_j head_mask[h] * w[b, h, i, j] v[b, h, j]

i: one of this forward's n tokens, at position p + i after p cached ones; j: a position. i sees j
where j <= p + i and mask[b, j]. A token that sees nothing (left padding) sees all alike, as
in transformers, so that even what is never read is equal.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from sharding.group import TensorParallel

Pairs = Sequence[Sequence[Tensor]]
"""One (keys, values) a layer, [batch, local heads, positions, head_dim] each."""


class KeyValueCache(Protocol):
    """The methods of a transformers `Cache` that are used."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, /
    ) -> tuple[Tensor, Tensor]:
        """Append a layer's keys and values; returns all of them."""
        ...

    def get_seq_length(self) -> int:
        """Positions with a key and a value."""
        ...


class GrowingCache:
    """Keys and values of all earlier forwards, in the kind that the caller keeps them in."""

    def __init__(self, given: KeyValueCache | Pairs | None) -> None:
        """given: pairs, a transformers `Cache` (it grows in place), or None to start with none."""
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._cache: KeyValueCache | None = None
        if given is None or isinstance(given, Sequence):
            self._pairs = [(pair[0], pair[1]) for pair in given or ()]
            self.length = self._pairs[0][0].shape[2] if self._pairs else 0
        else:
            self._cache = given
            self.length = int(given.get_seq_length())
        self._grown: list[tuple[Tensor, Tensor]] = []

    @property
    def result(self) -> KeyValueCache | tuple[tuple[Tensor, Tensor], ...]:
        """What to give back: the caller's `Cache`, or new pairs."""
        return tuple(self._grown) if self._cache is None else self._cache

    def grow(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append [batch, heads, tokens, head_dim]; returns all keys and values of the layer."""
        if self._cache is not None:
            return self._cache.update(k, v, layer)
        if self._pairs:
            past_keys, past_values = self._pairs[layer]
            k, v = torch.cat((past_keys, k), dim=2), torch.cat((past_values, v), dim=2)
        self._grown.append((k, v))
        return k, v


class PaddedAttention:
    """A `AttentionCall` of batch * n tokens, row after row.

    weights: one [batch, all heads, n, positions] a layer, where they are kept; else None.
    """

    def __init__(
        self,
        mask: Tensor,
        cache: GrowingCache,
        scale: float,
        group: TensorParallel,
        head_mask: Tensor | None = None,
        keep_weights: bool = False,
    ) -> None:
        """mask: [batch, positions], nonzero where a token is. head_mask: [layers, local heads]."""
        self._batch, length = mask.shape
        num_queries = length - cache.length
        device = mask.device
        causal = torch.ones(num_queries, length, dtype=torch.bool, device=device)
        seen = causal.tril(cache.length) & mask.bool()[:, None, None]
        self._hidden = ~seen  # [batch, 1, n, positions]
        self._cache = cache
        self._scale = scale
        self._group = group
        self._head_mask = head_mask
        self.weights: list[Tensor] | None = [] if keep_weights else None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[tokens, local heads, head_dim] to the same shape."""
        query, key, value = (self._rows(part) for part in (q, k, v))
        key, value = self._cache.grow(layer, key, value)
        length = self._hidden.shape[-1]  # a `Cache` of fixed size returns empty positions too
        scores = query @ key[:, :, :length].transpose(2, 3) * self._scale
        scores = scores.masked_fill(self._hidden, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
        if self._head_mask is not None:
            weights = weights * self._head_mask[layer].to(q.dtype).view(1, -1, 1, 1)
        if self.weights is not None:
            self.weights.append(self._gathered(weights))
        out = weights @ value[:, :, :length]
        return out.transpose(1, 2).flatten(0, 1)

    def _rows(self, x: Tensor) -> Tensor:
        """[batch * n, heads, head_dim] to [batch, heads, n, head_dim]."""
        return x.view(self._batch, -1, *x.shape[1:]).transpose(1, 2)

    def _gathered(self, weights: Tensor) -> Tensor:
        """All ranks' heads."""
        if self._group.size == 1:
            return weights
        return self._group.all_gather(weights.movedim(1, -1).contiguous()).movedim(-1, 1)


def local_head_mask(
    head_mask: Tensor | None, num_layers: int, num_heads: int, group: TensorParallel
) -> Tensor | None:
    """This rank's part of a head mask, [layers, local heads]; ValueError for another shape.

    head_mask: [all heads], the same for every layer, or [layers, all heads].
    """
    if head_mask is None:
        return None
    every = num_heads * group.size
    if tuple(head_mask.shape) not in ((every,), (num_layers, every)):
        raise ValueError(
            f"head_mask has shape {tuple(head_mask.shape)}, it must be ({every},) or "
            f"({num_layers}, {every})"
        )
    first = group.rank * num_heads
    return head_mask.expand(num_layers, every)[:, first : first + num_heads]

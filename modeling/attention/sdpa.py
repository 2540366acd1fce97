"""Paged attention on torch's scaled_dot_product_attention: the reference, and the CPU path.

Rows of one token are gathered together, padded, into few calls; longer rows go one by one.
Gathers are by token and not by page, so a row never touches what another one left in a page
(padding repeats the row's own first token), not even where zero weight would meet a NaN.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from modeling.attention.base import AttentionBackend, AttentionSpec, AttentionStep
from modeling.attention.kv_cache import LayerCache

MIN_PADDED_LENGTH = 256
"""Rows up to this many keys share one call; longer ones share with those of the same power of
two, so that padding at most doubles the work."""


@dataclass(frozen=True)
class DecodeGroup:
    """Rows of one token that are computed together.

    tokens: int64 [n], their places in the packed step (None: all of it, in order).
    slots: int64 [n * padded], their keys. bias: [n, 1, 1, padded], 0 or -inf (None: no padding).
    """

    tokens: Tensor | None
    slots: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class LongRow:
    """A row of several tokens, packed at start .. stop - 1.

    slots: int64 [keys]. mask: bool [queries, keys], or None where queries and keys are the same
    tokens, which is plain causal attention.
    """

    start: int
    stop: int
    slots: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class SdpaStep(AttentionStep):
    """A step as gathers and masks, made once for all layers."""

    groups: tuple[DecodeGroup, ...]
    long_rows: tuple[LongRow, ...]


class SdpaAttention(AttentionBackend):
    """Runs anywhere torch does, with any page size, head size and type."""

    name = "sdpa"

    @classmethod
    def lacks(cls, spec: AttentionSpec) -> str | None:
        """Nothing."""
        return None

    def prepare(
        self, query_lengths: Sequence[int], key_lengths: Sequence[int], block_tables: Tensor
    ) -> SdpaStep:
        """Make the slots and masks of every row."""
        queries, keys = tuple(query_lengths), tuple(key_lengths)
        assert len(queries) == len(keys) <= block_tables.shape[0], (queries, keys)
        starts = (0, *accumulate(queries))
        buckets: dict[int, list[int]] = defaultdict(list)
        long_rows = []
        for row, (num_queries, num_keys) in enumerate(zip(queries, keys, strict=True)):
            assert 1 <= num_queries <= num_keys, (row, num_queries, num_keys)
            if num_queries == 1:
                buckets[max(num_keys - 1, MIN_PADDED_LENGTH - 1).bit_length()].append(row)
            else:
                slots = self._slots(block_tables[row : row + 1], num_keys)[0]
                mask = self._causal_mask(num_queries, num_keys)
                long_rows.append(LongRow(starts[row], starts[row + 1], slots, mask))
        groups = tuple(self._group(rows, starts, keys, block_tables) for rows in buckets.values())
        return SdpaStep(self, queries, keys, groups, tuple(long_rows))

    def forward(
        self,
        q: Tensor,
        cache: LayerCache,
        cu_seqlen: Tensor,
        block_tables: Tensor,
        step: AttentionStep,
    ) -> Tensor:
        """Compute each group and each long row into its place."""
        assert isinstance(step, SdpaStep), type(step)
        if len(step.groups) == 1 and step.groups[0].tokens is None:
            return self._decode(q, cache, step.groups[0])
        out = torch.empty_like(q)
        for group in step.groups:
            assert group.tokens is not None
            out[group.tokens] = self._decode(q[group.tokens], cache, group)
        for row in step.long_rows:
            out[row.start : row.stop] = self._attend(q[row.start : row.stop], cache, row)
        return out

    def _group(
        self, rows: list[int], starts: tuple[int, ...], keys: tuple[int, ...], tables: Tensor
    ) -> DecodeGroup:
        """Plan rows of one token as one padded call."""
        device = tables.device
        everything = len(rows) == len(keys)  # all rows have one token: packed order is row order
        tokens = None if everything else torch.tensor([starts[row] for row in rows], device=device)
        lengths = [keys[row] for row in rows]
        longest = max(lengths)
        own = tables[: len(rows)] if everything else tables[torch.tensor(rows, device=device)]
        slots = self._slots(own, longest)
        if min(lengths) == longest:
            return DecodeGroup(tokens, slots.flatten(), None)
        position = torch.arange(longest, device=device)
        padding = position >= torch.tensor(lengths, device=device).unsqueeze(1)
        bias = torch.zeros(padding.shape, dtype=self.spec.dtype, device=device)
        bias = bias.masked_fill_(padding, float("-inf"))[:, None, None]
        return DecodeGroup(tokens, torch.where(padding, slots[:, :1], slots).flatten(), bias)

    def _slots(self, tables: Tensor, num_keys: int) -> Tensor:
        """Slots int64 [rows, num_keys] of the rows' first positions."""
        page_size = self.spec.page_size
        position = torch.arange(num_keys, device=tables.device)
        pages = tables[:, position // page_size].to(torch.int64)
        return pages * page_size + position % page_size

    def _causal_mask(self, num_queries: int, num_keys: int) -> Tensor | None:
        """Query i sees keys 0 .. num_keys - num_queries + i."""
        if num_queries == num_keys:
            return None
        ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=self.spec.device)
        return ones.tril(num_keys - num_queries)

    def _decode(self, q: Tensor, cache: LayerCache, group: DecodeGroup) -> Tensor:
        """[n, heads, head_dim]: the heads that share a KV head stand where queries would."""
        rows, heads, head_dim = q.shape
        k = cache.flat_keys.index_select(0, group.slots).view(rows, -1, *cache.keys.shape[2:])
        v = cache.flat_values.index_select(0, group.slots).view(k.shape)
        folded = q.view(rows, k.shape[2], -1, head_dim)
        out = F.scaled_dot_product_attention(
            folded,
            k.transpose(1, 2).to(q.dtype),
            v.transpose(1, 2).to(q.dtype),
            attn_mask=group.bias,
            scale=self.spec.scale,
        )
        return out.reshape(rows, heads, head_dim)

    def _attend(self, q: Tensor, cache: LayerCache, row: LongRow) -> Tensor:
        """One row's [queries, heads, head_dim]."""
        k = cache.flat_keys.index_select(0, row.slots)
        v = cache.flat_values.index_select(0, row.slots)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None].to(q.dtype),
            v.transpose(0, 1)[None].to(q.dtype),
            attn_mask=row.mask,
            is_causal=row.mask is None,
            scale=self.spec.scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)

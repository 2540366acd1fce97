"""Paged attention on torch's scaled_dot_product_attention: the reference, and the CPU path.

Rows of one token are gathered together, padded, into few calls; longer rows go one by one.
Gathers are by token and not by page, so a row never touches what another one left in a page
(padding repeats the row's own first token), not even where zero weight would meet a NaN.
What is gathered is brought to the type of q, and an fp8 cache's to its scale, before it is used.
A layer with a window gathers only the keys that some query of the row sees.
A model with a cap, slopes or sinks, which torch lacks, goes through dense.py instead. Of one with
an index sparse.py attends; slots and positions are planned here.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from modeling.attention.base import AttentionBackend, AttentionSpec, AttentionStep
from modeling.attention.dense import ScoreRule, dense_attention
from modeling.attention.kv_cache import LayerCache

MIN_PADDED_LENGTH = 256
"""Rows up to this many keys share one call; longer ones share with those of the same power of
two, so that padding at most doubles the work."""


@dataclass(frozen=True)
class DecodeGroup:
    """Rows of one token that are computed together.

    tokens: int64 [n], their indices in the packed step (None: all of it, in order).
    slots: int64 [n * padded], their keys. bias: [n, 1, 1, padded], 0 or -inf (None: no padding).
    positions: int64 [n, 1], each one's last key, where dense.py needs it.
    """

    tokens: Tensor | None
    slots: Tensor
    bias: Tensor | None
    positions: Tensor | None = None


@dataclass(frozen=True)
class LongRow:
    """A row of several tokens, packed at start .. stop - 1.

    slots: int64 [keys]. mask: bool [queries, keys], or None where queries and keys are the same
    tokens, which is plain causal attention, and for dense.py.
    """

    start: int
    stop: int
    slots: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class SdpaPlan:
    """A step as gathers and masks, for all layers of one window, which is of `window` tokens."""

    window: int
    groups: tuple[DecodeGroup, ...]
    long_rows: tuple[LongRow, ...]


@dataclass(frozen=True)
class SdpaStep(AttentionStep):
    """A step's plan for each of the model's windows."""

    plans: Mapping[int | None, SdpaPlan]


@dataclass(frozen=True)
class _Rows:
    """One step's rows as one window sees them.

    starts: where each row begins in the packed step. firsts: the first key position it reads.
    """

    starts: tuple[int, ...]
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    firsts: tuple[int, ...]
    tables: Tensor


class SdpaAttention(AttentionBackend):
    """Runs anywhere torch does, with any page size, head size, type, windows and scores."""

    name = "sdpa"

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        own = spec.softcap, spec.alibi, spec.index_topk
        self._dense = spec.sinks or any(each is not None for each in own)
        self._slopes: Tensor | None = None
        if spec.alibi is not None:
            self._slopes = torch.tensor(spec.alibi, dtype=torch.float32, device=spec.device)

    @classmethod
    def lacks(cls, spec: AttentionSpec) -> str | None:
        """Nothing."""
        return None

    def prepare(
        self, query_lengths: Sequence[int], key_lengths: Sequence[int], block_tables: Tensor
    ) -> SdpaStep:
        """Make the slots and masks of every row, once for each window that cuts something off."""
        queries, keys = tuple(query_lengths), tuple(key_lengths)
        assert len(queries) == len(keys) <= block_tables.shape[0], (queries, keys)
        for row, (num_queries, num_keys) in enumerate(zip(queries, keys, strict=True)):
            assert 1 <= num_queries <= num_keys, (row, num_queries, num_keys)
        longest = max(keys, default=0)
        made: dict[int, SdpaPlan] = {}
        plans: dict[int | None, SdpaPlan] = {}
        for window in self.spec.windows:
            seen = longest if window is None else min(window, longest)
            if seen not in made:
                made[seen] = self._plan(queries, keys, block_tables, seen)
            plans[window] = made[seen]
        return SdpaStep(self, queries, keys, plans)

    def forward(
        self,
        q: Tensor,
        cache: LayerCache,
        cu_seqlen: Tensor,
        block_tables: Tensor,
        step: AttentionStep,
        window: int | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute each group and each long row into its rows of the output."""
        assert isinstance(step, SdpaStep), type(step)
        plan = step.plans[window]
        rule = None
        if self._dense:
            rule = ScoreRule(self.spec.scale, self.spec.softcap, plan.window, self._slopes, sinks)
        if len(plan.groups) == 1 and plan.groups[0].tokens is None:
            found = self._decode(q, cache, plan.groups[0], rule)
            return found if out is None else out.copy_(found)
        out = torch.empty_like(q) if out is None else out
        for group in plan.groups:
            assert group.tokens is not None
            out[group.tokens] = self._decode(q[group.tokens], cache, group, rule)
        for row in plan.long_rows:
            out[row.start : row.stop] = self._attend(q[row.start : row.stop], cache, row, rule)
        return out

    def _plan(
        self, queries: tuple[int, ...], keys: tuple[int, ...], tables: Tensor, window: int
    ) -> SdpaPlan:
        """The gathers and masks of layers in which a token sees `window` positions at most."""
        # The row's first query is at position k - q, and sees back from there.
        firsts = tuple(max(0, k - q - window + 1) for q, k in zip(queries, keys, strict=True))
        rows = _Rows((0, *accumulate(queries)), queries, keys, firsts, tables)
        buckets: dict[int, list[int]] = defaultdict(list)
        long_rows = []
        for row, num_queries in enumerate(queries):
            if num_queries == 1:
                length = keys[row] - firsts[row]
                buckets[max(length - 1, MIN_PADDED_LENGTH - 1).bit_length()].append(row)
            else:
                long_rows.append(self._long_row(rows, row, window))
        groups = tuple(self._group(rows, members) for members in buckets.values())
        return SdpaPlan(window, groups, tuple(long_rows))

    def _group(self, rows: _Rows, members: list[int]) -> DecodeGroup:
        """Plan rows of one token as one padded call; a window is fewer keys, and no mask."""
        device = rows.tables.device
        everything = len(members) == len(rows.keys)  # each has one token: packed is row order
        starts = [rows.starts[row] for row in members]
        tokens = None if everything else torch.tensor(starts, device=device)
        firsts = [rows.firsts[row] for row in members]
        lengths = [rows.keys[row] - first for row, first in zip(members, firsts, strict=True)]
        longest = max(lengths)
        own = rows.tables[: len(members)]
        if not everything:
            own = rows.tables[torch.tensor(members, device=device)]
        slots = self._slots(own, firsts, longest)
        ends = torch.tensor(lengths, device=device).unsqueeze(1)
        positions = ends - 1 if self._dense else None
        if min(lengths) == longest:
            return DecodeGroup(tokens, slots.flatten(), None, positions)
        padding = torch.arange(longest, device=device) >= ends
        bias = torch.zeros(padding.shape, dtype=self.spec.dtype, device=device)
        bias = bias.masked_fill_(padding, float("-inf"))[:, None, None]
        slots = torch.where(padding, slots[:, :1], slots)
        return DecodeGroup(tokens, slots.flatten(), bias, positions)

    def _long_row(self, rows: _Rows, row: int, window: int) -> LongRow:
        """Plan a row of several tokens."""
        num_keys = rows.keys[row] - rows.firsts[row]
        slots = self._slots(rows.tables[row : row + 1], [rows.firsts[row]], num_keys)[0]
        mask = self._mask(rows.queries[row], num_keys, window)
        return LongRow(rows.starts[row], rows.starts[row + 1], slots, mask)

    def _slots(self, tables: Tensor, firsts: list[int], num_keys: int) -> Tensor:
        """Slots int64 [rows, num_keys] of the rows' positions from `firsts` on."""
        page_size = self.spec.page_size
        position = torch.arange(num_keys, device=tables.device)
        if not any(firsts):
            pages = tables[:, position // page_size].to(torch.int64)
            return pages * page_size + position % page_size
        positions = torch.tensor(firsts, device=tables.device).unsqueeze(1) + position
        pages = tables.gather(1, positions // page_size).to(torch.int64)
        return pages * page_size + positions % page_size

    def _mask(self, num_queries: int, num_keys: int, window: int) -> Tensor | None:
        """Query i is at key num_keys - num_queries + i, and sees `window` keys up to it."""
        if self._dense or num_queries == num_keys <= window:
            return None
        ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=self.spec.device)
        own = num_keys - num_queries
        return ones.tril(own).triu(own - window + 1)

    def _decode(
        self, q: Tensor, cache: LayerCache, group: DecodeGroup, rule: ScoreRule | None
    ) -> Tensor:
        """[n, heads, head_dim]: the heads that share a KV head take the queries' dimension."""
        rows, heads, head_dim = q.shape
        k, v = (part.view(rows, -1, *part.shape[1:]) for part in cache.read(group.slots, q.dtype))
        if rule is not None:
            assert group.positions is not None
            return dense_attention(q[:, None], k, v, group.positions, rule)[:, 0]
        folded = q.view(rows, k.shape[2], -1, head_dim)
        out = F.scaled_dot_product_attention(
            folded,
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=group.bias,
            scale=self.spec.scale,
        )
        return out.reshape(rows, heads, head_dim)

    def _attend(self, q: Tensor, cache: LayerCache, row: LongRow, rule: ScoreRule | None) -> Tensor:
        """One row's [queries, heads, head_dim]."""
        k, v = cache.read(row.slots, q.dtype)
        if rule is not None:
            positions = torch.arange(len(k) - len(q), len(k), device=q.device)
            return dense_attention(q[None], k[None], v[None], positions[None], rule)[0]
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=row.mask,
            is_causal=row.mask is None,
            scale=self.spec.scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)

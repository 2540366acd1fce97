"""Attention to the positions that an index chooses (DeepSeek's sparse attention), by torch.

    I[t, j] = sum_h w[t, h] * max(0, i[t, h] . x[j])

A token t at position p sees those `topk` of the positions j = 0 .. p of which I[t, j] is largest,
the earlier of equal ones. i, w: its index queries and their weights. x: index keys, which lie in
the cache as keys of one head more, the last; what does not fit into a key is in its value. Rows of
up to `topk` keys see all of them, by the model's usual backend.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from modeling.attention.base import AttentionBackend, AttentionSpec, AttentionStep
from modeling.attention.kv_cache import LayerCache
from modeling.attention.sdpa import SdpaAttention, SdpaPlan, SdpaStep

MOST = 2**25
"""Numbers of any tensor that is made for some tokens at once: 128 MiB of float32."""


@dataclass(eq=False)
class TokenIndex:
    """What a step's tokens select positions by, in a layer and those that share its choice.

    queries: [tokens, index heads, width]. weights: float32 [tokens, index heads]. keys: [tokens,
    width], of these tokens. topk: positions that a token sees at most. selected: int32 [n, topk],
    the positions of the tokens of rows with more keys; None: not selected yet. A token that sees
    fewer has some behind its own among them.
    """

    queries: Tensor
    weights: Tensor
    keys: Tensor
    topk: int
    selected: Tensor | None = None

    def with_head(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v [tokens, heads, head_dim] with the index keys as one head more."""
        lacking = 2 * k.shape[-1] - self.keys.shape[-1]
        if lacking < 0:
            raise ValueError(f"index_head_dim is more than twice a head's {k.shape[-1]} numbers")
        more = F.pad(self.keys, (0, lacking)).to(k.dtype).unsqueeze(1).chunk(2, dim=-1)
        return torch.cat((k, more[0]), 1), torch.cat((v, more[1]), 1)


@dataclass(frozen=True)
class RowsOfStep:
    """Some rows of a step, for one backend.

    step: as it has prepared them. tokens: int64, theirs among the step's; None: all. cu_seqlens,
    tables: as `GroupStep` has them.
    """

    step: AttentionStep
    tokens: Tensor | None
    cu_seqlens: Tensor
    tables: Tensor

    def of(self, tensor: Tensor) -> Tensor:
        """The rows' tokens of [tokens, ...]."""
        return tensor if self.tokens is None else tensor[self.tokens]

    def put(self, out: Tensor, found: Tensor) -> None:
        """Write what was computed for them into [tokens, ...] of the step."""
        out[slice(None) if self.tokens is None else self.tokens] = found


@dataclass(frozen=True)
class SparseStep(AttentionStep):
    """few, many: the rows of up to `topk` keys, and of more; None without any.

    index: the layer's, for each call of `forward`.
    """

    few: RowsOfStep | None
    many: RowsOfStep | None
    index: TokenIndex | None = None


class _Some(NamedTuple):
    """Tokens that are computed at once.

    are_rows: whether each is a row; else they are tokens of one row. tokens: where they are among
    the rows'. slots: int64 [rows, keys]. positions: int64 [rows, queries], their own.
    """

    are_rows: bool
    tokens: Tensor | slice
    slots: Tensor
    positions: Tensor


class SparseAttention(AttentionBackend):
    """An index chooses; rows of few keys go to `dense`, which has the head of index keys too."""

    scratch_bytes = 2**30

    def __init__(self, spec: AttentionSpec, dense: AttentionBackend) -> None:
        """dense: for the same spec without an index."""
        self.name = f"{dense.name} and sparse"
        super().__init__(spec)
        assert spec.index_topk is not None
        self._topk = spec.index_topk
        self._dense = dense
        self._gathers = SdpaAttention(spec)

    @classmethod
    def lacks(cls, spec: AttentionSpec) -> str | None:
        """Keys of another type than the model's, by which it would select otherwise."""
        if spec.cache_dtype not in (None, spec.dtype):
            return "keys of an index are kept in the model's own type: set cache.dtype to auto"
        return None

    def prepare(
        self, query_lengths: Sequence[int], key_lengths: Sequence[int], block_tables: Tensor
    ) -> SparseStep:
        """Let each backend plan its own rows."""
        queries, keys = tuple(query_lengths), tuple(key_lengths)
        rows = range(len(keys))
        few = [row for row in rows if keys[row] <= self._topk]
        many = [row for row in rows if keys[row] > self._topk]
        lengths = queries, keys, block_tables
        return SparseStep(
            self,
            queries,
            keys,
            _rows(self._dense, few, *lengths),
            _rows(self._gathers, many, *lengths),
        )

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
        """What it returns for the head of index keys, the last, means nothing."""
        assert isinstance(step, SparseStep), type(step)
        assert step.index is not None
        assert window is None, window
        out = torch.empty_like(q) if out is None else out
        few, many = step.few, step.many
        if few is not None:
            own = cache, few.cu_seqlens, few.tables, few.step
            if many is None:
                return self._dense.forward(q, *own, sinks=sinks, out=out)
            few.put(out, self._dense.forward(few.of(q), *own, sinks=sinks))
        if many is not None:
            many.put(out, self._sparse(many.of(q), cache, many, step.index, sinks))
        return out

    def _sparse(
        self,
        q: Tensor,
        cache: LayerCache,
        rows: RowsOfStep,
        index: TokenIndex,
        sinks: Tensor | None,
    ) -> Tensor:
        """q [tokens, heads, head_dim] of rows with more than `topk` keys to the same shape."""
        is_new = index.selected is None
        if index.selected is None:
            index.selected = q.new_empty(len(q), self._topk, dtype=torch.int32)
        queries, weights = rows.of(index.queries), rows.of(index.weights)
        own_sinks = None if sinks is None else sinks[:-1]
        assert isinstance(rows.step, SdpaStep)
        out = torch.zeros_like(q)
        for some in _parts(rows.step.plans[None], q.shape, self._topk, queries.shape):
            shape, own = some.positions.shape, some.tokens
            if is_new:
                keys = _index_keys(cache, some.slots, queries.shape[-1])
                i, w = (part[own].view(*shape, *part.shape[1:]) for part in (queries, weights))
                found = select(i, w, keys, some.positions, self._topk)
                index.selected[own] = found.flatten(0, 1)
            selected = index.selected[own].view(*shape, self._topk).long()
            # The last head has the index keys.
            attend = _attend_alone if some.are_rows else _attend_row
            given = q[own, :-1], cache, some, selected, self.spec.scale, own_sinks
            out[own, :-1] = attend(*given)
        return out


def select(queries: Tensor, weights: Tensor, keys: Tensor, positions: Tensor, topk: int) -> Tensor:
    """The positions int32 [rows, queries, topk] that tokens see, ascending.

    queries: [rows, queries, index heads, width]. weights: float32 [rows, queries, index heads].
    keys: float32 [rows, keys, width], more than `topk`. positions: int64 [rows, queries], the
    tokens' own; one that sees fewer than `topk` also gets some behind it.
    """
    rows, count, heads, width = queries.shape
    made = [queries.new_empty(rows, 0, topk, dtype=torch.int32)]
    at = torch.arange(keys.shape[1], device=keys.device, dtype=torch.int32)
    step = max(1, MOST // (rows * heads * keys.shape[1]))
    for start in range(0, count, step):
        some = slice(start, start + step)
        own = queries[:, some].float().reshape(rows, -1, width)
        products = (own @ keys.transpose(1, 2)).relu_().view(rows, -1, heads, len(at))
        scores = (weights[:, some].unsqueeze(2) @ products).squeeze(2)
        scores.masked_fill_(at > positions[:, some, None], float("-inf"))
        least = scores.topk(topk).values[..., -1:]
        above, equal = scores > least, scores == least
        free = topk - above.sum(-1, keepdim=True)
        keeps = above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= free))
        # Those that are kept go behind each other, all others to one number more.
        numbers = torch.where(keeps, keeps.cumsum(-1, dtype=torch.int32) - 1, topk).long()
        found = at.new_zeros(*scores.shape[:2], topk + 1)
        made.append(found.scatter_(-1, numbers, at.expand_as(numbers))[..., :topk])
    return torch.cat(made, 1)


def _rows(
    backend: AttentionBackend,
    rows: Sequence[int],
    queries: Sequence[int],
    keys: Sequence[int],
    tables: Tensor,
) -> RowsOfStep | None:
    """Prepare some rows of a step, given by their numbers; None without any."""
    if not rows:
        return None
    tokens, device = None, tables.device
    if len(rows) < len(keys):
        starts = (0, *accumulate(queries))
        own = [token for row in rows for token in range(starts[row], starts[row + 1])]
        tokens = torch.tensor(own, device=device)
        tables = tables[torch.tensor(rows, device=device)]
    tables = tables[: len(rows)]
    lengths = [queries[row] for row in rows]
    bounds = torch.tensor((0, *accumulate(lengths)), dtype=torch.int32, device=device)
    step = backend.prepare(lengths, [keys[row] for row in rows], tables)
    return RowsOfStep(step, tokens, bounds, tables)


def _parts(
    plan: SdpaPlan, heads: torch.Size, topk: int, index_heads: torch.Size
) -> Iterator[_Some]:
    """All tokens, as many at once as `MOST` allows.

    heads, index_heads: the shapes [tokens, heads, width] of queries, and of index queries.
    """
    for group in plan.groups:
        assert group.positions is not None
        count = len(group.positions)
        slots = group.slots.view(count, -1)
        widest = max(slots.shape[1] * index_heads[2], topk * heads[1] * heads[2])
        step = max(1, MOST // widest)
        for start in range(0, count, step):
            some = slice(start, min(start + step, count))
            tokens = some if group.tokens is None else group.tokens[some]
            yield _Some(True, tokens, slots[some], group.positions[some])
    for row in plan.long_rows:
        step = max(1, MOST // len(row.slots))
        behind = len(row.slots) - row.stop
        for start in range(row.start, row.stop, step):
            some = slice(start, min(start + step, row.stop))
            own = torch.arange(some.start, some.stop, device=row.slots.device)
            yield _Some(False, some, row.slots[None], behind + own[None])


def _index_keys(cache: LayerCache, slots: Tensor, width: int) -> Tensor:
    """Float32 [rows, keys, width] at slots int64 [rows, keys]."""
    head_dim = cache.keys.shape[-1]
    parts = (cache.flat_keys[:, -1, :width], cache.flat_values[:, -1, : max(0, width - head_dim)])
    found = [part.index_select(0, slots.flatten()) for part in parts if part.shape[1]]
    return torch.cat(found, 1).float().view(*slots.shape, width)


def _attend_alone(
    q: Tensor, cache: LayerCache, some: _Some, selected: Tensor, scale: float, sinks: Tensor | None
) -> Tensor:
    """q [rows, heads, head_dim] of rows of one token each to the same shape."""
    slots = some.slots.gather(1, selected[:, 0])
    k, v = (
        part[:, :-1].index_select(0, slots.flatten()).view(*slots.shape, *q.shape[1:])
        for part in (cache.flat_keys, cache.flat_values)
    )
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    return _attend(q[:, :, None], k, v, None, scale, sinks)[:, :, 0]


def _attend_row(
    q: Tensor, cache: LayerCache, some: _Some, selected: Tensor, scale: float, sinks: Tensor | None
) -> Tensor:
    """q [queries, heads, head_dim] of one row to the same shape."""
    slots, heads = some.slots[0], q.shape[1]
    seen = torch.zeros(len(q), len(slots), dtype=torch.bool, device=q.device)
    seen.scatter_(1, selected[0], True)
    seen &= torch.arange(len(slots), device=q.device) <= some.positions[0, :, None]
    out = torch.empty_like(q)
    step = max(1, MOST // (len(slots) * max(len(q), q.shape[2])))
    for start in range(0, heads, step):
        own = slice(start, min(start + step, heads))
        k, v = (
            part[:, own].index_select(0, slots).transpose(0, 1)[None]
            for part in (cache.flat_keys, cache.flat_values)
        )
        queries = q[:, own].transpose(0, 1)[None]
        found = _attend(queries, k, v, seen, scale, None if sinks is None else sinks[own])
        out[:, own] = found[0].transpose(0, 1)
    return out


def _attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float, sinks: Tensor | None
) -> Tensor:
    """q, k, v [rows, heads, tokens or keys, head_dim]; seen: bool [tokens, keys], None: all."""
    if sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    if seen is not None:
        scores.masked_fill_(~seen, float("-inf"))
    own = sinks.float().view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, own), dim=-1).softmax(-1)[..., :-1]
    return (weights @ v.float()).to(q.dtype)

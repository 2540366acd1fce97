"""Attention over gathered keys, written out: for what torch's own kernels lack.

Scores, softmax and sums are float32. Queries are taken a few at a time, so that the scores of a
long prompt never lie in memory at once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_SCORES = 2**25
"""Scores that are computed at once: 128 MiB."""


@dataclass(frozen=True)
class ScoreRule:
    """How scores become weights, as in base.py.

    scale, softcap: of the spec. window: positions that a query sees at most. slopes, sinks:
    float [heads], or None.
    """

    scale: float
    softcap: float | None
    window: int
    slopes: Tensor | None
    sinks: Tensor | None


def dense_attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, rule: ScoreRule) -> Tensor:
    """q [rows, queries, heads, head_dim] to the same shape; k, v: [rows, keys, kv_heads, head_dim].

    positions: int64 [rows, queries], each query's own key; it sees that one and those before.
    """
    rows, num_queries, heads, _ = q.shape
    step = max(1, MAX_SCORES // (rows * heads * k.shape[1]))
    out = torch.empty_like(q)
    for start in range(0, num_queries, step):
        some = slice(start, start + step)
        out[:, some] = _attend(q[:, some], k, v, positions[:, some], rule)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, rule: ScoreRule) -> Tensor:
    rows, num_queries, _, head_dim = q.shape
    # The heads that share a KV head and the queries become one dimension of a product.
    folded = q.float().reshape(rows, num_queries, k.shape[2], -1, head_dim).permute(0, 2, 3, 1, 4)
    keys, values = (part.float().transpose(1, 2) for part in (k, v))
    scores = folded.flatten(2, 3) @ keys.transpose(-1, -2) * rule.scale
    scores = scores.view(*folded.shape[:-1], -1)  # [rows, kv_heads, group, queries, keys]
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    distance = torch.arange(k.shape[1], device=k.device) - positions[:, :, None]
    distance = distance[:, None, None]  # [rows, 1, 1, queries, keys]
    by_head = (k.shape[2], -1, 1, 1)
    if rule.slopes is not None:
        scores = scores + rule.slopes.view(by_head) * distance
    hidden = (distance > 0) | (distance <= -rule.window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if rule.sinks is None:
        weights = scores.softmax(-1)
    else:
        sinks = rule.sinks.float().view(by_head).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
    out = (weights.flatten(2, 3) @ values).view(folded.shape).permute(0, 3, 1, 2, 4)
    return out.reshape(q.shape).to(q.dtype)

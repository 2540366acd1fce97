"""Vectors of tokens that other parts of a larger model embed.

`configs/architectures/outer_tokens.py` says which. They are computed once at load, whole on every
rank: no adapter changes them, and the embedding's scale does not multiply them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configs.architectures.outer_tokens import OuterTokens
from sharding.linear import ColumnParallelLinear, ColumnPart
from sharding.loader import Weights
from sharding.slicing import whole


class OuterRows(nn.Module):
    """The vectors of a vocabulary's last tokens.

    weight: [tokens, hidden].
    """

    def __init__(self, tokens: Sequence[OuterTokens], hidden: int, weights: Weights) -> None:
        """tokens: by part, in order, at least one; the first one's first is the first of all."""
        super().__init__()
        self._first = tokens[0].first
        rows = torch.cat([_rows(each, hidden, weights) for each in tokens])
        self.weight = nn.Parameter(rows, requires_grad=False)

    def forward(self, embedded: Tensor, input_ids: Tensor) -> Tensor:
        """Replace the vectors of these tokens in [tokens, hidden]; input_ids: int64 [tokens]."""
        index = input_ids - self._first
        own = F.embedding(index.clamp(min=0), self.weight)
        return torch.where((index >= 0).unsqueeze(-1), own, embedded)


@torch.no_grad()
def _rows(tokens: OuterTokens, hidden: int, weights: Weights) -> Tensor:
    """Read one part, and compute [count, hidden]."""
    path, width = f"model.{tokens.part}", tokens.width
    table = weights.read(f"{path}.embedding.weight", (tokens.table_size, width))
    scale = weights.read(f"{path}.hard_embedding_norm.weight", (width,))
    columns = ColumnPart(f"{path}.embedding_projection", hidden, whole(hidden))
    projection = ColumnParallelLinear(width, (columns,), False, weights)
    if table.is_meta:
        return weights.empty(tokens.count, hidden)
    normed = _normed(table[: tokens.count], tokens.eps) * scale.float()
    return _normed(projection(normed.to(table.dtype)), tokens.eps).to(table.dtype)


def _normed(x: Tensor, eps: float) -> Tensor:
    """Rows of a root mean square of 1, in float32."""
    x = x.float()
    return x * torch.pow(x.pow(2).mean(-1, keepdim=True) + eps, -0.5)

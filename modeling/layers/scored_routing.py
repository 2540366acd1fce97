"""How routers select experts by scores of their own (DeepSeek V3's form), in plain torch.

s[e] = sigmoid(logits[e])        the best by s[e] + b[e] of the best groups        weights: of s
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScoredRouting:
    """How experts are selected by their scores.

    active: experts of a token. summed: whether their weights sum to 1, before `factor`. groups: of
    experts side by side, of which those of the best `kept` can be selected; a group's score is the
    sum of its two best.
    """

    active: int
    summed: bool
    groups: int
    kept: int
    factor: float

    def weights(self, logits: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
        """(weights, int64 ids), [tokens, active] each, of float32 logits [tokens, experts].

        correction: b, [experts].
        """
        scores = logits.sigmoid()
        left = scores + correction
        if self.kept < self.groups:
            groups = left.unflatten(1, (self.groups, -1))  # type: ignore[no-untyped-call]
            sums = groups.topk(2).values.sum(-1)
            kept = torch.zeros_like(sums, dtype=torch.bool)
            kept.scatter_(1, sums.topk(self.kept).indices, True)
            left = groups.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)
        ids = left.topk(self.active).indices
        best = scores.gather(1, ids)
        best = best / (best.sum(-1, keepdim=True) + 1e-20) if self.summed else best
        return best * self.factor, ids

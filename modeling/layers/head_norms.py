"""Norms of single heads, as kernels take them."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms of each head of q, of each of k, and of each of v, or of the first of these alone.

    weights: [head_dim] each. eps: what is added to the mean squares.
    """

    weights: tuple[Tensor, ...]
    eps: tuple[float, ...]

    def of(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Norm q, k and v, [tokens, heads or kv_heads, head_dim] each; the rest stays."""
        normed = [
            F.rms_norm(part.float(), weight.shape, weight.float(), eps).to(part.dtype)
            for part, weight, eps in zip(parts, self.weights, self.eps, strict=False)
        ]
        return [*normed, *parts[len(normed) :]]

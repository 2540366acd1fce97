"""Norms of single heads, as kernels take them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms of each head of q and of each of k.

    weights: float32 [head_dim] each. eps: what is added to the mean squares.
    """

    weights: tuple[Tensor, Tensor]
    eps: tuple[float, float]

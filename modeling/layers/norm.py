"""Normalisation layers, whole on every rank."""

from torch import Tensor, nn
from torch.nn import functional as F

from sharding.loader import Weights


class RMSNorm(nn.Module):
    """y = w * x / sqrt(mean(x^2) + eps) (arXiv:1910.07467), over the last dimension."""

    def __init__(self, prefix: str, size: int, eps: float, weights: Weights) -> None:
        """Read `prefix`.weight [size]."""
        super().__init__()
        self.weight = weights.parameter(f"{prefix}.weight", (size,))
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Norm of x + residual, and that sum: both [tokens, size]."""
        if residual is not None:
            x = x + residual
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps), x

"""Normalisation layers, whole on every rank."""

from torch import Tensor, nn
from torch.nn import functional as F

from modeling.adapters.norm_rows import NormRows, OwnWeights, rms_norm
from modeling.layers.fused import FusedOps, fused_ops, rounded_for
from modeling.layers.head_norms import HeadNorms
from sharding.group import Summand, summed
from sharding.linear_weight import LinearWeight
from sharding.loader import Weights


class RMSNorm(nn.Module):
    """y = w * x / sqrt(mean(x^2) + eps) (arXiv:1910.07467), over the last dimension.

    rows: the weights of adapters, in captured steps. called_alone: adapters have something to do
    behind the norm, so that nothing else computes it.
    """

    def __init__(self, prefix: str, size: int, eps: float, weights: Weights) -> None:
        """Read `prefix`.weight [size]."""
        super().__init__()
        self.called_alone = False
        self.weight = weights.parameter(f"{prefix}.weight", (size,))
        self.eps = eps
        self._fused = fused_ops(weights.device)
        self.rows: NormRows | None = None
        self._readers: tuple[LinearWeight, ...] = ()

    def feed(self, reader: LinearWeight) -> None:
        """Round the norm for a product that reads it, where the kernel can."""
        # In a tuple it is no module of this one, which would count its bytes.
        self._readers = (reader,)

    def forward(self, x: Tensor | Summand, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Norm of x + residual, and that sum: both [tokens, size]; a summand is summed before."""
        if self._fused is not None and isinstance(x, Summand):
            return self._by_kernel(self._fused, x.partial, residual, x)
        x = summed(x)
        # The kernel takes contiguous rows; norms of single heads have three dimensions.
        if self._fused is not None and x.dim() == 2 and x.is_contiguous():
            return self._by_kernel(self._fused, x, residual)
        own = self.own
        if residual is not None:
            x = x + residual
        if own is not None:
            return rms_norm(x, self.weight, self.eps, own), x
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps), x

    @property
    def own(self) -> OwnWeights | None:
        """What replaces the weight in the step for the tokens of some adapters."""
        return None if self.rows is None else self.rows.own

    def _by_kernel(
        self, fused: FusedOps, x: Tensor, residual: Tensor | None, summand: Summand | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `forward`, in one launch; x: of the summand, if there is one."""
        reader = self._readers[0] if self._readers else None
        rounded = rounded_for(reader, x)
        normed, total = fused.add_rms_norm(
            x, residual, self.weight, self.eps, own=self.own, rounded=rounded, summand=summand
        )
        if reader is not None and rounded is not None:
            reader.take_rounded(normed, *rounded)
        return normed, total


def head_norms(q_norm: RMSNorm, k_norm: RMSNorm) -> HeadNorms | None:
    """Both norms for what computes them itself; None in steps in which adapters have their own."""
    norms = (q_norm, k_norm)
    if any(norm.called_alone or norm.own is not None for norm in norms):
        return None
    return HeadNorms((q_norm.weight, k_norm.weight), (q_norm.eps, k_norm.eps))


class LayerNorm(nn.Module):
    """y = w * (x - mean(x)) / sqrt(var(x) + eps) + b (arXiv:1607.06450), over the last axis."""

    def __init__(
        self, prefix: str, size: int, eps: float, weights: Weights, affine: bool = True
    ) -> None:
        """Read `prefix`.weight and `prefix`.bias, [size] each; affine False: w = 1, b = 0."""
        super().__init__()
        self.weight = weights.parameter(f"{prefix}.weight", (size,)) if affine else None
        self.bias = weights.parameter(f"{prefix}.bias", (size,)) if affine else None
        self.size = (size,)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, size] to the same shape."""
        return F.layer_norm(x, self.size, self.weight, self.bias, self.eps)

"""RMS norms in one launch, with the sum before them and the norm before that."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from torch.nn import functional as F

from modeling.adapters.norm_rows import NormRows, OwnWeights
from modeling.layers.fused import fused_ops


class NormDeferral(Protocol):
    """Computes norms later, together with what follows them."""

    def defer_norm(self, norm: "FusedRMSNorm", x: Tensor) -> None:
        """Write down that x stands for its norm."""
        ...


class FusedRMSNorm(nn.Module):
    """y = w * x / sqrt(mean(x^2) + eps) over the last dimension, w in float32.

    plus: by what w is more than the checkpoint's. rows: the weights of adapters, in captured steps.
    called_alone: not fused with anything, as adapters have something to do behind each norm.
    deferral: what computes it later, of each head of q, k or v; None: it is computed when called.
    is_of_values: whether it is of each head of v.
    """

    def __init__(
        self, weight: Tensor, eps: float, replaced: nn.Module | None = None, plus: float = 0.0
    ) -> None:
        """replaced: the module of transformers that computes this of the checkpoint's weight."""
        super().__init__()
        self.plus = plus
        self.rows: NormRows | None = None
        # Not among the submodules: the weight would be found twice.
        self._replaced = (replaced,)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps
        self._fused = fused_ops(weight.device)
        self._ahead: tuple[Tensor, Tensor] | None = None
        self._is_watched = False
        self.called_alone = False
        self.deferral: NormDeferral | None = None
        self.is_of_values = False

    @property
    def code(self) -> nn.Module:
        """The module that reads the checkpoint's own weight."""
        return self._replaced[0] or self

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same shape."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is x:
            return ahead[1]
        if self.deferral is not None and not self.called_alone and self.own is None:
            self.deferral.defer_norm(self, x)
            return x
        return self.computed(x)

    def computed(self, x: Tensor) -> Tensor:
        """[..., size] to the same shape, now."""
        if self._fused is None:
            return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)
        fused = self._fused.add_rms_norm
        return fused(_rows(x), None, self.weight, self.eps, own=self.own)[0].view(x.shape)

    @property
    def own(self) -> OwnWeights | None:
        """The weights of adapters in a captured step; None where there are none."""
        return None if self.rows is None else self.rows.own

    @property
    def is_apart(self) -> bool:
        """Whether it is called by itself now, never within a sum."""
        return self.called_alone or self._is_watched

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Be called by itself meanwhile, never within a sum."""
        self._is_watched = True
        try:
            yield
        finally:
            self._is_watched = False

    def keep_ahead(self, x: Tensor, normed: Tensor) -> None:
        """Return `normed` from the next call if that is of this very x."""
        self._ahead = (x, normed)


@dataclass(frozen=True)
class NormedSum:
    """t = (inner(x) * factor + residual) * total_factor, and outer(t); any norm may be missing."""

    inner: FusedRMSNorm | None = None
    outer: FusedRMSNorm | None = None
    factor: float = 1.0
    total_factor: float = 1.0

    def compute(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        """(t, its norm, if there is one), all of one shape; one launch where there are kernels."""
        inner, outer = self.inner, self.outer
        norms = [each for each in (inner, outer) if each is not None]
        ops = fused_ops(x.device)
        is_alike = x.shape == residual.shape and x.dtype == residual.dtype
        # The kernel takes weights of adapters for both norms, or for none.
        has_own = {each.own is not None for each in norms}
        if ops is None or not is_alike or len(has_own) > 1 or any(each.is_apart for each in norms):
            return self._by_parts(x, residual)
        normed, total = ops.add_rms_norm(
            _rows(x),
            _rows(residual),
            None if outer is None else outer.weight,
            0.0 if outer is None else outer.eps,
            None if inner is None else (inner.weight, inner.eps),
            own=None if outer is None else outer.own,
            own_inner=None if inner is None else inner.own,
            factor=self.factor,
            total_factor=self.total_factor,
        )
        return total.view(x.shape), None if outer is None else normed.view(x.shape)

    def _by_parts(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.inner is not None:
            x = self.inner(x)
        if self.factor != 1.0:
            x = x * self.factor
        total = residual + x
        if self.total_factor != 1.0:
            total = total * self.total_factor
        return total, None if self.outer is None else self.outer(total)


def _rows(x: Tensor) -> Tensor:
    """[n, size]: the kernel counts on whole rows behind each other.

    Columns of a merged product are not.
    """
    return x.reshape(-1, x.shape[-1]).contiguous()

"""RMS norms in one launch, with the sum before them and the norm before that."""

from collections.abc import Iterator
from contextlib import contextmanager
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
        if self.deferral is not None and not self.called_alone and self._own is None:
            self.deferral.defer_norm(self, x)
            return x
        return self.computed(x)

    def computed(self, x: Tensor) -> Tensor:
        """[..., size] to the same shape, now."""
        if self._fused is None:
            return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)
        fused = self._fused.add_rms_norm
        return fused(_rows(x), None, self.weight, self.eps, own=self._own)[0].view(x.shape)

    @property
    def _own(self) -> OwnWeights | None:
        return None if self.rows is None else self.rows.own

    def after_sum(
        self, x: Tensor, residual: Tensor, inner: "FusedRMSNorm | None"
    ) -> tuple[Tensor, Tensor]:
        """(residual + x, its norm), all of one shape; inner: a norm of x before the sum."""
        is_apart = self.called_alone or self._is_watched
        if self._fused is None or x.dtype != residual.dtype or is_apart:
            total = residual + (x if inner is None else inner(x))
            return total, self(total)
        before = None if inner is None else (inner.weight, inner.eps)
        normed, total = self._fused.add_rms_norm(
            _rows(x),
            _rows(residual),
            self.weight,
            self.eps,
            before,
            own=self._own,
            own_inner=None if inner is None else inner._own,
        )
        return total.view(x.shape), normed.view(x.shape)

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


def _rows(x: Tensor) -> Tensor:
    """[n, size]: the kernel counts on whole rows behind each other.

    Columns of a merged product are not.
    """
    return x.reshape(-1, x.shape[-1]).contiguous()

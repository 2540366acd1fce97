"""Weights of norms by token, for kernels that a CUDA graph captures."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


class NormStep:
    """The step that norms compute now.

    pages: int32 [tokens], the page of each token's adapter, -1 where it brings no norms; None:
    nothing is captured now.
    """

    pages: Tensor | None = None


@dataclass(frozen=True)
class OwnWeights:
    """A norm's weights in adapters' pages, and the step's pages.

    weights: [pages, size]; its rows may be far from each other. plus: what the norm adds to a
    weight before it multiplies.
    """

    weights: Tensor
    pages: Tensor
    plus: float = 0.0


@dataclass(frozen=True)
class NormRows:
    """Where a norm's weights are in adapters' pages; weights, plus: as in `OwnWeights`."""

    step: NormStep
    weights: Tensor
    plus: float = 0.0

    @property
    def own(self) -> OwnWeights | None:
        """Return the step's; None where no token can have its own."""
        pages = self.step.pages
        return None if pages is None else OwnWeights(self.weights, pages, self.plus)


NO_WEIGHTS = OwnWeights(torch.empty(0, 0), torch.empty(0))


def rms_norm(x: Tensor, weight: Tensor, eps: float, own: OwnWeights) -> Tensor:
    """Return the norm of x [tokens, ..., size], each token by its weight, in torch's operations.

    weight: of tokens without their own.
    """
    pages = own.pages.long()[:, None]
    found = own.weights[pages[:, 0].clamp(min=0)].float() + own.plus
    each = torch.where(pages < 0, weight.float(), found)
    each = each.view(len(each), *[1] * (x.dim() - 2), -1)
    return (F.rms_norm(x.float(), weight.shape, None, eps) * each).to(x.dtype)

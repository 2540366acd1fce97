"""Weights of codes, beside which a GPU may keep all their numbers."""

from abc import abstractmethod

import torch
from torch import Tensor, nn

from modeling.quantisation.base import QuantisedWeight
from modeling.quantisation.products import GpuProducts, gpu_products
from sharding.linear_weight import multiply

_AT_ONCE = 4096
"""Outputs whose numbers are made at once, which takes several times their bytes."""


class CodedWeight(QuantisedWeight):
    """Codes, of which numbers are made for a product.

    dequantised: all numbers [out, in] beside the codes, for products that are faster with them; it
    is none of the model's parameters.
    """

    dequantised: Tensor | None = None

    @property
    @abstractmethod
    def has_kernels(self) -> bool:
        """Whether GPUs have kernels that read its codes."""

    @property
    @abstractmethod
    def few_tokens(self) -> int:
        """Up to how many tokens they are faster than a library with numbers; 0: they are not."""

    @abstractmethod
    def product(
        self, gpu: GpuProducts, x: Tensor, bias: Tensor | None, out: Tensor | None
    ) -> Tensor:
        """x W^T + bias by kernels that read codes."""

    def forward(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """x W^T + bias."""
        x = self.inputs(x)
        gpu = gpu_products(x) if self.has_kernels else None
        is_few = gpu is not None and len(x) <= self.few_tokens
        if self.dequantised is not None and not is_few:
            return multiply(x, self.dequantised, bias, out)
        if gpu is None:
            return multiply(x, self[:], bias, out)
        return self.product(gpu, x, bias, out)

    def dequantise(self) -> None:
        """Keep all numbers beside the codes."""
        self.dequantised = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for first in range(0, self.shape[0], _AT_ONCE):
            rows = slice(first, first + _AT_ONCE)
            self.dequantised[rows] = self[rows]


def keep_dequantised(model: nn.Module, most_bytes: int) -> int:
    """Keep the numbers of a model's codes beside them, of the first that fit; returns bytes."""
    kept = 0
    for weight in codes_alone(model):
        size = weight.shape[0] * weight.shape[1] * weight.dtype.itemsize
        if kept + size <= most_bytes:
            weight.dequantise()
            kept += size
    return kept


def codes_alone(model: nn.Module) -> list[CodedWeight]:
    """Return a model's weights of codes that have no numbers beside them."""
    found = (each for each in model.modules() if isinstance(each, CodedWeight))
    return [weight for weight in found if weight.dequantised is None]

"""Feed-forward activations by transformers' names."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from configs.architectures.base import Activation

_TANH: Callable[[Tensor], Tensor] = partial(F.gelu, approximate="tanh")


def _clipped_gelu(x: Tensor) -> Tensor:
    """GELU within [-10, 10] (arXiv:2004.09602)."""
    return F.gelu(x).clamp(-10, 10)


def _quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x) (arXiv:1606.08415, its cheaper approximation)."""
    return x * torch.sigmoid(1.702 * x)


def _laplace(x: Tensor) -> Tensor:
    """0.5 (1 + erf((x - mu) / (sigma sqrt 2))) (arXiv:2209.10655)."""
    return 0.5 * (1 + torch.erf((x - 0.707107) / (0.282095 * 2**0.5)))


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.SWISH: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_NEW: _TANH,
    Activation.GELU_TANH: _TANH,
    Activation.GELU_FAST: _TANH,
    Activation.GELU_PYTHON: F.gelu,
    Activation.GELU_PYTHON_TANH: _TANH,
    Activation.GELU_ACCURATE: _TANH,
    Activation.GELU_10: _clipped_gelu,
    Activation.QUICK_GELU: _quick_gelu,
    Activation.RELU: F.relu,
    Activation.RELU2: lambda x: F.relu(x).square(),
    Activation.RELU6: F.relu6,
    Activation.LEAKY_RELU: F.leaky_relu,
    Activation.HARDSWISH: F.hardswish,
    Activation.LAPLACE: _laplace,
    Activation.LINEAR: lambda x: x,
    Activation.MISH: F.mish,
    Activation.SIGMOID: torch.sigmoid,
    Activation.SQRT_SOFTPLUS: lambda x: F.softplus(x).sqrt(),
    Activation.TANH: torch.tanh,
}

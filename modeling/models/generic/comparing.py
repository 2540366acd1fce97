"""Compares what modules of transformers compute with formulas, on a few numbers in float32."""

from typing import Any

import torch
from torch import Tensor

from configs.architectures.base import Activation
from modeling.layers.activation import ACTIVATIONS

TOLERANCE = 1e-5
"""On numbers of about one."""


def same(found: Any, wanted: Tensor) -> bool:
    """Whether what was found is a tensor, and close to the wanted one."""
    return (
        isinstance(found, Tensor)
        and found.shape == wanted.shape
        and torch.allclose(found.float(), wanted.float(), TOLERANCE, TOLERANCE)
    )


def activation_of(act: Any) -> Activation | None:
    """What an activation of transformers computes, of those that have kernels."""
    x = torch.linspace(-4, 4, 33)
    for activation in (Activation.SILU, Activation.GELU_TANH, Activation.GELU):
        try:
            if same(act(x), ACTIVATIONS[activation](x)):
                return activation
        except (RuntimeError, AttributeError, IndexError):
            return None
    return None

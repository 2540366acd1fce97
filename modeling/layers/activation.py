"""Feed-forward activations by transformers' names."""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional as F

from configs.architecture import Activation

_TANH: Callable[[Tensor], Tensor] = partial(F.gelu, approximate="tanh")

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.SWISH: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_NEW: _TANH,
    Activation.GELU_TANH: _TANH,
    Activation.RELU: F.relu,
}

"""Where the host waits for a GPU, which no captured step may, and how it need not."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from modeling.adapters.experts import has_aligned_sides
from modeling.models.generic.stored_experts import StoredMatrices
from modeling.transfer import no_waits

WAITED = "called a synchronizing CUDA operation"
"""How torch's error says it."""


def host_waits(compute: Callable[[], object]) -> bool:
    """Whether the host waits for a GPU in `compute`; other errors are raised."""
    compute()  # The first run may load what later ones do not.
    try:
        with no_waits():
            compute()
    except RuntimeError as error:
        if WAITED not in str(error):
            raise
        return True
    return False


class HostNumbers(TorchFunctionMode):
    """Copies each number to the device once, where a model's code copies it in every step."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device.type
        self._kept: dict[tuple[object, ...], Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, or return a copy of what it returned before."""
        given = kwargs or {}
        if (number := _number(func, args, given)) is None:
            return func(*args, **given)
        key = (func, number, str(args[1:]), str(given))
        if key not in self._kept:
            made = func(*args, **given)
            if made.device.type != self._device:
                return made
            self._kept[key] = made
        # Its own, as the code may change it.
        return self._kept[key].clone()


def _number(func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> object:
    """The number that a call may bring to a device; None for other calls."""
    if func is torch.tensor:
        value = args[0] if args else given.get("data")
        return (type(value), value) if isinstance(value, int | float) else None
    if func is not torch.Tensor.to or args[0].dim() or args[0].device.type != "cpu":
        return None
    if any(isinstance(each, Tensor) for each in (*args[1:], *given.values())):
        return None
    return args[0].dtype, args[0].item()


def groups_can_be_captured(causal: PreTrainedModel, dtype: torch.dtype) -> bool:
    """Whether no product of groups reads their sizes on the host; only half precision does not."""
    # Kernels of ours multiply what is stored, and a convolution's weights are no matrices.
    others = (e for e in causal.modules() if not isinstance(e, StoredMatrices | nn.Conv1d))
    numbers = (each for module in others for each in module.parameters(recurse=False))
    stacked = [each for each in numbers if each.is_floating_point() and each.dim() == 3]
    is_half = dtype is not torch.float32
    return not stacked or (is_half and all(map(has_aligned_sides, stacked)))

"""Launches of Triton kernels that skip Triton's inspection of every argument.

Triton selects a kernel's compiled form by the types and values of all arguments, which takes some
50 microseconds of Python for forty arguments. A step that is not captured launches hundreds of
kernels, so here the form is looked up by a short key, for which the caller is responsible.
"""

from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes: Triton compiles pointers and integers that are multiples of it in another form."""


class Launcher:
    """One kernel, and its compiled forms by key.

    A key says all that Triton compiles a form for: the types of pointers and whether they are
    aligned, integers that are 1 or multiples of 16, constants, the device. `aligned` helps.
    """

    def __init__(self, kernel: Any) -> None:
        """kernel: what `triton.jit` made; its constants are its last parameters."""
        self._kernel = kernel
        self._forms: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

    def __call__(
        self,
        key: Hashable,
        grid: Sequence[int],
        arguments: Sequence[Any],
        constants: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        """Launch `grid` programs on the current stream; the first launch of a key compiles."""
        found = self._forms.get(key)
        if found is None:
            # Triton's own path: it compiles the form, or finds it in its cache, and launches it.
            form = self._kernel[tuple(grid)](*arguments, **constants, **options)
            names = self._kernel.arg_names[len(arguments) :]
            self._forms[key] = form, tuple(constants[name] for name in names)
            return
        form, values = found
        # Triton takes a number as the address; for a tensor it would query the CUDA driver first.
        plain = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
        form[(*grid, 1, 1)[:3]](*plain, *values)


def aligned(*tensors: Tensor) -> int:
    """Whether all tensors' first bytes are aligned: 0, or something else."""
    address = 0
    for tensor in tensors:
        address |= tensor.data_ptr()
    return address % ALIGNMENT


@cache
def has_dependent_launch(device: torch.device) -> bool:
    """Whether kernels may start before the one ahead of them has ended: Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def has_warpgroups(device: torch.device) -> bool:
    """Whether four warps multiply together: Hopper alone, as what came later has other ways."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@cache
def has_async_copies(device: torch.device) -> bool:
    """Whether kernels can copy to shared memory without waiting: Ampere and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def launch_options(dependent: bool) -> dict[str, bool]:
    """Options of a launch that is a programmatic dependent one, or not."""
    return {"launch_pdl": True} if dependent else {}

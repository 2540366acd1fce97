"""Which kernel multiplies adapters on a device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from modeling.adapters.bank import AdapterBank
from modeling.adapters.kernels.base import AdapterData
from modeling.adapters.kernels.reference import reference_batch

BatchBuilder = Callable[[AdapterBank, Sequence[int], Sequence[int]], AdapterData]
"""From (bank, slot of each row, length of each row) to the step's adapter data."""


@dataclass(frozen=True)
class KernelChoice:
    """The builder of a step's adapter data, its name, and why it was taken."""

    name: str
    reason: str
    batch: BatchBuilder


def select_kernel(device: torch.device) -> KernelChoice:
    """Return the fastest kernel that runs on the device."""
    kernels = {
        "cpu": KernelChoice("reference", "the CPU path", reference_batch),
        "cuda": KernelChoice("reference", "the only kernel so far", reference_batch),
    }
    return kernels[device.type]

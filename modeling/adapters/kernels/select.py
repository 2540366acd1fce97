"""Which kernel multiplies adapters on a device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from modeling.adapters.bank import AdapterBank
from modeling.adapters.kernels.reference import reference_batch
from modeling.adapters.product import AdapterData

BatchBuilder = Callable[[AdapterBank, Sequence[int], Sequence[int]], AdapterData]
"""From (bank, slot of each row, length of each row) to the step's adapter data."""


class AdapterStepPlan(Protocol):
    """Buffers at fixed addresses, so that a captured step serves any mix of adapters."""

    def update(self, slots: Sequence[int], lengths: Sequence[int]) -> int:
        """Describe the next step, ahead of its replay; returns how many tiles it has."""
        ...

    def batch(self, num_tokens: int, num_tiles: int | None = None) -> AdapterData:
        """Return data to capture for any step of so many tokens, or for `update`'s own tiles."""
        ...


PlanBuilder = Callable[[AdapterBank, int], AdapterStepPlan]
"""From (bank, most tokens of a step) to a plan."""


@dataclass(frozen=True)
class KernelChoice:
    """The builder of a step's adapter data, its name, and why it was taken.

    plan: what captured steps need; None where the kernel cannot be captured.
    """

    name: str
    reason: str
    batch: BatchBuilder
    plan: PlanBuilder | None = None


def select_kernel(device: torch.device) -> KernelChoice:
    """Return the fastest kernel that runs on the device."""
    if device.type == "cpu":
        return KernelChoice("reference", "the CPU path", reference_batch)
    try:
        # Here, not above: Triton comes with CUDA builds of torch only.
        from modeling.adapters.kernels.triton_plan import TritonPlan, triton_batch
    except ImportError as error:
        return KernelChoice("reference", f"triton does not import: {error}", reference_batch)
    return KernelChoice("triton", "the fastest on a GPU", triton_batch, TritonPlan)

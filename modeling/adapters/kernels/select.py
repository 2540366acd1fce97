"""Select the kernel that multiplies adapters on a device."""

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
    """Buffers at fixed addresses, so that a CUDA graph serves any mix of adapters."""

    def update(self, slots: Sequence[int], lengths: Sequence[int]) -> int:
        """Write the next step's description, before its replay; returns its number of tiles."""
        ...

    def batch(
        self, num_tokens: int, num_tiles: int | None = None, has_experts: bool = False
    ) -> AdapterData:
        """Return the data of steps of so many tokens; num_tiles: `update`'s, None to capture any.

        has_experts: whether some adapter of the steps has factors of experts, and kernels are to
        multiply them.
        """
        ...


PlanBuilder = Callable[[AdapterBank, int], AdapterStepPlan]
"""From (bank, most tokens of a step) to a plan."""


@dataclass(frozen=True)
class KernelChoice:
    """The selected kernel.

    name, reason: for logs.
    batch: builds a step's adapter data.
    plan: builds the buffers for CUDA graphs; None where the kernel cannot be captured.
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
        from modeling.adapters.kernels.plan import TritonPlan, triton_batch
    except ImportError as error:
        return KernelChoice("reference", f"triton does not import: {error}", reference_batch)
    return KernelChoice("triton", "the fastest on a GPU", triton_batch, TritonPlan)

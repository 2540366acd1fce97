"""What paged and padded runners share: their parts, their adapters, and their life in two stages.

1. Loading reads the weights and makes the adapter pools; it returns a `LoadedRunner`. `measure`
   says how many cache blocks fit into what memory is left.
2. `allocate` is given the minimum over all ranks, and returns a runner that is ready for steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from configs.engine import EngineConfig
from configs.kv_groups import blocks_of
from configs.wire.adapters import (
    AdapterError,
    AdapterKey,
    AdapterRefusal,
    AdapterShape,
    FetchedAdapter,
)
from modeling.adapters.bank import AdapterBank
from modeling.adapters.device_copies import CopyEvent
from modeling.adapters.kernels.select import KernelChoice
from modeling.batch import ForwardBatch, StepOutput
from modeling.runner.block_tables import BatchSize
from modeling.runner.loading import LoadedWeights
from modeling.runner.report import RunnerReport
from modeling.sampling.grammars import Grammars


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the thread's current one: pinning memory and new events depend on it."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@dataclass(frozen=True)
class RunnerParts:
    """What every runner is made of once its weights are loaded.

    device: where a step's inputs go.
    weights: the model, and what it took to load it.
    kernel: multiplies the adapters.
    bank: the adapters, on the host and on the device.
    size: how many batch slots there are, and how long a sequence may get.
    grammars: the matchers of constrained requests.
    """

    config: EngineConfig
    device: torch.device
    weights: LoadedWeights
    kernel: KernelChoice
    bank: AdapterBank
    size: BatchSize
    grammars: Grammars

    def report(
        self, num_blocks: int, bytes_per_block: int, attention: str, reason: str
    ) -> RunnerReport:
        """Report on a runner with so many blocks; attention, reason: its name, why it was taken."""
        return RunnerReport(
            num_blocks=num_blocks,
            block_size=self.size.block_size,
            projections=tuple(projection.name for projection in self.bank.projections),
            adapter_pages=self.bank.size.pages,
            adapter_slots=self.bank.size.slots,
            host_bytes=self.bank.host_capacity,
            max_total_tokens=self.size.max_total_tokens,
            dtype=str(self.weights.dtype).removeprefix("torch."),
            device=str(self.device),
            attention=attention,
            attention_reason=reason,
            adapter_kernel=self.kernel.name,
            adapter_kernel_reason=self.kernel.reason,
            weight_bytes_read=self.weights.bytes_read,
            weight_bytes_resident=self.weights.bytes_resident,
            kv_bytes=num_blocks * bytes_per_block,
            adapter_pool_bytes=self.bank.pool_bytes,
        )


class BaseRunner(ABC):
    """A runner that is ready for steps; see `modeling.runner.base.Runner`.

    report: what it can hold, and what it took to get there.
    """

    def __init__(self, parts: RunnerParts, report: RunnerReport) -> None:
        self.report = report
        self._config = parts.config
        self._device = parts.device
        self._kernel = parts.kernel
        self._bank = parts.bank
        self._size = parts.size
        self._grammars = parts.grammars

    @abstractmethod
    def step(self, batch: ForwardBatch) -> StepOutput:
        """Launch one step; every rank calls it with the same batches, in the same order."""

    def stage(self, adapter: FetchedAdapter) -> AdapterShape:
        """Read an adapter into host memory; AdapterError when it cannot be served exactly."""
        if not self._config.adapters.enabled:
            raise AdapterError(
                AdapterRefusal.UNSUPPORTED,
                "this server serves no adapters: set adapters.enabled to true",
            )
        with on_device(self._device):
            return self._bank.stage(adapter)

    @torch.inference_mode()
    def load_adapter(self, key: AdapterKey, slot: int, pages: Sequence[Sequence[int]]) -> CopyEvent:
        """Start to copy a staged adapter to the device, beside the steps; waits for nothing."""
        with on_device(self._device):
            return self._bank.load(key, slot, pages)

    @property
    def num_unrecorded(self) -> int:
        """How many CUDA graphs `allocate` has left to `record_next`."""
        return 0

    def record_next(self) -> None:
        """Record one more CUDA graph."""
        raise NotImplementedError("this runner records none")

    def drop(self, key: AdapterKey) -> None:
        """Free the host copy of an adapter."""
        self._bank.drop(key)

    def prepare(self, number: int, constraint: str, gone: Sequence[int]) -> str:
        """Make a constraint's matcher, and free those with numbers in `gone`.

        Returns "", or what is wrong with the constraint.
        """
        return self._grammars.prepare(number, constraint, gone)

    def check(self) -> None:
        """Assert what must hold between steps."""
        self._bank.check()


class LoadedRunner(ABC):
    """A model on its device with its adapter pools; its cache is not allocated yet."""

    parts: RunnerParts

    @abstractmethod
    def measure(self) -> int:
        """Return how many cache blocks fit; all ranks call it together.

        On CUDA it runs the largest step once to see its peak.
        """

    def blocks_of(self, tokens: int) -> int:
        """Return how many cache blocks hold so many tokens; one at least."""
        return max(1, blocks_of(self.parts.size.groups, tokens))

    @abstractmethod
    def allocate(self, num_blocks: int | None = None, record: bool = True) -> BaseRunner:
        """Take the cache and the batch slots' buffers; all ranks call it together.

        record: whether to record CUDA graphs at once; else `record_next` does it, where there are.
        num_blocks: the same on every rank; None for as many as fit, where ranks need not agree.
        """

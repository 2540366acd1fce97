"""What a rank asks of its model runner, paged or padded."""

from collections.abc import Sequence
from typing import Protocol

from configs.wire.adapters import AdapterKey, AdapterShape, FetchedAdapter
from modeling.batch import ForwardBatch, StepOutput
from modeling.runner.report import RunnerReport


class PendingCopy(Protocol):
    """An adapter's copy to the device, under way."""

    def wait(self) -> None:
        """Block until all bytes are on the device."""
        ...


class StepRunner(Protocol):
    """A runner that has loaded: what the rank's worker asks of it while it serves."""

    def step(self, batch: ForwardBatch) -> StepOutput:
        """Launch one step."""
        ...

    def stage(self, adapter: FetchedAdapter) -> AdapterShape:
        """Read, check, cut and keep an adapter in host memory.

        AdapterError if it is refused, AdapterDeferred if there is no room for it now.
        """
        ...

    def load_adapter(
        self, key: AdapterKey, slot: int, pages: Sequence[Sequence[int]]
    ) -> PendingCopy:
        """Start to copy a staged adapter to device pages, beside the steps."""
        ...

    def drop(self, key: AdapterKey) -> None:
        """Forget the host copy of an adapter."""
        ...

    def prepare(self, number: int, constraint: str, gone: Sequence[int]) -> str:
        """Make a constraint's matcher, beside the steps, and forget those of `gone`.

        Returns "", or what is wrong with the constraint.
        """
        ...


class Runner(StepRunner, Protocol):
    """A runner from its start on."""

    def measure(self) -> int:
        """Load the weights and return how many cache blocks fit."""
        ...

    def allocate(self, num_blocks: int) -> RunnerReport:
        """Take the buffers for so many blocks."""
        ...

    def check(self) -> None:
        """Assert what must hold between steps."""
        ...

"""The interface of a rank's model runner, paged or padded."""

from collections.abc import Sequence
from typing import Protocol

from configs.wire.adapters import AdapterKey, AdapterShape, FetchedAdapter
from modeling.batch import ForwardBatch, StepOutput


class PendingCopy(Protocol):
    """An adapter's copy to the device that has been started."""

    def wait(self) -> None:
        """Block until all bytes are on the device."""
        ...


class Runner(Protocol):
    """A model with its cache allocated.

    `step`, `record_next`, `load_adapter` and `drop` belong to one thread, in the order of the
    plans; `stage` and `prepare` may run beside them on other threads.
    """

    def step(self, batch: ForwardBatch) -> StepOutput:
        """Launch one step. The next may be launched before `wait` is called on its output."""
        ...

    def stage(self, adapter: FetchedAdapter) -> AdapterShape:
        """Read, check, slice and keep an adapter in host memory.

        AdapterError if it cannot be served exactly, AdapterDeferred if there is no room for it now.
        """
        ...

    def load_adapter(
        self, key: AdapterKey, slot: int, pages: Sequence[Sequence[int]]
    ) -> PendingCopy:
        """Start to copy a staged adapter to device pages; waits for nothing.

        Steps launched before read what was in the pages, steps launched after read the adapter.
        """
        ...

    @property
    def num_unrecorded(self) -> int:
        """How many CUDA graphs are still to be recorded by `record_next`."""
        ...

    def record_next(self) -> None:
        """Record one more CUDA graph, between the same steps on all ranks."""
        ...

    def drop(self, key: AdapterKey) -> None:
        """Free the host copy of an adapter."""
        ...

    def prepare(self, number: int, constraint: str, gone: Sequence[int]) -> str:
        """Make a constraint's matcher, and free those with numbers in `gone`.

        Returns "", or what is wrong with the constraint. Joins name the matcher by its number.
        """
        ...

"""A rank's start before a driver asks for it, so that its weights are there when one does.

Nothing in it depends on the driver: it is the start that the last driver had, or that the next one
will want by its config.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from configs.engine import EngineConfig
from deployments.rank.messages import LoadReport, MeasuredMemory


class Expected(NamedTuple):
    """A start that the next driver is expected to want.

    config, folder: as in `RankActor.join`; digest: theirs. memory: what this rank measured in its
    last start, where num_blocks blocks of cache were allocated; None if there was none.
    """

    config: EngineConfig
    folder: str
    digest: str
    memory: MeasuredMemory | None = None
    num_blocks: int = 0


class StartAhead:
    """Measures, and allocates where the memory is what it was, on a thread of its own."""

    def __init__(
        self,
        expected: Expected,
        measure: Callable[[], MeasuredMemory],
        allocate: Callable[[int, bool], LoadReport],
    ) -> None:
        """Begin; measure, allocate: as in `RankHost`."""
        self._expected = expected
        self._allocate = allocate
        thread = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        self._measured = thread.submit(measure)
        self._allocated = thread.submit(self._allocate_as_before)

    def measured(self, timeout_s: float) -> MeasuredMemory:
        """Wait for the measurement and return it, or raise what went wrong."""
        return self._measured.result(timeout_s)

    def allocated(self, num_blocks: int, record: bool, timeout_s: float) -> LoadReport:
        """Return the report of what is allocated; allocate now where that was not done."""
        report = self._allocated.result(timeout_s)
        if report is None:
            return self._allocate(num_blocks, record)
        assert num_blocks == self._expected.num_blocks, "all ranks have the memory that they had"
        return report

    def _allocate_as_before(self) -> LoadReport | None:
        # Identity: either all ranks return what they were given, or none does.
        if self._measured.result() is not self._expected.memory:
            return None
        return self._allocate(self._expected.num_blocks, False)


def digest_of(config: EngineConfig, folder: str) -> str:
    """Return what a start depends on, beside the machine; config: the ranks'."""
    return hashlib.sha256((config.model_dump_json() + folder).encode()).hexdigest()

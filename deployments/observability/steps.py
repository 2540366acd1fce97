"""Records of the last steps: rows, tokens, adapters and times."""

from collections import deque
from collections.abc import Sequence

import msgspec

from configs.wire.plan import StepPlan, StepResult

_KEPT_STEPS = 8192


class StepRecord(msgspec.Struct, frozen=True):
    """One step.

    num_rows: requests in it.
    num_tokens: computed positions.
    num_sampled: rows that sampled.
    num_adapters: distinct adapters, without the base model.
    num_loads: adapters that it loads to the GPU.
    seconds: from the plan's arrival at rank 0 to its tokens on the host.
    idle_seconds: idle time of the device before the step, also when no request was open.
    captured: whether it replayed a CUDA graph.
    """

    step: int
    num_rows: int
    num_tokens: int
    num_sampled: int
    num_adapters: int
    num_loads: int
    seconds: float
    idle_seconds: float | None = None
    captured: bool = False


def _num_tokens(plan: StepPlan, result: StepResult) -> int:
    """How many positions were computed; rows that follow others sample at each of theirs."""
    known = [row for row in plan.rows if row.follows < 0]
    return len(result.tokens) + sum(row.length - row.num_samples for row in known)


class StepLog:
    """The last steps of one driver; written by the loop's thread, read by any."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=_KEPT_STEPS)
        self._slots: dict[int, int] = {}

    def record(self, plan: StepPlan, result: StepResult) -> None:
        """Add an applied plan."""
        for join in plan.joins:
            self._slots[join.batch_slot] = join.adapter_slot
        slots = {self._slots[row.batch_slot] for row in plan.rows}
        self._records.append(
            StepRecord(
                step=plan.step,
                num_rows=len(plan.rows),
                num_tokens=_num_tokens(plan, result),
                num_sampled=sum(row.samples for row in plan.rows),
                num_adapters=len(slots - {-1}),
                num_loads=len(plan.loads),
                seconds=result.compute_seconds,
                idle_seconds=result.idle_seconds,
                captured=result.captured,
            )
        )

    def last(self) -> Sequence[StepRecord]:
        """The kept steps, oldest first."""
        return list(self._records)

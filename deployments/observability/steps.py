"""What the last steps were: the rows, tokens and adapters that shared each, and its time."""

from collections import deque
from collections.abc import Sequence

import msgspec

from configs.wire.plan import StepPlan, StepResult

_KEPT_STEPS = 8192


class StepRecord(msgspec.Struct, frozen=True):
    """One step: rows, computed tokens, sampled tokens, distinct adapters (base not counted).

    seconds: from the plan's arrival at rank 0 to its tokens on the host. idle_seconds: how long
    the device had nothing to do before the step, which is no loss where no request was open.
    captured: it was a replay of a captured step.
    """

    step: int
    num_rows: int
    num_tokens: int
    num_sampled: int
    num_adapters: int
    num_fills: int
    seconds: float
    idle_seconds: float | None = None
    captured: bool = False


class StepLog:
    """The last steps of one driver; written by the loop's thread, read by any."""

    def __init__(self) -> None:
        """Empty."""
        self._records: deque[StepRecord] = deque(maxlen=_KEPT_STEPS)
        self._slots: dict[int, int] = {}

    def record(self, plan: StepPlan, result: StepResult) -> None:
        """Take an applied plan."""
        for join in plan.joins:
            self._slots[join.batch_slot] = join.adapter_slot
        slots = {self._slots[row.batch_slot] for row in plan.rows}
        self._records.append(
            StepRecord(
                step=plan.step,
                num_rows=len(plan.rows),
                num_tokens=sum(row.length for row in plan.rows),
                num_sampled=sum(row.samples for row in plan.rows),
                num_adapters=len(slots - {-1}),
                num_fills=len(plan.loads),
                seconds=result.compute_seconds,
                idle_seconds=result.idle_seconds,
                captured=result.captured,
            )
        )

    def last(self) -> Sequence[StepRecord]:
        """The kept steps, oldest first."""
        return list(self._records)

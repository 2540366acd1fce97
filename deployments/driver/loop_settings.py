"""What the engine loop is given: its limits, and where its results go."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from configs.engine import RecoveryConfig
from configs.wire.adapters import AdapterKey, FetchedAdapter
from configs.wire.plan import StepPlan, StepResult
from deployments.observability.adapter_records import LoadStage
from scheduler.events import Event


@dataclass(frozen=True)
class LoopSettings:
    """The loop's recovery limits and its callbacks, which it calls on its own thread.

    fetched: an adapter's files; KeyError if it was forgotten.
    emit: takes events.
    fail: ends all open requests with a message.
    applied: takes each plan and its result.
    loaded: takes each stage of an adapter's load and its seconds.
    """

    recovery: RecoveryConfig
    fetched: Callable[[AdapterKey], FetchedAdapter]
    emit: Callable[[Sequence[Event]], None]
    fail: Callable[[str], None]
    applied: Callable[[StepPlan, StepResult], None]
    loaded: Callable[[LoadStage, float], None]

"""Commands that count only once every rank has replied, and the replies so far."""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from msgspec.structs import replace

from configs.wire.adapters import AdapterKey, AdapterRefusal, AdapterShape, FetchedAdapter
from deployments.rank.messages import (
    RankBroken,
    StageAnswer,
    Staged,
    StageDeferred,
    StageFailed,
    StageNeedsSums,
)
from deployments.rank.transport import RankLinks, RanksLost
from scheduler.events import AdapterFailed, AdapterStaged

MAX_SUMS_BYTES = 2**26
"""Of the sums that are kept; an adapter of a model of 8B parameters has 1 MiB."""

K = TypeVar("K")
R = TypeVar("R")


@dataclass
class Pending(Generic[R]):
    """A command that not all ranks have carried out.

    since: when it was sent, in seconds. attempt: the number of a staging. replies: one a rank.
    """

    since: float
    attempt: int = 0
    replies: list[R] = field(default_factory=list)


def collect(pending: dict[K, Pending[R]], key: K, reply: R, num_ranks: int) -> Pending[R] | None:
    """Add a rank's reply; the last rank's removes the command from `pending` and returns it."""
    command = pending[key]
    command.replies.append(reply)
    return pending.pop(key) if len(command.replies) == num_ranks else None


def oldest(pending: Mapping[Any, Pending[Any]]) -> float:
    """When the first of these was sent: dicts keep that order. Infinity if there is none."""
    return next(iter(pending.values())).since if pending else math.inf


def staging_event(answers: Sequence[StageAnswer]) -> AdapterStaged | AdapterFailed:
    """The event of all ranks' answers: staged if it is on all of them, else failed."""
    kept = sum(isinstance(answer, Staged) for answer in answers)
    for answer in answers:
        if isinstance(answer, StageFailed):
            return AdapterFailed(answer.key, answer.refusal, answer.message, partly=kept > 0)
    if any(isinstance(answer, StageNeedsSums) for answer in answers):
        message = "some ranks had its row norms and some had not: try again"
        key, refusal = answers[0].key, AdapterRefusal.UNAVAILABLE
        return AdapterFailed(key, refusal, message, partly=kept > 0)
    shapes = [answer.shape for answer in answers if isinstance(answer, Staged | StageDeferred)]
    shape = AdapterShape(shapes[0].num_pages, max(shape.host_bytes for shape in shapes))
    return AdapterStaged(answers[0].key, shape, kept=kept == len(answers))


class RowSums:
    """What ranks' parts of DoRA adapters' row norms add up to, kept for the next staging."""

    def __init__(self) -> None:
        self._sums: OrderedDict[AdapterKey, bytes] = OrderedDict()

    def given_to(self, adapter: FetchedAdapter) -> FetchedAdapter:
        """Return the adapter with its sums, if they are known."""
        return replace(adapter, row_sums=self._sums.get(adapter.key, b""))

    def add(self, answers: Sequence[StageAnswer]) -> bool:
        """Add the parts, if every rank gave one; the adapter is then to be staged again."""
        parts = [answer.part for answer in answers if isinstance(answer, StageNeedsSums)]
        if len(parts) < len(answers):
            return False
        summed = np.sum([np.frombuffer(part, np.float32) for part in parts], 0, np.float64)
        self._sums[answers[0].key] = summed.astype(np.float32).tobytes()
        while len(self._sums) > 1 and sum(map(len, self._sums.values())) > MAX_SUMS_BYTES:
            self._sums.popitem(last=False)
        return True


def reported_fault(links: RankLinks) -> str | None:
    """The fault that a rank reported before its connection closed, if any."""
    with suppress(RanksLost):
        for report in links.receive(0.0):
            if isinstance(report, RankBroken):
                return f"rank-{report.rank}: {report.message}"
    return None

"""Commands that count only once every rank has replied, and the replies so far."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from configs.wire.adapters import AdapterShape
from deployments.rank.messages import StageAnswer, Staged, StageFailed
from scheduler.events import AdapterFailed, AdapterStaged

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
    shapes = [answer.shape for answer in answers if not isinstance(answer, StageFailed)]
    shape = AdapterShape(shapes[0].num_pages, max(shape.host_bytes for shape in shapes))
    return AdapterStaged(answers[0].key, shape, kept=kept == len(answers))

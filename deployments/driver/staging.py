"""The engine loop's record of an adapter that the ranks are staging."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from configs.wire.adapters import AdapterShape
from deployments.rank.messages import StageAnswer, Staged, StageFailed
from scheduler.events import AdapterFailed, AdapterStaged


@dataclass
class Staging:
    """An adapter that the ranks are staging.

    attempt: the number of this try. since: when it began, in seconds. answers: one a rank so far.
    """

    attempt: int
    since: float
    answers: list[StageAnswer] = field(default_factory=list)


def staging_event(answers: Sequence[StageAnswer]) -> AdapterStaged | AdapterFailed:
    """The event of all ranks' answers: staged if it is on all of them, else failed."""
    kept = sum(isinstance(answer, Staged) for answer in answers)
    for answer in answers:
        if isinstance(answer, StageFailed):
            partly = kept > 0
            return AdapterFailed(answer.key, answer.refusal, answer.message, partly)
    shapes = [answer.shape for answer in answers if not isinstance(answer, StageFailed)]
    shape = AdapterShape(shapes[0].num_pages, max(shape.host_bytes for shape in shapes))
    return AdapterStaged(answers[0].key, shape, kept=kept == len(answers))

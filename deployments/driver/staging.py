"""What the loop knows of an adapter that the ranks were told to stage."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from configs.wire.adapters import AdapterShape
from deployments.rank.messages import StageAnswer, Staged, StageFailed
from scheduler.events import AdapterFailed, AdapterStaged


@dataclass
class Staging:
    """An adapter that the ranks were told to stage, and which of them have answered."""

    attempt: int
    since: float
    answers: list[StageAnswer] = field(default_factory=list)


def staging_event(answers: Sequence[StageAnswer]) -> AdapterStaged | AdapterFailed:
    """What all ranks' answers come to."""
    kept = sum(isinstance(answer, Staged) for answer in answers)
    for answer in answers:
        if isinstance(answer, StageFailed):
            partly = kept > 0
            return AdapterFailed(answer.key, answer.refusal, answer.message, partly)
    shapes = [answer.shape for answer in answers if not isinstance(answer, StageFailed)]
    shape = AdapterShape(shapes[0].num_pages, max(shape.host_bytes for shape in shapes))
    return AdapterStaged(answers[0].key, shape, kept=kept == len(answers))

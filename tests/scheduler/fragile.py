"""Ranks that some requests break, and a stage that makes new ones each time."""

from collections.abc import Callable
from dataclasses import dataclass

from configs.wire.adapters import AdapterKey
from configs.wire.plan import StepPlan, StepResult, StepRow
from scheduler.events import Ended, RanksFailure
from tests.scheduler.automaton import FakeRanks, Occupant
from tests.scheduler.stage import Client, Stage
from tests.strategies import Story


@dataclass(frozen=True)
class PlannedRow:
    """One row of a step and its request."""

    occupant: Occupant
    row: StepRow

    @property
    def prompt(self) -> tuple[int, ...]:
        return tuple(self.occupant.tokens[: self.occupant.prompt_length])

    @property
    def is_prefill(self) -> bool:
        return self.row.length > 1


Breaks = Callable[[list[PlannedRow], StepPlan], bool]
"""Whether a step with these rows breaks the ranks."""


class RanksDown(Exception):
    """They broke."""


class FragileRanks(FakeRanks):
    """Books as ever, until a step breaks them."""

    breaks: Breaks

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        if self.breaks(
            [PlannedRow(self.occupants[row.batch_slot], row) for row in plan.rows], plan
        ):
            raise RanksDown
        return result


class FragileStage(Stage):
    """Loses its ranks at each step that breaks them; guilty: which clients may fail by that.

    damaged: adapters that break the ranks when staged; late: only when it is done.
    """

    def __init__(self, story: Story, breaks: Breaks, guilty: Callable[[Client], bool]) -> None:
        self.breaks = breaks
        self.guilty = guilty
        self.damaged: set[AdapterKey] = set()
        self.late = False
        super().__init__(story)

    def go_round(self) -> None:
        try:
            super().go_round()
        except RanksDown:
            self.lose_group()

    def answer_staging(self) -> None:
        super().answer_staging()
        on_host = self.damaged & self.ranks.host.keys()
        if on_host if self.late else self.damaged & self.staging.keys():
            raise RanksDown

    def check_ended(self, client: Client, event: Ended) -> None:
        super().check_ended(client, event)
        if isinstance(event.ending, RanksFailure):
            assert self.guilty(client), f"{client.id} had to pay for another"

    @property
    def failed(self) -> list[int]:
        """The arrivals that the ranks were lost by, as the scheduler thinks."""
        return [
            index
            for index, client in enumerate(self.clients)
            if client.ended is not None and isinstance(client.ended.ending, RanksFailure)
        ]

    def _new_ranks(self) -> FakeRanks:
        ranks = FragileRanks(
            self.story.capacity, self.story.limits.max_running, self.scheduler.epoch
        )
        ranks.breaks = self.breaks
        return ranks

"""Requests that cross the border of longrope's sets: rows, preemptions and cached blocks."""

from dataclasses import dataclass

import msgspec
import pytest

from configs.rope_sets import LONG, SHORT, RopeSets
from configs.wire.plan import StepPlan, StepResult, StepRow
from scheduler.admission.limits import Limits
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from tests.scheduler.small import capacity, make_request

BORDER = 10


@dataclass
class Recorder:
    """What plans had ranks compute: (position, rope set), in order."""

    scheduler: Scheduler
    rows: list[StepRow]

    def run(self, *requests: Request, ticks: int = 200) -> list[tuple[int, int]]:
        """Serve the requests to their ends; returns what was computed since."""
        for each in requests:
            self.scheduler.add(each, 0.0)
        self.rows.clear()
        flying: list[StepPlan] = []
        for _ in range(ticks):
            plan = self.scheduler.schedule(0.0)
            if not plan.empty:
                flying.append(plan)
                self.rows += plan.rows
            elif flying:
                first = flying.pop(0)
                tokens = [7] * sum(row.samples for row in first.rows)
                self.scheduler.apply(first, StepResult(first.epoch, first.step, tokens), 0.0)
            else:
                break
            self.scheduler.check()
        return [
            (position, row.rope_set)
            for row in self.rows
            for position in range(row.start, row.start + row.length)
        ]


def ranks(*, recompute: bool, **limits: int) -> Recorder:
    room = msgspec.structs.replace(capacity(), rope_sets=RopeSets(BORDER, recompute))
    return Recorder(Scheduler(Limits(**limits), room), [])  # type: ignore[arg-type]


def spelled(*parts: tuple[range, int]) -> list[tuple[int, int]]:
    return [(position, rope_set) for part, rope_set in parts for position in part]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("chunk", [3, 100])
def test_a_prompt_beyond_the_border_is_long_from_its_start(recompute: bool, chunk: int) -> None:
    recorder = ranks(recompute=recompute, max_step_tokens=chunk)
    request = make_request(0, [1] * (BORDER + 1), max_new_tokens=3)
    assert recorder.run(request) == spelled((range(BORDER + 3), LONG))


@pytest.mark.parametrize("recompute", [False, True])
def test_a_sequence_up_to_the_border_is_short(recompute: bool) -> None:
    """Its last token is sampled and never computed."""
    recorder = ranks(recompute=recompute)
    request = make_request(0, [1] * 8, max_new_tokens=3)
    assert recorder.run(request) == spelled((range(BORDER), SHORT))
    assert recorder.scheduler.snapshot().num_preemptions == 0


@pytest.mark.parametrize("prompt", [1, 8, BORDER])
def test_keys_are_kept_and_positions_beyond_the_border_use_the_long_set(prompt: int) -> None:
    recorder = ranks(recompute=False)
    request = make_request(0, [1] * prompt, max_new_tokens=20 - prompt)
    assert recorder.run(request) == spelled((range(BORDER), SHORT), (range(BORDER, 19), LONG))
    assert recorder.scheduler.snapshot().num_preemptions == 0


@pytest.mark.parametrize("prompt", [1, 8, BORDER])
def test_all_positions_are_recomputed_at_the_border(prompt: int) -> None:
    recorder = ranks(recompute=True)
    request = make_request(0, [1] * prompt, max_new_tokens=20 - prompt)
    assert recorder.run(request) == spelled((range(BORDER), SHORT), (range(19), LONG))
    assert recorder.scheduler.snapshot().num_preemptions == 1
    assert len(request.tokens) == 20


@pytest.mark.parametrize("recompute", [False, True])
def test_lost_ranks_get_the_same_rows_again(recompute: bool) -> None:
    """Kept keys are written as before, across the border in one prompt."""
    recorder = ranks(recompute=recompute)
    request = make_request(0, [1] * 8, max_new_tokens=30)
    recorder.run(request, ticks=30)
    assert BORDER + 4 < len(request.tokens) < 38
    recorder.scheduler.group_lost()
    again = recorder.run()
    first = LONG if recompute else SHORT
    assert again == spelled((range(BORDER), first), (range(BORDER, 37), LONG))
    assert all(
        row.start >= BORDER or row.start + row.length <= BORDER for row in recorder.rows
    ) or (recompute)


@pytest.mark.parametrize("recompute", [False, True])
def test_blocks_are_found_by_sequences_of_their_set_alone(recompute: bool) -> None:
    recorder = ranks(recompute=recompute)
    recorder.run(make_request(0, [1] * 9, max_new_tokens=1))
    assert len(recorder.run(make_request(1, [1] * 10, max_new_tokens=1))) == 10 - 8
    assert len(recorder.run(make_request(2, [1] * 20, max_new_tokens=1))) == 20
    assert len(recorder.run(make_request(3, [1] * 21, max_new_tokens=1))) == 21 - 20


def test_a_recomputed_request_leaves_blocks_of_the_long_set() -> None:
    recorder = ranks(recompute=True)
    request = make_request(0, [1] * 8, max_new_tokens=10)
    recorder.run(request)
    assert len(recorder.run(make_request(1, [*request.tokens, 3], max_new_tokens=1))) == 19 - 16


def test_other_requests_continue_while_one_crosses_the_border() -> None:
    recorder = ranks(recompute=True)
    others = [make_request(index, [index] * 3, max_new_tokens=4) for index in (1, 2)]
    long = make_request(3, [9] * 15, max_new_tokens=4)
    recorder.run(make_request(0, [1] * 8, max_new_tokens=10), *others, long)
    assert [len(each.tokens) for each in (*others, long)] == [7, 7, 19]


def test_a_request_that_ends_at_the_border_is_not_recomputed() -> None:
    """Its end is seen while it leaves the ranks."""
    recorder = ranks(recompute=True)
    request = make_request(0, [1] * BORDER, max_new_tokens=9, stop=(7,))
    assert recorder.run(request) == spelled((range(BORDER), SHORT))
    assert not recorder.scheduler.has_work

"""Ranks that cannot cut sequences: whole rows, a budget that still holds, no shared blocks."""

from dataclasses import replace

import msgspec

from configs.wire.plan import Capacity, StepPlan, StepResult
from scheduler.admission.limits import Limits
from scheduler.events import Ended
from scheduler.scheduler import Scheduler
from tests.scheduler.small import capacity, make_request

LIMITS = Limits(max_step_tokens=16, max_running=8)


def whole(num_blocks: int = 100) -> Capacity:
    """What a padded model reports."""
    return msgspec.structs.replace(capacity(num_blocks), chunked=False, prefix_caching=False)


def run(scheduler: Scheduler, plan: StepPlan) -> list[Ended]:
    tokens = [7] * sum(row.samples for row in plan.rows)
    events = scheduler.apply(plan, StepResult(plan.epoch, plan.step, tokens), 0.0)
    scheduler.check()
    return [event for event in events if isinstance(event, Ended)]


def lengths(plan: StepPlan) -> list[int]:
    return [row.length for row in plan.rows]


def test_prompts_share_a_step_within_its_budget() -> None:
    scheduler = Scheduler(LIMITS, whole())
    for index, length in enumerate((10, 5, 9, 16, 3)):
        scheduler.add(make_request(index, [1] * length), 0.0)
    plans = [scheduler.schedule(0.0)]
    assert lengths(plans[0]) == [10, 5]
    plans.append(scheduler.schedule(0.0))
    assert lengths(plans[1]) == [1, 1, 9], "16 more do not fit, and 3 wait"
    run(scheduler, plans[0])
    third = scheduler.schedule(0.0)
    assert lengths(third) == [1, 1, 1, 16], "beside rows that decode, a whole budget goes alone"
    assert all(row.samples for plan in (*plans, third) for row in plan.rows)


def test_a_prompt_beyond_the_budget_is_computed_alone() -> None:
    scheduler = Scheduler(LIMITS, whole())
    for index, length in enumerate((4, 40, 4)):
        scheduler.add(make_request(index, [1] * length), 0.0)
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert lengths(first) == [4]
    assert lengths(second) == [1, 40]
    run(scheduler, first)
    assert lengths(scheduler.schedule(0.0)) == [1, 1, 4]


def test_one_prompt_of_any_length_joins_decoding_rows() -> None:
    scheduler = Scheduler(replace(LIMITS, max_mixed_prompt_tokens=4), whole())
    for index, length in enumerate((16, 9, 3)):
        scheduler.add(make_request(index, [1] * length), 0.0)
    assert lengths(scheduler.schedule(0.0)) == [16]
    assert lengths(scheduler.schedule(0.0)) == [1, 9]


def test_nothing_is_shared_even_after_limits_change() -> None:
    scheduler = Scheduler(LIMITS, whole())
    for limits in (LIMITS, Limits(max_step_tokens=16, max_running=8, prefix_caching=True)):
        scheduler.reconfigure(limits)
        scheduler.add(make_request(limits is LIMITS, [5] * 12, max_new_tokens=1), 0.0)
        plan = scheduler.schedule(0.0)
        assert lengths(plan) == [12]
        (ended,) = run(scheduler, plan)
        assert ended.cached_tokens == 0


def test_a_preempted_sequence_comes_back_whole() -> None:
    """Two grow until blocks are short; the younger is computed again from its first token."""
    scheduler = Scheduler(LIMITS, whole(num_blocks=6))
    for index in range(2):
        scheduler.add(make_request(index, [1 + index] * 8, max_new_tokens=12), 0.0)
    joined: list[int] = []
    ended: list[Ended] = []
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        assert all(row.samples for row in plan.rows)
        starts = {row.batch_slot: (row.start, row.length) for row in plan.rows}
        for join in plan.joins:
            assert starts[join.batch_slot] == (0, len(join.tokens))
            joined.append(len(join.tokens))
        ended += run(scheduler, plan)
    assert [len(event.tokens) for event in ended] == [12, 12]
    assert scheduler.snapshot().num_preemptions == len(joined) - 2 > 0
    assert joined[:2] == [8, 8]
    assert joined[2] > 8

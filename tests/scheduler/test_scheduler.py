"""The scheduler stepped by hand: what exactly is planned, and when things come free."""

from dataclasses import replace

import pytest

from configs.wire.adapters import AdapterKey, AdapterRefusal, AdapterShape
from configs.wire.plan import StepPlan, StepResult, StepRow
from configs.wire.sampling import FinishReason
from scheduler.adapters.resident import AdapterState
from scheduler.admission.limits import InvalidRequest, Limits, Overloaded
from scheduler.events import (
    AdapterFailed,
    AdapterFailure,
    AdapterLoaded,
    AdapterPinned,
    AdapterStaged,
    ClientCancelled,
    Ended,
    NewTokens,
)
from scheduler.scheduler import Scheduler
from tests.scheduler.small import capacity, make_request

SHAPE = AdapterShape((1, 1), 10)


def answer(plan: StepPlan, *tokens: int) -> StepResult:
    """What the ranks say: the given tokens, or 7 for every row that samples."""
    count = sum(row.samples for row in plan.rows)
    return StepResult(plan.epoch, plan.step, list(tokens) if tokens else [7] * count)


def stage_all(scheduler: Scheduler) -> list[AdapterKey]:
    named = scheduler.to_stage()
    for key in named:
        assert scheduler.handle_adapter_event(AdapterStaged(key, SHAPE)) == []
    return named


def fill_all(scheduler: Scheduler) -> list[AdapterKey]:
    """Make the next plan, which has loads alone, and bring its adapters to the device."""
    plan = scheduler.schedule(0.0)
    assert plan.rows == []
    assert scheduler.apply(plan, answer(plan), 0.0) == []
    for load in plan.loads:
        assert scheduler.handle_adapter_event(AdapterLoaded(load.key)) == []
    return [load.key for load in plan.loads]


def lengths(plan: StepPlan) -> list[tuple[int, int, bool]]:
    """(start, length, samples) of each row."""
    return [(row.start, row.length, row.samples) for row in plan.rows]


def test_a_request_joins_with_its_tokens_and_continues_with_short_rows() -> None:
    scheduler = Scheduler(Limits(), capacity())
    scheduler.add(make_request(0, [4, 5, 6], max_new_tokens=3), 1.0)
    first = scheduler.schedule(2.0)
    (join,) = first.joins
    assert (join.tokens, join.prompt_length, join.adapter_slot) == ([4, 5, 6], 3, -1)
    (row,) = first.rows
    assert row == StepRow(join.batch_slot, 0, 3, row.blocks, True)
    assert len(row.blocks) == 1
    second = scheduler.schedule(3.0)
    assert second.joins == []
    assert second.rows == [StepRow(join.batch_slot, 3, 1, [], True)]
    assert scheduler.schedule(4.0).empty, "two plans are in flight"
    events = scheduler.apply(first, answer(first, 8), 5.0)
    assert events == [NewTokens(("r", 0), 0, [8])]
    third = scheduler.schedule(6.0)
    assert lengths(third) == [(4, 1, True)]
    assert len(third.rows[0].blocks) == 1, "a block is taken when its first token comes"
    scheduler.apply(second, answer(second, 9), 7.0)
    assert scheduler.schedule(8.0).empty, "its last permitted token is in flight"
    *_, ended = scheduler.apply(third, answer(third, 10), 9.0)
    assert isinstance(ended, Ended)
    assert (ended.ending, ended.tokens) == (FinishReason.LENGTH, [8, 9, 10])
    assert (ended.first_scheduled, ended.first_token) == (2.0, 5.0)
    assert not scheduler.has_work
    scheduler.check()


def test_a_stop_token_discards_the_row_ahead_before_it_frees() -> None:
    scheduler = Scheduler(Limits(), capacity())
    scheduler.add(make_request(0, max_new_tokens=9, stop=(2,)), 0.0)
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    events = scheduler.apply(first, answer(first, 2), 0.0)
    assert [type(event) for event in events] == [NewTokens, Ended]
    assert scheduler.snapshot().draining == 1
    assert scheduler.snapshot().free_blocks < 100
    assert scheduler.apply(second, answer(second, 5), 0.0) == []
    assert scheduler.snapshot().free_blocks == 100
    assert not scheduler.has_work


def test_a_stop_token_as_the_last_permitted_one_is_reported_as_such() -> None:
    scheduler = Scheduler(Limits(), capacity())
    scheduler.add(make_request(0, max_new_tokens=1, stop=(2,)), 0.0)
    plan = scheduler.schedule(0.0)
    assert scheduler.schedule(0.0).empty
    *_, ended = scheduler.apply(plan, answer(plan, 2), 0.0)
    assert isinstance(ended, Ended)
    assert ended.ending is FinishReason.STOP_TOKEN


def test_long_prompts_are_chunked_behind_running_rows() -> None:
    scheduler = Scheduler(Limits(max_step_tokens=6, max_running=4), capacity())
    scheduler.add(make_request(0, [1, 2], 20), 0.0)
    scheduler.schedule(0.0)
    scheduler.add(make_request(1, [1] * 12, 5), 0.0)
    first = scheduler.schedule(0.0)
    assert lengths(first) == [(2, 1, True), (0, 5, False)]


def test_beside_running_rows_prompts_share_fewer_tokens() -> None:
    limits = Limits(max_step_tokens=20, max_mixed_prompt_tokens=6, max_running=4)
    scheduler = Scheduler(limits, capacity())
    scheduler.add(make_request(0, [1] * 3, 20), 0.0)
    scheduler.add(make_request(1, [2] * 15, 20), 0.0)
    assert lengths(scheduler.schedule(0.0)) == [(0, 3, True), (0, 15, True)], "no request waits"
    scheduler.add(make_request(2, [3] * 4, 5), 0.0)
    scheduler.add(make_request(3, [4] * 9, 5), 0.0)
    second = scheduler.schedule(0.0)
    assert lengths(second) == [(3, 1, True), (15, 1, True), (0, 4, True), (0, 2, False)]
    scheduler.reconfigure(replace(limits, max_mixed_prompt_tokens=20, steps_ahead=3))
    assert lengths(scheduler.schedule(0.0))[-1] == (2, 7, True)
    scheduler.check()


def test_only_the_last_chunk_samples() -> None:
    scheduler = Scheduler(Limits(max_step_tokens=5, steps_ahead=9), capacity())
    scheduler.add(make_request(0, [1] * 12, 5), 0.0)
    plans = [scheduler.schedule(0.0) for _ in range(4)]
    chunks = [lengths(plan)[0] for plan in plans]
    assert chunks == [(0, 5, False), (5, 5, False), (10, 2, True), (12, 1, True)]
    assert [scheduler.apply(plan, answer(plan), 0.0) for plan in plans[:2]] == [[], []]


def test_the_youngest_is_preempted_and_resumes_with_its_tokens() -> None:
    scheduler = Scheduler(Limits(steps_ahead=1, prefix_caching=False), capacity(num_blocks=4))
    scheduler.add(make_request(0, [1] * 4, 8), 0.0)
    scheduler.add(make_request(1, [2] * 4, 8), 0.0)
    for _ in range(5):
        plan = scheduler.schedule(0.0)
        assert len(plan.rows) == 2
        scheduler.apply(plan, answer(plan), 0.0)
    plan = scheduler.schedule(0.0)
    assert lengths(plan) == [(8, 1, True)]
    assert scheduler.snapshot().num_preemptions == 1
    assert scheduler.snapshot().queued == 1
    while not plan.joins:
        scheduler.apply(plan, answer(plan), 0.0)
        scheduler.check()
        plan = scheduler.schedule(0.0)
    (join,) = plan.joins
    assert (join.tokens, join.prompt_length) == ([2] * 4 + [7] * 5, 4)
    assert lengths(plan) == [(0, 9, True)], "recomputed as one prefill; the last position samples"


def test_a_preempted_request_still_gets_its_token_in_flight() -> None:
    scheduler = Scheduler(Limits(prefix_caching=False), capacity(num_blocks=4))
    scheduler.add(make_request(0, [1] * 4, 8), 0.0)
    scheduler.add(make_request(1, [2] * 4, 8), 0.0)
    flights = [scheduler.schedule(0.0)]
    while scheduler.snapshot().num_preemptions == 0:
        plan = scheduler.schedule(0.0)
        flights += [] if plan.empty else [plan]
        oldest = flights.pop(0)
        events = scheduler.apply(oldest, answer(oldest), 0.0)
        scheduler.check()
    assert [event.request_id[1] for event in events] == [0, 1]
    assert flights == [], "the older one pauses until the blocks are its own"
    assert (scheduler.snapshot().draining, scheduler.snapshot().queued) == (0, 1)
    plan = scheduler.schedule(0.0)
    assert lengths(plan) == [(8, 1, True)]


def test_a_prefix_is_computed_once_and_the_saving_is_reported() -> None:
    scheduler = Scheduler(Limits(steps_ahead=1), capacity())
    prompt = list(range(10))
    for index in range(2):
        scheduler.add(make_request(index, prompt, 1), 0.0)
        plan = scheduler.schedule(0.0)
        *_, ended = scheduler.apply(plan, answer(plan), 0.0)
        assert isinstance(ended, Ended)
        assert ended.cached_tokens == (0, 8)[index]
    assert lengths(plan) == [(8, 2, True)]
    assert len(plan.rows[0].blocks) == 3
    assert scheduler.snapshot().num_cached_tokens == 8


def test_a_prefix_of_requests_that_arrive_together_is_computed_once() -> None:
    scheduler = Scheduler(Limits(max_step_tokens=16, steps_ahead=2), capacity())
    for index in range(4):
        scheduler.add(make_request(index, [*range(18), 90 + index], 2), 0.0)
    plans = [scheduler.schedule(0.0) for _ in range(2)]
    assert lengths(plans[0]) == [(0, 16, False)]
    # The first one's step is in flight still, and the others' rest is in one step with its own.
    assert lengths(plans[1]) == [(16, 3, True)] * 4
    assert {tuple(row.blocks[:4]) for row in plans[1].rows[1:]} == {tuple(plans[0].rows[0].blocks)}
    for plan in plans:
        scheduler.apply(plan, answer(plan), 0.0)
    scheduler.check()
    assert scheduler.snapshot().num_cached_tokens == 3 * 16


def test_waiting_for_an_adapter_delays_no_other_request() -> None:
    scheduler = Scheduler(Limits(), capacity())
    scheduler.add(make_request(0, adapter=1), 0.0)
    scheduler.add(make_request(1, adapter=2), 0.0)
    scheduler.add(make_request(2), 0.0)
    assert scheduler.to_stage() == [1, 2]
    scheduler.handle_adapter_event(AdapterStaged(AdapterKey(2), SHAPE))
    first = scheduler.schedule(0.0)
    assert [join.tokens[0] for join in first.joins] == [3]
    assert [load.key for load in first.loads] == [2]
    second = scheduler.schedule(0.0)
    assert second.joins == [], "no row waits for bytes that are on their way"
    scheduler.apply(first, answer(first), 0.0)
    scheduler.handle_adapter_event(AdapterLoaded(AdapterKey(2)))
    plan = scheduler.schedule(0.0)
    assert [join.tokens[0] for join in plan.joins] == [2]
    assert plan.joins[0].adapter_slot == first.loads[0].slot
    assert scheduler.adapter_states()[AdapterKey(1)] is AdapterState.STAGING


def test_an_adapter_is_loaded_before_its_request_is_next() -> None:
    """While a long prompt takes every token of the budget, the next one's bytes travel."""
    scheduler = Scheduler(Limits(max_step_tokens=4, max_running=4), capacity())
    scheduler.add(make_request(0, [1] * 40), 0.0)
    scheduler.add(make_request(1, adapter=1), 0.0)
    stage_all(scheduler)
    plan = scheduler.schedule(0.0)
    assert lengths(plan) == [(0, 4, False)]
    assert [load.key for load in plan.loads] == [1]


def test_a_load_delays_no_request_of_a_loaded_adapter() -> None:
    scheduler = Scheduler(Limits(max_running=1), capacity(adapter_slots=1))
    scheduler.add(make_request(0, adapter=1), 0.0)
    stage_all(scheduler)
    assert fill_all(scheduler) == [1]
    scheduler.add(make_request(1, adapter=2), 0.0)
    stage_all(scheduler)
    plan = scheduler.schedule(0.0)
    assert (plan.loads, len(plan.joins)) == ([], 1)


def test_a_failed_adapter_ends_its_requests_and_the_next_one_tries_again() -> None:
    scheduler = Scheduler(Limits(), capacity())
    for index in range(2):
        scheduler.add(make_request(index, adapter=1), 0.0)
    scheduler.add(make_request(2, adapter=2), 0.0)
    scheduler.to_stage()
    failed = AdapterFailed(AdapterKey(1), AdapterRefusal.NOT_FOUND, "no such folder")
    events = scheduler.handle_adapter_event(failed)
    expected = AdapterFailure(AdapterRefusal.NOT_FOUND, "no such folder")
    assert [event.ending for event in events if isinstance(event, Ended)] == [expected] * 2
    scheduler.add(make_request(3, adapter=1), 0.0)
    assert scheduler.to_stage() == [1]


def test_an_adapter_without_room_waits_until_the_others_requests_end() -> None:
    scheduler = Scheduler(Limits(steps_ahead=1), capacity(adapter_slots=1))
    scheduler.add(make_request(0, max_new_tokens=2, adapter=1), 0.0)
    scheduler.add(make_request(1, max_new_tokens=2, adapter=2), 0.0)
    stage_all(scheduler)
    loaded = []
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        loaded.append([load.key for load in plan.loads])
        scheduler.apply(plan, answer(plan), 0.0)
        for load in plan.loads:
            scheduler.handle_adapter_event(AdapterLoaded(load.key))
        scheduler.check()
    assert loaded == [[1], [], [], [2], [], []]


def test_a_pinned_adapter_is_loaded_by_a_plan_without_rows() -> None:
    scheduler = Scheduler(Limits(), capacity())
    scheduler.handle_adapter_event(AdapterPinned(AdapterKey(1), True))
    assert stage_all(scheduler) == [1]
    assert scheduler.has_work
    assert fill_all(scheduler) == [1]
    assert not scheduler.has_work
    assert scheduler.adapter_states() == {1: AdapterState.DEVICE}


def test_a_stop_string_cuts_what_ran_on() -> None:
    scheduler = Scheduler(Limits(), capacity())
    scheduler.add(make_request(0, max_new_tokens=9), 0.0)
    flights = [scheduler.schedule(0.0), scheduler.schedule(0.0)]
    for token in (1, 2, 3):
        plan = flights.pop(0)
        scheduler.apply(plan, answer(plan, token), 0.0)
        flights.append(scheduler.schedule(0.0))
    (ended,) = scheduler.finish(("r", 0), 2)
    assert isinstance(ended, Ended)
    assert (ended.ending, ended.tokens) == (FinishReason.STOP_STRING, [1, 2])
    assert scheduler.finish(("r", 0), 2) == [], "it has ended: nothing more to say"
    for plan in flights:
        assert scheduler.apply(plan, answer(plan, 5), 0.0) == []
    assert not scheduler.has_work


@pytest.mark.parametrize("steps", range(6))
def test_a_cancelled_request_is_gone_within_two_steps(steps: int) -> None:
    scheduler = Scheduler(Limits(max_step_tokens=4, max_running=4), capacity())
    scheduler.add(make_request(0, [1] * 9, 9, adapter=1), 0.0)
    flights = []
    for step in range(steps):
        if step == 1:
            stage_all(scheduler)
        flights.append(scheduler.schedule(0.0))
        for load in flights[-1].loads:
            scheduler.handle_adapter_event(AdapterLoaded(load.key))
        if len(flights) == 2 and not flights[0].empty:
            plan = flights.pop(0)
            scheduler.apply(plan, answer(plan), 0.0)
        flights = [plan for plan in flights if not plan.empty]
    (ended,) = scheduler.cancel(("r", 0))
    assert isinstance(ended, Ended)
    assert ended.ending == ClientCancelled()
    assert scheduler.cancel(("r", 0)) == []
    assert len(flights) <= 2
    for plan in flights:
        assert scheduler.apply(plan, answer(plan), 0.0) == []
    scheduler.check()
    snapshot = scheduler.snapshot()
    assert (snapshot.free_blocks, snapshot.running, snapshot.draining) == (100, 0, 0)


def test_after_a_loss_all_requests_resume_with_their_tokens() -> None:
    scheduler = Scheduler(Limits(), capacity())
    scheduler.add(make_request(0, [1, 2], 9, adapter=1), 0.0)
    stage_all(scheduler)
    fill_all(scheduler)
    scheduler.add(make_request(1, [3], 9), 0.0)
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    scheduler.apply(first, answer(first, 8, 9), 0.0)
    assert scheduler.group_lost() == []
    scheduler.check()
    assert scheduler.apply(second, answer(second), 0.0) == [], "the old epoch is over"
    assert scheduler.snapshot().free_blocks == 100
    scheduler.handle_adapter_event(AdapterLoaded(AdapterKey(1)))
    assert scheduler.adapter_states() == {1: AdapterState.DISK}
    assert stage_all(scheduler) == [1]
    plans = [scheduler.schedule(0.0)]
    assert plans[0].epoch == 1
    assert [load.key for load in plans[0].loads] == [1]
    scheduler.handle_adapter_event(AdapterLoaded(AdapterKey(1)))
    plans.append(scheduler.schedule(0.0))
    assert [join.tokens for plan in plans for join in plan.joins] == [[3, 9], [1, 2, 8]]


def test_too_many_waiting_are_refused_for_now() -> None:
    scheduler = Scheduler(Limits(max_running=1, max_queued=2), capacity())
    for index in range(3):
        scheduler.add(make_request(index), 0.0)
    with pytest.raises(Overloaded) as refused:
        scheduler.add(make_request(3), 0.0)
    assert refused.value.retry_after_s >= 1.0
    scheduler.schedule(0.0)
    with pytest.raises(Overloaded):
        scheduler.add(make_request(3), 0.0)
    scheduler.cancel(("r", 1))
    scheduler.add(make_request(3), 0.0)
    scheduler.check()


def test_what_can_never_run_and_what_already_runs_is_refused() -> None:
    scheduler = Scheduler(Limits(), capacity())
    with pytest.raises(InvalidRequest, match="at most 200"):
        scheduler.add(make_request(0, [1] * 200), 0.0)
    scheduler.add(make_request(0), 0.0)
    with pytest.raises(InvalidRequest, match="already"):
        scheduler.add(make_request(0), 0.0)


def test_other_limits_hold_from_the_next_step_on() -> None:
    scheduler = Scheduler(Limits(max_running=4, steps_ahead=1), capacity())
    for index in range(4):
        scheduler.add(make_request(index, max_new_tokens=3), 0.0)
    scheduler.reconfigure(Limits(max_running=2, steps_ahead=1, prefix_caching=False))
    plan = scheduler.schedule(0.0)
    assert len(plan.rows) == 2
    scheduler.reconfigure(Limits(max_running=9, steps_ahead=1))
    scheduler.apply(plan, answer(plan), 0.0)
    assert len(scheduler.schedule(0.0).rows) == 4
    scheduler.check()


def test_results_must_come_in_order() -> None:
    scheduler = Scheduler(Limits(), capacity())
    scheduler.add(make_request(0), 0.0)
    scheduler.schedule(0.0)
    second = scheduler.schedule(0.0)
    with pytest.raises(AssertionError):
        scheduler.apply(second, answer(second), 0.0)


def test_the_snapshot_counts() -> None:
    scheduler = Scheduler(Limits(max_running=1), capacity())
    scheduler.add(make_request(0, [1] * 5, 9, adapter=1), 0.0)
    scheduler.add(make_request(1), 0.0)
    stage_all(scheduler)
    scheduler.schedule(0.0)
    snapshot = scheduler.snapshot()
    assert (snapshot.queued, snapshot.running, snapshot.plans_in_flight) == (1, 1, 1)
    assert snapshot.adapters[AdapterState.LOADING] == 1
    plan = scheduler.schedule(0.0)
    assert (snapshot.num_steps, scheduler.snapshot().num_steps) == (1, 2 - plan.empty)

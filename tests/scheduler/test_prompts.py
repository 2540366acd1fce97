"""Requests for prompt logprobs or embeddings, and those that generate nothing."""

import pytest

from configs.wire.plan import PromptReport, StepPlan, StepResult, TokenLogprobs
from configs.wire.sampling import FinishReason, Pooling, Sampling, Stopping
from scheduler.admission.limits import InvalidRequest, Limits
from scheduler.events import Ended
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from tests.scheduler.small import capacity, make_request

SCORED = Sampling(prompt_logprobs=0)


def scored(
    index: int, length: int, new: int = 0, sampling: Sampling = SCORED, first: int = 1
) -> Request:
    prompt = [(first + i) % 50 for i in range(length)]
    return Request(("r", index), prompt, sampling, Stopping(new))


def replied(plan: StepPlan, lengths: dict[int, int]) -> StepResult:
    """What ranks reply; a token's logprob is its position. lengths: of prompts, by batch slot."""
    reports = []
    for index, row in enumerate(plan.rows):
        end = min(row.start + row.length, lengths.get(row.batch_slot, 0) - 1)
        found = [TokenLogprobs(-float(i), [], []) for i in range(row.start + 1, end + 1)]
        if found:
            reports.append(PromptReport(index, row.start + 1, found))
    tokens = [7 for row in plan.rows if row.samples]
    return StepResult(plan.epoch, plan.step, tokens, reports=reports)


def positions(ended: object) -> list[float]:
    assert isinstance(ended, Ended)
    assert ended.prompt_logprobs is not None
    return [-found.logprob for found in ended.prompt_logprobs]


@pytest.mark.parametrize("length", [1, 5, 6, 10, 11])
def test_a_prompt_is_scored_in_chunks_and_generates_nothing(length: int) -> None:
    scheduler = Scheduler(Limits(max_step_tokens=5), capacity())
    scheduler.add(scored(0, length), 0.0)
    events = []
    rows = []
    while not (plan := scheduler.schedule(0.0)).empty:
        ahead = scheduler.schedule(0.0)
        for each in [plan] if ahead.empty else [plan, ahead]:
            rows += [(row.start, row.length, row.samples) for row in each.rows]
            events += scheduler.apply(each, replied(each, {0: length}), 0.0)
    assert rows == [(i, min(5, length - i), False) for i in range(0, length, 5)]
    (ended,) = events
    assert isinstance(ended, Ended)
    assert positions(ended) == list(range(1, length))
    assert (ended.ending, ended.tokens) == (FinishReason.LENGTH, [])
    assert not scheduler.has_work
    scheduler.check()


def test_a_request_without_reports_and_new_tokens_ends() -> None:
    scheduler = Scheduler(Limits(), capacity())
    scheduler.add(scored(0, 4, sampling=Sampling()), 0.0)
    plan = scheduler.schedule(0.0)
    (ended,) = scheduler.apply(plan, replied(plan, {}), 0.0)
    assert isinstance(ended, Ended)
    assert (ended.tokens, ended.prompt_logprobs, ended.embedding) == ([], None, b"")


@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.SCORE])
def test_what_reads_the_last_token_alone_reads_the_prefix_cache(pooling: Pooling) -> None:
    scheduler = Scheduler(Limits(), capacity())
    starts = []
    for index in range(2):
        scheduler.add(scored(index, 9, sampling=Sampling(pooling=pooling)), 0.0)
        plan = scheduler.schedule(0.0)
        starts += [row.start for row in plan.rows]
        assert plan.joins[0].sampling.pooling is pooling
        report = PromptReport(0, embedding=b"1234")
        (ended,) = scheduler.apply(plan, StepResult(plan.epoch, plan.step, [], reports=[report]), 0)
        assert isinstance(ended, Ended)
        assert ended.embedding == b"1234"
    assert starts == [0, 8], "whole blocks, and never the last token"


def test_the_prefix_cache_is_written_but_not_read() -> None:
    scheduler = Scheduler(Limits(), capacity())
    for index, sampling in enumerate([Sampling(), SCORED, Sampling(pooling=Pooling.MEAN)]):
        scheduler.add(scored(index, 9, sampling=sampling), 0.0)
        plan = scheduler.schedule(0.0)
        assert [row.start for row in plan.rows] == [0]
        scheduler.apply(plan, replied(plan, {0: 9}), 0.0)
    scheduler.add(scored(3, 9, sampling=SCORED, first=20), 0.0)
    plan = scheduler.schedule(0.0)
    scheduler.apply(plan, replied(plan, {plan.rows[0].batch_slot: 9}), 0.0)
    scheduler.add(scored(4, 9, sampling=Sampling(), first=20), 0.0)
    assert [row.start for row in scheduler.schedule(0.0).rows] == [8]


def test_a_report_is_not_requested_again_after_a_preemption() -> None:
    """It resumes with its tokens: its prompt is not reported again, and cached blocks serve it."""
    scheduler = Scheduler(Limits(steps_ahead=1), capacity(num_blocks=5))
    scheduler.add(make_request(0, [1] * 6, 9), 0.0)
    scheduler.add(scored(1, 6, new=8), 0.0)
    joins, events = [], []
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        joins += [join for join in plan.joins if join.tokens[0] == 1 and join.tokens[1] == 2]
        lengths = {join.batch_slot: 6 for join in joins if join.sampling.prompt_logprobs >= 0}
        events += scheduler.apply(plan, replied(plan, lengths), 0.0)
        scheduler.check()
    request = [join.sampling.prompt_logprobs for join in joins]
    assert request == [0, -1], "preempted once, after its prompt"
    (ended,) = [event for event in events if isinstance(event, Ended) and event.request_id[1] == 1]
    assert positions(ended) == [1, 2, 3, 4, 5]
    assert len(ended.tokens) == 8


def test_a_loss_of_the_ranks_reports_nothing_twice() -> None:
    scheduler = Scheduler(Limits(max_step_tokens=4, steps_ahead=1), capacity())
    scheduler.add(scored(0, 10), 0.0)
    plan = scheduler.schedule(0.0)
    scheduler.apply(plan, replied(plan, {0: 10}), 0.0)
    scheduler.schedule(0.0)
    scheduler.group_lost()
    events, starts = [], []
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        starts += [row.start for row in plan.rows]
        assert all(join.sampling == SCORED for join in plan.joins)
        events += scheduler.apply(plan, replied(plan, {0: 10}), 0.0)
    assert starts == [0, 4, 8]
    assert positions(events[-1]) == list(range(1, 10))


def test_what_can_never_be_served_is_refused() -> None:
    scheduler = Scheduler(Limits(), capacity(num_blocks=4))
    with pytest.raises(InvalidRequest, match="a prompt alone; set max_new_tokens to 0"):
        scheduler.add(scored(0, 4, new=1, sampling=Sampling(pooling=Pooling.MEAN)), 0.0)
    with pytest.raises(InvalidRequest, match="17 prompt tokens and max_new_tokens 0 do not fit"):
        scheduler.add(scored(0, 17), 0.0)
    scheduler.add(scored(0, 16), 0.0)
    plan = scheduler.schedule(0.0)
    (ended,) = scheduler.apply(plan, replied(plan, {0: 16}), 0.0)
    assert positions(ended) == list(range(1, 16))

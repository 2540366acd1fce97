"""Drafts: where they come from, what becomes of them, and that they change no token."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from configs.wire.plan import Capacity, StepPlan, StepResult
from configs.wire.sampling import FinishReason, Sampling, Stopping
from scheduler import drafts
from scheduler.admission.limits import Limits
from scheduler.drafts import LONGEST_REST, Drafter
from scheduler.events import Ended, NewTokens, RequestEvent
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from tests.scheduler import automaton
from tests.scheduler.stage import play
from tests.strategies import Story, stories

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
"""Its end is its beginning: 4, 5, 6 … is the draft."""


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(stories())
def test_every_story_ends_well_with_drafts(story: Story) -> None:
    """Most tokens are fours, so that drafts are found early, and many of them are right."""
    limits = replace(story.limits, max_draft_tokens=4, max_drafting=6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafts, "MATCH", 1)
        patch.setattr(drafts, "LEAST_ALONE", 0.0)
        patch.setattr(drafts, "LEAST_BESIDE", 0.0)
        patch.setattr(automaton, "next_token", lambda state: 3 + (hash((state, 99)) % 6 > 0))
        play(replace(story, limits=limits))


class World:
    """A scheduler over ranks that sample what a test says."""

    def __init__(self, max_drafting: int = 8) -> None:
        capacity = Capacity(100, 4, (), 0, 1, 0, 100)
        limits = Limits(max_draft_tokens=4, max_drafting=max_drafting)
        self.scheduler = Scheduler(limits, capacity)

    def add(self, index: int = 0, sampling: Sampling | None = None, most: int = 30) -> Request:
        stopping = Stopping(most, (99,))
        request = Request(("r", index), list(PROMPT), sampling or Sampling(), stopping)
        self.scheduler.add(request, 0.0)
        return request

    def plan(self) -> StepPlan:
        plan = self.scheduler.schedule(0.0)
        self.scheduler.check()
        return plan

    def apply(self, plan: StepPlan, *tokens: int) -> list[RequestEvent]:
        result = StepResult(plan.epoch, plan.step, list(tokens))
        events = self.scheduler.apply(plan, result, 0.0)
        self.scheduler.check()
        return events

    def drafted(self) -> StepPlan:
        """The first plan with a draft: it also guesses the prefill's token, and does not wait."""
        prefill, plan = self.plan(), self.plan()
        self.apply(prefill, 4)
        return plan


def test_a_draft_is_taken_up_to_the_first_wrong_token() -> None:
    world = World()
    request = world.add()
    plan = world.drafted()
    [row] = plan.rows
    assert (row.start, row.length, row.drafts, row.num_samples) == (12, 5, (5, 6, 7, 8), 5)
    assert world.plan().empty, "how many tokens come is not known"
    [event] = world.apply(plan, 5, 6, 70, 80, 90)
    assert isinstance(event, NewTokens)
    assert (event.start, event.tokens) == (1, [5, 6, 70])
    assert request.skipped == [2, 3]
    assert (request.computed, request.scheduled, request.total) == (15, 15, 16)
    assert world.plan().rows[0].start == 15, "the wrong tokens' keys are overwritten"


def test_an_answer_ends_within_a_draft() -> None:
    world = World()
    request = world.add()
    events = world.apply(world.drafted(), 5, 99, 7, 8, 9)
    assert isinstance(events[-1], Ended)
    assert events[-1].ending is FinishReason.STOP_TOKEN
    assert (events[-1].tokens, events[-1].skipped) == ([4, 5, 99], [2])
    assert events[-1].num_drafted == 4
    assert not request.tables


def test_a_draft_is_no_longer_than_the_answer() -> None:
    world = World()
    world.add(most=3)
    plan = world.drafted()
    assert plan.rows[0].drafts == (5,), "one token more comes after it"
    *_, ended = world.apply(plan, 5, 6)
    assert isinstance(ended, Ended)
    assert ended.ending is FinishReason.LENGTH


def test_a_stop_string_cuts_what_a_draft_brought() -> None:
    world = World()
    world.add()
    world.apply(world.drafted(), 5, 6, 7, 8, 10)
    [ended] = world.scheduler.finish(("r", 0), 3)
    assert isinstance(ended, Ended)
    assert (ended.tokens, ended.skipped) == ([4, 5, 6], [2])


def test_nothing_is_drafted_under_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "LEAST_BESIDE", 0.0)
    world = World()
    world.add()
    world.add(1, Sampling(grammar="start: /a*/"))
    world.scheduler._matchers.is_ready = lambda request: True  # type: ignore[method-assign]
    assert len(world.plan().rows) == 2
    assert [len(row.drafts) for row in world.plan().rows] == [4, 0]


def test_a_row_behind_a_draft_counts_only_if_that_was_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside others a request does not wait for the check of its draft."""
    monkeypatch.setattr(drafts, "LEAST_BESIDE", 0.0)
    world = World()
    request = world.add()
    world.add(1)
    first, second = world.plan(), world.plan()
    world.apply(first, 4, 4)
    third = world.plan()
    assert [(row.start, row.drafts) for row in third.rows] == [(17, (1, 2, 3, 4))] * 2
    events = world.apply(second, 5, 6, 7, 8, 9, 5, 66, 7, 8, 9)
    assert [each.tokens for each in events if isinstance(each, NewTokens)] == [
        [5, 6, 7, 8, 9],
        [5, 66],
    ]
    fourth = world.plan()
    assert [row.start for row in fourth.rows] == [22, 14], "the second begins behind the 66"
    [event] = world.apply(third, 1, 2, 33, 4, 5, 1, 2, 3, 4, 5)
    assert isinstance(event, NewTokens)
    assert (event.request_id, event.tokens) == (request.id, [1, 2, 33])
    world.apply(fourth, *[7] * sum(row.num_samples for row in fourth.rows))


def test_nothing_is_drafted_where_many_run() -> None:
    world = World(max_drafting=1)
    for index in range(2):
        world.add(index)
    first = world.plan()
    second = world.plan()
    assert [row.length for row in second.rows] == [1, 1], "they run ahead"
    world.apply(first, 4, 4)
    assert [row.drafts for row in world.plan().rows] == [(), ()]


def test_the_newest_occurrence_is_continued() -> None:
    find = Drafter().find
    assert find([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], 2) == (5, 1)
    assert Drafter().find([1, 2, 3, 4, 5], 2) == ()
    assert Drafter().find([7, 7, 7, 7], 3) == (7, 7, 7), "a repetition goes on"
    assert Drafter().find([0, 1, 2, 3, 1, 2, 3], 7) == (1, 2, 3, 1, 2, 3, 1)
    assert find([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], 2, (5, 1, 2, 3)) == (5, 1)


def test_only_whole_tokens_are_occurrences() -> None:
    """The bytes of 1, 1, 1 are in those of 256s, one byte later."""
    assert Drafter().find([256] * 9 + [1, 1, 1], 2) == ()
    assert Drafter().find([1, 1, 1, 5] + [256] * 4 + [1, 1, 1], 2) == (5, 256)


def test_a_text_grows_behind_what_is_known() -> None:
    drafter, tokens = Drafter(), [1, 2, 3, 4]
    assert drafter.find(tokens, 2) == ()
    tokens += [1, 2, 3]
    assert drafter.find(tokens, 2) == (4, 1)


def test_drafts_follow_what_is_accepted() -> None:
    good, bad = Drafter(), Drafter()
    for _ in range(9):
        good.verified(8, 8)
        bad.verified(8, 0)
    assert good.length(100, alone=False) > 8
    assert bad.length(100, alone=True) == 0, "it rests"
    assert bad.length(131, alone=True) == 0
    assert bad.length(132, alone=True) == 2, "then it tries again, with less"
    bad.verified(2, 0)
    assert bad.length(133, alone=True) == 0
    assert bad.length(133 + 63, alone=True) == 0, "it rests longer each time"
    tries = 0
    for total in range(1000, 9000):
        if bad.length(total, alone=True):
            bad.verified(2, 0)
            tries += 1
    assert 8000 / LONGEST_REST - 8 < tries < 8000 / LONGEST_REST + 8, "but not for ever"

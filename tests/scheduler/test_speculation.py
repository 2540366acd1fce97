"""Drafts: where they come from, what becomes of them, and that they change no token."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import sampled_from
from msgspec.structs import replace as with_fields

from configs.rope_sets import RopeSets
from configs.wire.plan import Capacity, StepPlan, StepResult, StepRow
from configs.wire.sampling import FinishReason, Sampling, Stopping
from scheduler import speculation
from scheduler.admission.limits import Limits
from scheduler.draft_costs import LEAST_RATIO, DraftCosts
from scheduler.drafts import LONGEST_REST, Drafter
from scheduler.events import Ended, NewTokens, RequestEvent
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from scheduler.speculation import Drafting
from scheduler.step import StepBuilder
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
@given(stories(), sampled_from([None, 3]))
def test_every_story_ends_well_with_drafts(story: Story, heads: int | None) -> None:
    """Most tokens are fours, so that drafts are found early, and many of them are right."""
    limits = replace(story.limits, max_draft_tokens=4, max_drafting=6)
    story = replace(story, capacity=with_fields(story.capacity, draft_heads=heads))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scheduler.drafts.MATCH", 1)
        patch.setattr(speculation, "MARGIN", 0.0)
        patch.setattr(speculation, "SURE", 0.1)
        patch.setattr(automaton, "next_token", lambda state: 3 + (hash((state, 99)) % 6 > 0))
        play(replace(story, limits=limits))


class World:
    """A scheduler over ranks that sample, and guess, what a test says."""

    def __init__(
        self,
        max_drafting: int = 8,
        max_draft_tokens: int = 4,
        draft_heads: int | None = None,
        prompt: Sequence[int] = PROMPT,
        num_blocks: int = 100,
        steps_ahead: int = 2,
        rope_sets: RopeSets | None = None,
    ) -> None:
        capacity = Capacity(
            num_blocks, 4, (), 0, 1, 0, 100, draft_heads=draft_heads, rope_sets=rope_sets
        )
        limits = Limits(
            max_draft_tokens=max_draft_tokens, max_drafting=max_drafting, steps_ahead=steps_ahead
        )
        self.scheduler = Scheduler(limits, capacity)
        self._prompt = prompt

    def add(self, index: int = 0, sampling: Sampling | None = None, most: int = 30) -> Request:
        stopping = Stopping(most, (99,))
        request = Request(("r", index), list(self._prompt), sampling or Sampling(), stopping)
        self.scheduler.add(request, 0.0)
        return request

    def plan(self) -> StepPlan:
        plan = self.scheduler.schedule(0.0)
        self.scheduler.check()
        return plan

    def rows(self, plan: StepPlan) -> list[StepRow]:
        """The rows of a plan in flight, settled where they follow others."""
        [step] = [step for step in self.scheduler._flights if step.number == plan.step]
        return step.rows

    def apply(
        self, plan: StepPlan, *tokens: int, guesses: list[list[int]] | None = None
    ) -> list[RequestEvent]:
        result = StepResult(plan.epoch, plan.step, list(tokens), guesses=guesses)
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


def test_requests_under_a_grammar_get_drafts_until_its_matcher_met_its_limits() -> None:
    world = World()
    world.add()
    constrained = world.add(1, Sampling(grammar="start: /a*/"))
    world.scheduler._matchers.is_ready = lambda request: True  # type: ignore[method-assign]
    first, second = world.plan(), world.plan()
    assert [len(row.drafts) for row in second.rows] == [4, 4]
    world.apply(first, 4, 4)
    constrained.own_matcher = True
    world.apply(second, *[5, 6, 7, 8, 9] * 2)
    assert [len(row.drafts) for row in world.plan().rows] == [4, 0]


def test_a_row_behind_a_draft_counts_only_if_that_was_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request does not wait for the check of a draft that will probably be right."""
    monkeypatch.setattr(speculation, "SURE", 0.0)
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


def test_chances_follow_what_is_accepted() -> None:
    good, bad = Drafter(), Drafter()
    for _ in range(9):
        good.verified(8, 8)
    assert good.chance**8 > speculation.SURE
    assert good.expected(8) > 7
    good.verified(8, 5)
    assert good.chance**8 < speculation.SURE
    for _ in range(2):
        bad.verified(8, 0)
    known = bad.chance
    for total in (100, 131):
        bad.expect_again(total)
        assert bad.chance == known < 0.2
    bad.expect_again(132)
    assert bad.expected(2) > 0.5, "after a while more is expected again"
    tries = 0
    for total in range(1000, 9000):
        bad.expect_again(total)
        if bad.expected(2) > 0.25:
            bad.verified(2, 0)
            tries += 1
    assert 8000 / LONGEST_REST - 8 < tries < 8000 / LONGEST_REST + 8, "less and less often"


class Series:
    """Steps of some rows, one after the other, each of them launched behind the one before."""

    def __init__(self, rows: int) -> None:
        self.costs = DraftCosts()
        self.now = 1.0
        self._requests = [Request(("r", i), [1], Sampling(), Stopping(9)) for i in range(rows)]

    def apply(
        self, seconds: float, draft_length: int = 0, prompt: int = 0, waits: bool = False
    ) -> None:
        step = StepBuilder(1000, self.now - seconds / 2)
        step.draft_length, step.waits = draft_length, waits
        for request in self._requests:
            request.serial = id(request)
            step.requests.append(request)
            step.rows.append(StepRow(0, 0, 1, [], True))
        step.generating = len(step.rows)
        step.tokens = step.generating + prompt
        self.now += seconds
        self.costs.applied(step, self.now)


def test_costs_are_those_of_steps_that_only_generate() -> None:
    series = Series(4)
    assert series.costs.of(4, 2) == LEAST_RATIO, "relative until a step was measured"
    unknown = Series(4)
    for _ in range(9):
        assert not unknown.costs.lacks_plain(4)
        unknown.apply(2.0, 8)
    assert unknown.costs.lacks_plain(4), "what it takes without drafts is not known yet"
    unknown.apply(1.0)
    assert not unknown.costs.lacks_plain(4)
    series.apply(9.0)
    for _ in range(3):
        series.apply(2.0)
        series.apply(50.0, 8, prompt=700)
        series.apply(50.0, waits=True)
    assert series.costs.of(4, 0) == pytest.approx(2.0), "the first step follows none"
    assert series.costs.of(4, 2) == pytest.approx(2.0 * LEAST_RATIO)
    assert series.costs.of(4, 100) > 3.0, "many tokens take longer"
    for _ in range(30):
        series.apply(3.0, 8)
    assert series.costs.of(4, 8) == pytest.approx(3.0)
    series.apply(100.0, 8)
    assert series.costs.of(4, 8) < 4.0, "it was disturbed"
    for _ in range(500):
        series.costs.forget(4, 8)
    assert series.costs.of(4, 8) == pytest.approx(2.0 * LEAST_RATIO, rel=0.01)
    assert series.costs.of(64, 2) == LEAST_RATIO, "of other rows it says nothing"


@pytest.mark.parametrize(
    ("draft_s", "accepted", "expected"),
    [(1.2, 4, 4), (1.2, 0, 0), (9.0, 4, 0), (3.5, 4, 1)],
)
def test_drafts_are_as_long_as_pays(draft_s: float, accepted: int, expected: int) -> None:
    """draft_s: of a step with drafts of 4 and 3; of 1 it takes a third; 1.0 without any."""
    series, drafting = Series(2), Drafting()
    drafting.costs = series.costs
    costs = ((1.0, 0), (max(1.1, draft_s / 3), 1), (draft_s, 3), (draft_s, 4))
    for seconds, length in costs:
        for _ in range(2):
            series.apply(seconds, length)
    request = Request(("r", 0), list(PROMPT), Sampling(), Stopping(30))
    for _ in range(9):
        request.drafter.verified(4, accepted)
    step = StepBuilder(1000)
    found = drafting.plan([request, Series(1)._requests[0]], step, Limits(max_draft_tokens=4))
    assert step.draft_length == expected
    drafts = [len(each) for each in found.values() if isinstance(each, tuple)]
    assert drafts == ([expected] if expected else [])


def test_a_step_has_so_many_drafted_tokens_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts have 1, 3 or 4 tokens; with 10 for four requests, one each."""
    monkeypatch.setattr(speculation, "MOST_DRAFTED", 10)
    monkeypatch.setattr(speculation, "MARGIN", 0.0)
    world = World()
    for index in range(4):
        world.add(index)
    plan = world.plan()
    world.apply(plan, *[4] * len(plan.rows))
    drafts = [len(row.drafts) for row in world.plan().rows]
    assert drafts == [1] * 4

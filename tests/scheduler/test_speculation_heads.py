"""Drafts that heads on the ranks guess: rows that follow them, and what becomes of them."""

from collections.abc import Sequence

import pytest

from configs.rope_sets import LONG, SHORT, RopeSets
from configs.wire.plan import StepPlan, StepRow, settled
from configs.wire.sampling import FinishReason, Sampling, Stopping
from scheduler import speculation
from scheduler.admission.limits import Limits
from scheduler.draft_costs import DraftCosts
from scheduler.events import ClientCancelled, Ended
from scheduler.request import Request
from tests.scheduler.test_speculation import World


def with_heads(
    max_drafting: int = 8,
    max_draft_tokens: int = 4,
    num_blocks: int = 100,
    steps_ahead: int = 2,
    prompt: Sequence[int] = range(1, 6),
    rope_sets: RopeSets | None = None,
) -> World:
    """A prompt has nothing to draft from: all drafts are guesses."""
    return World(max_drafting, max_draft_tokens, 3, prompt, num_blocks, steps_ahead, rope_sets)


def follows(plan: StepPlan) -> list[int]:
    return [row.follows for row in plan.rows]


def test_a_row_follows_one_whose_samples_and_guesses_are_in_flight() -> None:
    world = with_heads()
    request = world.add()
    first = world.plan()
    assert (first.guesses, follows(first)) == (3, [-1]), "as many as heads guess"
    second = world.plan()
    assert (second.guesses, follows(second)) == (3, [3])
    assert world.plan().empty, "two steps are in flight"
    world.apply(first, 10, guesses=[[11, 12, 13]])
    assert (request.drafts, request.scheduled, request.total) == ((11, 12, 13), 9, 10)
    third = world.plan()
    assert follows(third) == [3]
    [row] = third.rows
    assert row.start == 6, "no token of the draft may be right"
    assert row.start + row.length == 9 + 1 + 3 + 1, "all of them may be, and three more"
    world.apply(second, 11, 12, 77, 78, guesses=[[20, 21, 22]])
    assert request.tokens[5:] == [10, 11, 12, 77]
    assert request.skipped == [2, 3]
    assert (request.drafts, request.computed, request.scheduled) == ((20, 21, 22), 8, 12)
    world.apply(third, 20, 21, 22, 23, guesses=[[30, 31, 32]])
    assert request.tokens[9:] == [20, 21, 22, 23]
    assert request.drafter.num_drafted == 6


def test_a_step_has_the_tokens_of_its_settled_rows() -> None:
    """They say what its tokens cost; how many there will be at most is known before."""
    world = with_heads()
    world.add()
    first, _ = world.plan(), world.plan()
    [_, step] = world.scheduler._flights
    assert (step.tokens, step.generating, step.budget) == (4, 4, 2048 - 4)
    assert step.waits, "what it takes is none of a series"
    world.apply(first, 10, guesses=[[11]])
    assert (step.tokens, step.generating) == (2, 2)


def test_a_settled_row_begins_behind_the_right_samples() -> None:
    """It is as long as its guesses, and ends one position before the last that it may reach."""
    before = [StepRow(4, 0, 3, [], False), StepRow(2, 10, 4, [], True, 0, (7, 8, 9))]
    rows = [StepRow(4, 3, 1, [], True), StepRow(2, 11, 6, [5], True, 1, (), 2)]
    for tokens, start, drafts in [
        ([7, 8, 9, 1], 14, (21,)),
        ([7, 8, 5, 1], 13, (21, 22)),
        ([5, 8, 9, 1], 11, (21, 22)),
    ]:
        kept, found = settled(rows, before, tokens, [[], [21, 22, 23]])
        assert kept is rows[0]
        assert found == StepRow(2, start, 1 + len(drafts), [], True, 1, drafts)
    [_, alone] = settled(rows, before, [7, 8, 9, 1], None)
    assert (alone.start, alone.drafts) == (14, ())


def test_no_more_guesses_are_wanted_than_would_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftCosts, "of", lambda _, rows, length: 9.0 if length > 1 else 1.0)
    world = with_heads()
    world.add()
    first = world.plan()
    assert first.guesses == 3, "whether they pay is not asked for a prompt"
    second = world.plan()
    assert (second.guesses, follows(second)) == (1, [1])


def test_a_draft_is_no_longer_than_the_answer_or_the_limit() -> None:
    """Wherever a row begins; where all of the draft before was right, it is computed in vain."""
    world = with_heads(max_draft_tokens=2)
    request = world.add(most=5)
    plans = [world.plan(), world.plan()]
    assert plans[0].guesses == 2
    world.apply(plans[0], 10, guesses=[[11, 12]])
    third = world.plan()
    [row] = third.rows
    assert row.start + row.length == request.max_total
    *_, ended = world.apply(plans[1], 11, 12, 13, guesses=[[14, 15]])
    assert not isinstance(ended, Ended), "one token is left"
    assert request.drafts == (), "which needs no draft"
    [*_, ended] = world.apply(third, 14, guesses=[[15, 16]])
    assert isinstance(ended, Ended)
    assert ended.tokens == [10, 11, 12, 13, 14]


@pytest.mark.parametrize("right", [0, 1, 2])
def test_an_answer_that_may_end_with_its_draft_is_followed(right: int) -> None:
    world = with_heads()
    request = world.add(most=4)
    first, second = world.plan(), world.plan()
    world.apply(first, 10, guesses=[[11, 12, 13]])
    assert request.drafts == (11, 12), "and one token behind it"
    third = world.plan()
    assert follows(third) == [1]
    sampled = [11, 12, 13][:right] + [50, 51, 52][right:]
    events = world.apply(second, *sampled, guesses=[[60, 61, 62]])
    assert isinstance(events[-1], Ended) == (right == 2)
    assert request.total <= request.max_total
    # The ranks know of no end: they compute a row of one token.
    tokens = [70, 71][: 1 if right == 2 else request.pending]
    events = world.apply(third, *tokens, guesses=[[]])
    assert not request.tables or right == 0
    assert len(request.tokens) - 5 == min(4, 2 + right + 1)


@pytest.mark.parametrize("how", ["a stop token", "a stop string", "its client left"])
def test_a_row_behind_a_requests_end_is_dropped(how: str) -> None:
    world = with_heads()
    request = world.add()
    first, second = world.plan(), world.plan()
    world.apply(first, 10, guesses=[[11, 12, 13]])
    third = world.plan()
    if how == "a stop string":
        [ended] = world.scheduler.finish(request.id, 1)
    elif how == "its client left":
        [ended] = world.scheduler.cancel(request.id)
    guesses = [[20, 21, 22]]
    events = world.apply(second, 11, 99, 13, 14, guesses=guesses)
    if how == "a stop token":
        ended = events[-1]
    else:
        assert not events
    assert isinstance(ended, Ended)
    wanted = {"a stop token": FinishReason.STOP_TOKEN, "a stop string": FinishReason.STOP_STRING}
    assert ended.ending == wanted.get(how, ClientCancelled())
    assert len(ended.tokens) == (3 if how == "a stop token" else 1)
    assert request.tables, "a plan in flight names its blocks"
    world.plan()
    # The draft was wrong from 99 on, for the ranks: its row has three guesses all the same.
    assert not world.apply(third, 1, 2, 3, 4, guesses=guesses)
    assert not request.tables
    assert not world.scheduler.has_work


def test_a_preempted_requests_rows_count() -> None:
    """It leaves with two plans in flight, and comes back with what they brought."""
    world = with_heads()
    request = world.add()
    first, second = world.plan(), world.plan()
    world.apply(first, 10, guesses=[[11, 12, 13]])
    third = world.plan()
    world.scheduler._running.preempt(request)
    world.apply(second, 11, 12, 13, 14, guesses=[[15, 16, 17]])
    assert world.plan().empty
    world.apply(third, 15, 16, 50, 51, guesses=[[52, 53, 54]])
    assert request.tokens[5:] == [10, 11, 12, 13, 14, 15, 16, 50]
    again = world.plan()
    assert again.joins[0].tokens == request.tokens
    assert follows(again) == [-1]
    assert follows(world.plan()) == [3]


def test_blocks_are_taken_for_the_most_that_a_row_may_reach() -> None:
    """Without them it waits, and gets the block that it needs once the check is known."""
    world = with_heads(num_blocks=3)
    request = world.add(most=7)
    first, second = world.plan(), world.plan()
    assert [len(plan.rows[0].blocks) for plan in (first, second)] == [2, 1]
    assert request.covered == 12
    world.apply(first, 10, guesses=[[11, 12, 13]])
    third = world.plan()
    [row] = third.rows
    assert (row.start, row.length, row.blocks) == (6, 6, []), "as far as there are blocks"
    world.apply(second, 11, 12, 13, 14, guesses=[[15, 16, 17]])
    assert request.drafts == (15,), "the last position is no draft's"
    *_, ended = world.apply(third, 15, 16, guesses=[[17, 18, 19]])
    assert isinstance(ended, Ended)


def test_a_row_waits_where_blocks_hold_not_all_that_it_may_reach() -> None:
    """Two prompts end with a block, of the three that they take and the one that is left."""
    world = with_heads(num_blocks=4, prompt=range(1, 9))
    requests = [world.add(index, most=8) for index in range(2)]
    first, second = world.plan(), world.plan()
    assert [row.batch_slot for row in second.rows] == [requests[0].batch_slot]
    assert world.scheduler._running.stalled
    world.apply(first, 10, 10, guesses=[[11, 12, 13]] * 2)
    assert [request.guesses for request in requests] == [(), (11, 12, 13)]
    assert [request.drafts for request in requests] == [(11, 12), ()]
    third = world.plan()
    world.apply(second, 11, 99, 12, guesses=[[15, 16, 17]])
    world.apply(third, 50, guesses=[[]])
    world.scheduler.add(Request(("r", 2), [50], Sampling(), Stopping(2)), 0.0)
    fourth = world.plan()
    assert [row.start for row in fourth.rows] == [8, 0]
    assert fourth.rows[0].drafts == (11, 12, 13), "the first request has ended"
    assert requests[1].covered == requests[1].scheduled == 12
    fifth = world.plan()
    assert [row.batch_slot for row in fifth.rows] == [fourth.rows[1].batch_slot], "none is left"


def test_a_row_that_follows_has_one_rope_set() -> None:
    """Keys of positions from 12 on take the other one: no draft reaches over that."""
    world = with_heads(rope_sets=RopeSets(12, False), prompt=range(1, 9))
    request = world.add()
    first, second = world.plan(), world.plan()
    [row] = second.rows
    assert (row.rope_set, row.start + row.length) == (SHORT, 12)
    world.apply(first, 10, guesses=[[11, 12, 13]])
    third = world.plan()
    [row] = third.rows
    assert (row.start, row.length, row.rope_set) == (9, 3, SHORT)
    world.apply(second, 11, 12, 13, guesses=[[14, 15, 16]])
    assert (request.drafts, request.scheduled) == ((), 12)
    [row] = world.plan().rows
    assert (row.rope_set, row.start, row.follows) == (LONG, 12, 3)


def test_requests_without_heads_run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "MARGIN", 0.0)
    world = with_heads()
    for index in range(6):
        world.add(index)
    first, second = world.plan(), world.plan()
    assert follows(second) == [3] * 6, "until it is known which have heads"
    world.apply(first, *[10] * 6, guesses=[[], [], [], [], [], [11, 12, 13]])
    third = world.plan()
    assert follows(third) == [-1] * 5 + [3]
    assert [row.length for row in third.rows[:5]] == [1] * 5


def test_where_many_run_heads_do_nothing_and_all_run_ahead() -> None:
    world = with_heads(max_drafting=1)
    for index in range(2):
        world.add(index)
    first, second = world.plan(), world.plan()
    assert [row.length for row in second.rows] == [1, 1]
    assert (second.guesses, follows(second)) == (0, [-1, -1])
    world.apply(first, 10, 10, guesses=[[11, 12, 13]] * 2 if first.guesses else None)
    world.apply(second, 10, 10)
    assert [row.drafts for row in world.plan().rows] == [(), ()]


def test_a_row_without_a_draft_follows_one_with_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    world = with_heads()
    request = world.add()
    first, second = world.plan(), world.plan()
    world.apply(first, 10, guesses=[[11, 12, 13]])
    monkeypatch.setattr(DraftCosts, "of", lambda _, rows, length: 9.0 if length else 1.0)
    third = world.plan()
    assert (third.guesses, follows(third)) == (0, [0])
    world.apply(second, 11, 50, 51, 52, guesses=[[60, 61, 62]])
    assert (request.drafts, request.total) == ((), 5 + 3 + 1)
    fourth = world.plan()
    assert follows(fourth) == [-1], "its start is known"
    world.apply(third, 70)
    world.apply(fourth, 71)
    assert request.tokens[5:] == [10, 11, 50, 70, 71]


def test_heads_that_guess_wrong_are_turned_down() -> None:
    """Then no step asks for guesses until more is expected again, and rows follow none."""
    world = with_heads()
    request = world.add(most=60)
    plan = world.plan()
    for _ in range(12):
        behind = world.plan()
        guesses = [[8, 8, 8]] * len(plan.rows) if plan.guesses else None
        row = world.rows(plan)[0]
        world.apply(plan, *[10] * row.num_samples, guesses=guesses)
        plan = behind
    assert (plan.guesses, follows(plan)) == (0, [-1])
    assert 0 < request.drafter.num_drafted < 12


def test_guesses_that_are_known_are_used_once() -> None:
    """Where steps do not overlap, and though they would not pay any more."""
    world = with_heads(steps_ahead=1)
    request = world.add()
    plan = world.plan()
    for _ in range(9):
        request.drafter.verified(4, 0)
    world.apply(plan, 10, guesses=[[11, 12, 13]])
    plan = world.plan()
    assert [row.drafts[0] for row in plan.rows] == [11]
    assert plan.guesses == 0, "no more are wanted"
    world.apply(plan, *[10] * plan.rows[0].num_samples)
    assert [row.drafts for row in world.plan().rows] == [()]


def test_guesses_of_a_preempted_request_are_forgotten() -> None:
    world = with_heads(steps_ahead=1)
    request = world.add()
    plan = world.plan()
    world.apply(plan, 10, guesses=[[11, 12, 13]])
    world.scheduler._running.preempt(request)
    world.scheduler._requeue_freed()
    assert request.guesses == ()
    plan = world.plan()
    assert [row.drafts for row in plan.rows] == [()]
    world.apply(plan, 11, guesses=[[12, 13, 14]])
    assert [row.drafts for row in world.plan().rows] == [(12, 13, 14)]


def test_rows_follow_the_step_before_alone() -> None:
    with pytest.raises(ValueError, match="steps_ahead must be at most 2"):
        Limits(steps_ahead=3, max_draft_tokens=1)

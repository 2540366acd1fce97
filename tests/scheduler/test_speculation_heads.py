"""Drafts that heads on the ranks guess: who waits for them, and what becomes of them."""

import pytest

from scheduler import speculation
from scheduler.draft_costs import DraftCosts
from tests.scheduler.test_speculation import World


def with_heads(max_drafting: int = 8, max_draft_tokens: int = 4) -> World:
    """A prompt has nothing to draft from: all drafts are guesses."""
    return World(max_drafting, max_draft_tokens, draft_heads=3, prompt=[1, 2, 3, 4, 5])


def test_guesses_are_the_next_rows_draft() -> None:
    world = with_heads()
    request = world.add()
    plan = world.plan()
    assert plan.guesses == 3, "as many as heads guess"
    assert world.plan().empty, "it waits for its guesses"
    world.apply(plan, 10, guesses=[[11, 12, 13]])
    plan = world.plan()
    assert [row.drafts for row in plan.rows] == [(11, 12, 13)]
    assert plan.guesses == 3
    world.apply(plan, 11, 12, 77, 78, guesses=[[20, 21, 22]])
    assert request.tokens[5:] == [10, 11, 12, 77]
    assert request.skipped == [2, 3]
    assert [row.drafts for row in world.plan().rows] == [(20, 21, 22)]


def test_no_more_guesses_are_wanted_than_would_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftCosts, "of", lambda _, rows, length: 9.0 if length > 1 else 1.0)
    world = with_heads()
    world.add()
    world.apply(world.plan(), 10, guesses=[[11, 12, 13]])
    plan = world.plan()
    assert [row.drafts for row in plan.rows] == [(11,)]
    assert plan.guesses == 1


def test_a_draft_is_no_longer_than_the_answer_or_the_limit() -> None:
    world = with_heads(max_draft_tokens=2)
    world.add(most=3)
    plan = world.plan()
    assert plan.guesses == 2
    world.apply(plan, 10, guesses=[[11, 12]])
    assert [row.drafts for row in world.plan().rows] == [(11,)]


def test_requests_without_heads_run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "MARGIN", 0.0)
    world = with_heads()
    for index in range(6):
        world.add(index)
    plan = world.plan()
    world.apply(plan, *[10] * 6, guesses=[[], [], [], [], [], [11, 12, 13]])
    second = world.plan()
    assert [row.drafts for row in second.rows] == [()] * 5 + [(11, 12, 13)]
    third = world.plan()
    assert len(third.rows) == 5, "one of six waits"
    assert third.guesses == 0, "none of these has heads"


def test_where_many_run_heads_do_nothing_and_all_run_ahead() -> None:
    world = with_heads(max_drafting=1)
    for index in range(2):
        world.add(index)
    first, second = world.plan(), world.plan()
    assert [row.length for row in second.rows] == [1, 1]
    assert second.guesses == 0
    world.apply(first, 10, 10, guesses=[[11, 12, 13]] * 2 if first.guesses else None)
    world.apply(second, 10, 10)
    assert [row.drafts for row in world.plan().rows] == [(), ()]


def test_heads_that_guess_wrong_are_turned_down() -> None:
    """Then no step asks for guesses until more is expected again, and requests run ahead."""
    world = with_heads()
    request = world.add(most=60)
    plan = world.plan()
    for _ in range(12):
        guesses = [[8, 8, 8]] * len(plan.rows) if plan.guesses else None
        world.apply(plan, *[10] * sum(row.num_samples for row in plan.rows), guesses=guesses)
        plan = world.plan()
    assert plan.guesses == 0
    assert not world.plan().empty, "it runs ahead"
    assert 0 < request.drafter.num_drafted < 12


def test_guesses_that_were_waited_for_are_used_once() -> None:
    """Though they would not pay any more: else what they are worth would not be learned."""
    world = with_heads()
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
    world = with_heads()
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

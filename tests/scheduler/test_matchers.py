"""Matchers: no request waits for another's; at its limits one continues alone, or ends."""

from dataclasses import replace as with_fields

from msgspec.structs import replace

from configs.wire.plan import StepPlan, StepResult
from configs.wire.sampling import FinishReason, Sampling, Stopping
from scheduler.admission.limits import Limits
from scheduler.events import ConstraintFailure, Ended, NewTokens, RequestEvent
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from tests.scheduler.small import arrive, capacity, story
from tests.scheduler.stage import play
from tests.strategies import Cancel


def scheduler(max_matchers: int = 64) -> Scheduler:
    return Scheduler(Limits(steps_ahead=1, max_matchers=max_matchers), capacity())


def add(to: Scheduler, name: str, constraint: str = "", tokens: int = 4) -> None:
    sampling = Sampling(grammar=constraint)
    to.add(Request((name, 0), [5, 6], sampling, Stopping(tokens)), 0.0)


def step(
    of: Scheduler, faults: dict[int, str] | None = None
) -> tuple[StepPlan, list[RequestEvent]]:
    """One plan and its tokens; `faults`: by row."""
    plan = of.schedule(0.0)
    rows = [i for i, row in enumerate(plan.rows) if row.batch_slot in (faults or {})]
    tokens = [7] * sum(row.samples for row in plan.rows)
    result = StepResult(plan.epoch, plan.step, tokens)
    events = of.apply(plan, replace(result, faults=[(row, "worn") for row in rows]), 0.0)
    of.check()
    return plan, events


def joined(plan: StepPlan) -> list[tuple[int, str]]:
    return [(join.matcher, join.sampling.grammar) for join in plan.joins]


def test_waiting_for_a_matcher_delays_no_other_request() -> None:
    all = scheduler()
    add(all, "held", "a")
    add(all, "free")
    assert joined(step(all)[0]) == [(-1, "")]
    [order] = all.matchers_to_prepare()
    assert (order.constraint, order.released, all.matchers_to_prepare()) == ("a", [], [])
    assert joined(step(all)[0]) == []
    assert all.matcher_prepared(order.number, "") == []
    assert joined(step(all)[0]) == [(order.number, "a")]
    add(all, "same", "a")
    assert joined(step(all)[0]) == [(order.number, "a")], "it is there already"
    assert all.matchers_to_prepare() == []


def test_a_matcher_that_fails_ends_the_requests_that_need_it() -> None:
    all = scheduler()
    for name in ("one", "two"):
        add(all, name, "a")
    add(all, "other", "b")
    assert all.schedule(0.0).empty
    first, second = all.matchers_to_prepare()
    events = all.matcher_prepared(first.number, "no")
    assert [(e.request_id[0], e.ending) for e in events if isinstance(e, Ended)] == [
        ("one", ConstraintFailure("no")), ("two", ConstraintFailure("no"))]  # fmt: skip
    all.matcher_prepared(second.number, "")
    assert joined(step(all)[0]) == [(second.number, "b")]


def test_a_worn_out_lexer_ends_only_the_request_that_has_it_alone() -> None:
    """Its neighbours lose a token that is made again, and their clients see nothing of it."""
    all = scheduler()
    add(all, "costly", "a")
    add(all, "neighbour", "a")
    assert all.schedule(0.0).empty
    [shared] = all.matchers_to_prepare()
    all.matcher_prepared(shared.number, "")
    plan, events = step(all)
    assert [event.tokens for event in events if isinstance(event, NewTokens)] == [[7], [7]]
    both = {join.batch_slot: "worn" for join in plan.joins}
    assert step(all, both)[1] == []
    add(all, "later", "a")
    assert all.schedule(0.0).empty
    orders = all.matchers_to_prepare()
    assert [order.constraint for order in orders] == ["a"] * 3
    assert shared.number not in {order.number for order in orders}
    for order in orders:
        all.matcher_prepared(order.number, "")
    plan, _ = step(all)
    assert [join.tokens for join in plan.joins] == [[5, 6, 7], [5, 6, 7], [5, 6]]
    assert len({join.matcher for join in plan.joins}) == 3
    [costly] = [join.batch_slot for join in plan.joins[:1]]
    _, [ended, *_] = step(all, {costly: "worn"})
    assert isinstance(ended, Ended)
    assert (ended.request_id[0], ended.ending) == ("costly", ConstraintFailure("worn"))
    assert ended.tokens == [7, 7]
    rest = [event for _ in range(6) for event in step_if_any(all) if isinstance(event, Ended)]
    assert [(e.ending, e.tokens) for e in rest] == [(FinishReason.LENGTH, [7] * 4)] * 2


def step_if_any(of: Scheduler) -> list[RequestEvent]:
    return step(of)[1] if of.has_work else []


def test_matchers_are_prepared_again_after_a_loss() -> None:
    all = scheduler()
    add(all, "one", "a")
    assert all.schedule(0.0).empty
    [before] = all.matchers_to_prepare()
    all.matcher_prepared(before.number, "")
    step(all)
    assert all.group_lost() == []
    all.check()
    assert all.schedule(0.0).empty
    [again] = all.matchers_to_prepare()
    assert again.constraint == "a"
    all.matcher_prepared(again.number, "")
    assert [join.tokens for join in step(all)[0].joins] == [[5, 6, 7]]


def test_the_ranks_hold_no_more_than_they_may() -> None:
    all = scheduler(max_matchers=1)
    add(all, "one", "a", tokens=1)
    add(all, "two", "b", tokens=1)
    assert all.schedule(0.0).empty
    [first] = all.matchers_to_prepare()
    assert all.matchers_to_prepare() == [], "there is no room"
    all.matcher_prepared(first.number, "")
    assert joined(step(all)[0]) == [(first.number, "a")]
    [second] = all.matchers_to_prepare()
    assert second.released == [first.number]


def test_room_is_made_for_an_adapter_of_which_all_requests_wait_for_a_matcher() -> None:
    """The adapter is in no queue then: the only request that was in one has been cancelled."""
    ranks = capacity(num_blocks=10, block_size=1, adapter_slots=1)
    limits = Limits(1, None, 1, prefix_caching=False, steps_ahead=1, quantum_tokens=1)
    limits = with_fields(limits, patience_steps=0, slice_steps=4, max_matchers=1)
    first = arrive(1, 0, adapter=1)
    plot = story(
        first,
        Cancel(0),
        with_fields(first, pooled=True),
        with_fields(first, constraint="a", background=True),
        arrive(2, 4, adapter=2),
        with_fields(first, constraint="b"),
        ranks=ranks,
        limits=limits,
        pages=0,
    )
    play(with_fields(plot, making=4, wear=1, meanwhile={8: Cancel(4)}))

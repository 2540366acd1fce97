"""When a request breaks the ranks it ends, and no other does."""

from dataclasses import replace
from math import ceil, log2

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.runtime import AdapterShare
from configs.wire.adapters import AdapterKey, AdapterShape
from configs.wire.plan import StepPlan
from configs.wire.sampling import Sampling, Stopping
from scheduler.admission.limits import Limits, Overloaded
from scheduler.events import AdapterPinned, AdapterUnloaded, ClientCancelled, RanksFailure
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from tests.scheduler.fragile import Breaks, FragileStage, PlannedRow
from tests.scheduler.small import arrive, capacity, story
from tests.scheduler.stage import Client
from tests.strategies import Action, Arrive, LoseGroup, Story, stories

POISON = 77
ROOMY = capacity(num_blocks=300, adapter_slots=8, adapter_pages=64, host_bytes=10000)


def poison(length: int = 5, new: int = 20, adapter: int | None = None) -> Arrive:
    key = None if adapter is None else AdapterKey(adapter)
    return Arrive((POISON, *range(length - 1)), Stopping(new), key)


def is_poison(row: PlannedRow) -> bool:
    return row.prompt[0] == POISON


def any_step(rows: list[PlannedRow], plan: StepPlan) -> bool:
    return any(map(is_poison, rows))


def decode_alone(rows: list[PlannedRow], plan: StepPlan) -> bool:
    """Only where the poison generates by itself, not where its tokens are computed again."""
    return any(is_poison(each) and not each.is_prefill for each in rows)


def beside_a_prefill(rows: list[PlannedRow], plan: StepPlan) -> bool:
    others = [each for each in rows if not is_poison(each)]
    return any(map(is_poison, rows)) and any(each.is_prefill for each in others)


def beside_anybody(rows: list[PlannedRow], plan: StepPlan) -> bool:
    return any(map(is_poison, rows)) and len(rows) > 1


def guilty(client: Client) -> bool:
    return client.arrival.prompt[0] == POISON


def stage_of(breaks: Breaks, *arrivals: Arrive, **changes: object) -> FragileStage:
    limits = replace(Limits(max_step_tokens=512, max_running=64), **changes)  # type: ignore[arg-type]
    ranks = msgspec.structs.replace(ROOMY, num_blocks=12 * max(25, len(arrivals)))
    stage = FragileStage(story(ranks=ranks, limits=limits), breaks, guilty)
    for arrival in arrivals:
        stage.arrive(arrival)
    return stage


def mates(count: int, new: int = 30, adapters: int = 0) -> list[Arrive]:
    """Innocents of different prompts, over the base and some adapters."""
    keys = [None, *range(1, adapters + 1)]
    return [
        arrive(3 + index % 4, new, keys[index % len(keys)], first=index) for index in range(count)
    ]


@pytest.mark.parametrize("breaks", [any_step, decode_alone])
@pytest.mark.parametrize("count", [1, 2, 8, 64])
def test_a_poison_request_among_many_ends_after_a_logarithm_of_losses(
    count: int, breaks: Breaks
) -> None:
    arrivals = mates(count - 1)
    arrivals.insert(count * 2 // 3, poison())
    stage = stage_of(breaks, *arrivals)
    stage.run(4000)
    stage.check_end()
    assert stage.failed == [count * 2 // 3]
    assert stage.num_losses <= 2 + ceil(log2(count)) + 1
    ended = stage.clients[stage.failed[0]].ended
    assert ended is not None
    assert isinstance(ended.ending, RanksFailure)
    assert f"{stage.num_losses} times in a row" in ended.ending.message


@pytest.mark.parametrize("rows", [(0, 15), (3, 4), (7, 8)])
def test_two_poison_requests_end_and_the_others_do_not(rows: tuple[int, int]) -> None:
    arrivals = mates(14, adapters=3)
    for row in rows:
        arrivals.insert(row, poison(adapter=2))
    stage = stage_of(any_step, *arrivals)
    stage.run(4000)
    stage.check_end()
    assert stage.failed == list(rows)
    assert stage.num_losses <= 2 + 2 * (log2(16) + 1)


@pytest.mark.parametrize("breaks", [beside_a_prefill, beside_anybody])
@pytest.mark.parametrize("count", [2, 8])
def test_a_request_that_fails_only_beside_others_is_served_alone(
    count: int, breaks: Breaks
) -> None:
    """No request alone is the cause, and it ends."""
    stage = stage_of(breaks, poison(new=150), *mates(count - 1, new=60))
    for tick in range(400):
        stage.go_round()
        if tick % 40 == 0:
            stage.arrive(arrive(6, 20, first=tick))
    stage.run(4000)
    stage.check_end()
    assert stage.failed == []
    assert stage.num_losses < 5 * (2 + log2(64)), "it is apart for longer each time"


def test_one_or_two_losses_delay_requests_briefly() -> None:
    """Ranks that die twice for their own reasons: requests are isolated, and all of them finish."""
    stage = stage_of(lambda rows, plan: False, *mates(16, adapters=4))
    for _ in range(5):
        stage.go_round()
    stage.lose_group()
    for _ in range(5):
        stage.go_round()
    stage.lose_group()
    stage.run(300)
    stage.check_end()
    assert stage.failed == []


def test_losses_with_progress_between_them_isolate_no_request() -> None:
    stage = stage_of(lambda rows, plan: False, *mates(4, new=80))
    for _ in range(5):
        stage.lose_group()
        for _ in range(12):
            stage.go_round()
            assert not stage.scheduler._isolation.active
    stage.run(300)
    stage.check_end()


@pytest.mark.parametrize("how", ["load", "staging", "staged", "rows"])
def test_an_adapter_that_breaks_the_ranks_ends_its_own_requests_only(how: str) -> None:
    damaged = AdapterKey(3)

    def breaks(rows: list[PlannedRow], plan: StepPlan) -> bool:
        if how == "load":
            return any(load.key == damaged for load in plan.loads)
        return how == "rows" and any(each.occupant.adapter == damaged for each in rows)

    arrivals = mates(12, adapters=3)
    over = [index for index, each in enumerate(arrivals) if each.adapter == damaged]
    script = story(ranks=ROOMY, limits=Limits(max_step_tokens=512, max_running=64))
    script = replace(script, delays=dict.fromkeys(script.shapes, 3))
    stage = FragileStage(script, breaks, lambda client: client.arrival.adapter == damaged)
    stage.damaged = {damaged} if how.startswith("stag") else set()
    stage.late = how == "staged"
    for arrival in arrivals:
        stage.arrive(arrival)
    stage.run(4000)
    stage.check_end()
    assert stage.failed == over


def in_trial(*arrivals: Arrive, **changes: object) -> FragileStage:
    """A stage that has just begun an isolation."""
    stage = stage_of(any_step, *arrivals, **changes)
    while not stage.scheduler._isolation.active:
        stage.go_round()
        assert stage.tick < 100
    return stage


def test_requests_may_arrive_and_leave_during_isolation() -> None:
    stage = in_trial(poison(), *mates(7, adapters=2))
    late = [stage.arrive(arrive(4, 9, 5, first=index)) for index in range(4)]
    held_back = stage.clients[7]
    for client in (late[0], held_back):
        client.cancelled = True
        stage.receive(stage.scheduler.cancel(client.id))
        stage.scheduler.check()
        assert client.ended is not None
    stage.send(AdapterPinned(AdapterKey(6), True))
    stage.send(AdapterUnloaded(AdapterKey(1)))
    stage.run(2000)
    stage.check_end()
    assert stage.failed == [0]


def test_held_back_requests_count_as_waiting() -> None:
    stage = in_trial(poison(), *mates(7), max_queued=6, max_running=8)
    queued = stage.scheduler.snapshot().queued
    assert queued + stage.scheduler.snapshot().running == 8
    while stage.scheduler.snapshot().queued < 14:
        stage.arrive(arrive(4, 9))
    with pytest.raises(Overloaded):
        stage.arrive(arrive(4, 9))
    stage.run(2000)
    stage.check_end()
    assert stage.failed == [0]


def test_a_debt_does_not_delay_isolated_requests() -> None:
    slow = AdapterShare(tokens_per_second=0.01)
    stage = in_trial(*mates(6, new=12, adapters=1), poison(adapter=1))
    stage.set_shares({AdapterKey(1): slow})
    stage.scheduler._admission.rate_limits.charge(AdapterKey(1), 100, float(stage.tick))
    while not stage.failed:
        stage.go_round()
        assert stage.tick < 600, "it waits for its debt to be paid, and so do all others"
    base = [client for client in stage.clients if client.arrival.adapter is None]
    while any(client.ended is None for client in base):
        stage.go_round()
        assert stage.tick < 800
    assert stage.failed == [6]


def test_no_adapter_outside_the_group_moves_during_isolation() -> None:
    stage = in_trial(poison(), *mates(7), arrive(4, 9, 5))
    stage.send(AdapterPinned(AdapterKey(6), True))
    while stage.scheduler._isolation.active:
        assert not stage.loading.keys() - {AdapterKey(5)}
        stage.go_round()
    stage.run(1000)
    stage.go_round()
    stage.check_end()


def test_a_cancelled_request_ends_its_isolation() -> None:
    stage = in_trial(poison(), *mates(3, new=40))
    for client in stage.clients:
        client.cancelled = True
        stage.receive(stage.scheduler.cancel(client.id))
        stage.scheduler.check()
    assert all(c.ended is not None and c.ended.ending == ClientCancelled() for c in stage.clients)
    after = stage.arrive(arrive(4, 9))
    stage.run(100)
    stage.check_end()
    assert after.ended is not None


KINDS: list[Breaks] = [any_step, decode_alone, beside_a_prefill, beside_anybody]


@st.composite
def poisoned(draw: st.DrawFn) -> tuple[Story, Breaks]:
    """A story of which some arrivals break the ranks, each time or in company."""
    script = draw(stories())
    actions: list[Action] = []
    for action in script.actions:
        if isinstance(action, Arrive) and draw(st.integers(0, 4)) == 0:
            actions.append(replace(action, prompt=(POISON, *action.prompt)))
        elif not isinstance(action, LoseGroup):
            actions.append(action)
    return replace(script, actions=tuple(actions)), draw(st.sampled_from(KINDS))


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(poisoned())
def test_every_isolation_ends_and_only_guilty_requests_fail(
    script: tuple[Story, Breaks],
) -> None:
    stage = FragileStage(script[0], script[1], guilty)
    for action in stage.story.actions:
        stage.act(action)
    stage.run(40 * stage.patience())
    for _ in range(60):
        stage.go_round()
    stage.run(stage.patience())
    stage.check_end()


def test_new_ranks_with_less_memory_serve_what_still_fits() -> None:
    stage = stage_of(lambda rows, plan: False, *mates(6, new=60, adapters=2))
    for _ in range(8):
        stage.go_round()
    long = stage.arrive(arrive(60, 90))
    stage.lose_group()
    poorer = capacity(num_blocks=30, adapter_slots=1, adapter_pages=1, host_bytes=500)
    stage.story = replace(stage.story, capacity=poorer)
    stage.guilty = lambda client: client is long
    stage.receive(stage.scheduler.regroup(poorer))
    stage.ranks = stage._new_ranks()
    stage.scheduler.check()
    assert long.ended is not None
    assert isinstance(long.ended.ending, RanksFailure)
    assert "120 tokens" in long.ended.ending.message
    stage.run(2000)
    stage.check_end()
    assert stage.scheduler.snapshot().num_blocks == 30


def test_only_an_adapter_that_does_not_fit_the_new_ranks_is_refused() -> None:
    stage = stage_of(lambda rows, plan: False)
    stage.story = replace(
        stage.story,
        shapes={AdapterKey(1): AdapterShape((9, 9), 10), AdapterKey(2): AdapterShape((1, 1), 10)},
    )
    large, small = stage.arrive(arrive(4, 30, 1)), stage.arrive(arrive(4, 30, 2))
    for _ in range(6):
        stage.go_round()
    stage.lose_group()
    poorer = msgspec.structs.replace(ROOMY, adapter_pages=8)
    stage.story = replace(stage.story, capacity=poorer)
    stage.receive(stage.scheduler.regroup(poorer))
    stage.ranks = stage._new_ranks()
    stage.run(500)
    stage.check_end()
    assert large.ended is not None
    assert "9 pages" in str(large.ended.ending)
    assert small.ended is not None


def test_ranks_that_were_stopped_on_purpose_blame_no_request() -> None:
    scheduler = Scheduler(Limits(max_running=1), ROOMY)
    for number in range(3):
        scheduler.add(Request(("r", number), [1, 2], Sampling(), Stopping(3)), 0.0)
    for epoch in range(1, 6):
        assert scheduler.schedule(0.0).joins
        scheduler.check()
        assert scheduler.group_lost(wanted=True) == []
        seen = scheduler.snapshot()
        assert (scheduler.epoch, seen.queued, seen.isolated) == (epoch, 3, 0)
    scheduler.check()
    assert scheduler.group_lost() == []
    scheduler.schedule(0.0)
    assert scheduler.group_lost() == []
    assert scheduler.snapshot().isolated

"""What a merge takes is charged to its parts: merging evades no cap."""

import pytest

from configs.runtime import AdapterShare
from configs.wire.adapters import AdapterKey
from scheduler.admission.limits import Limits
from scheduler.admission.queues import PASSED_OVER
from scheduler.admission.rate_limits import RateLimits
from tests.scheduler.admission.test_fairness import flood
from tests.scheduler.small import arrive, capacity, story
from tests.scheduler.stage import Client, Stage

ONE, TWO, BOTH, ALONE = (AdapterKey(index) for index in range(1, 5))
EVEN = AdapterShare()
LIMITS = Limits(max_step_tokens=32, max_running=8)
ROOMY = capacity(adapter_slots=4)


def shares(one: AdapterShare = EVEN, two: AdapterShare = EVEN) -> RateLimits:
    given = RateLimits()
    given.replace(EVEN, EVEN, {ONE: one, TWO: two})
    given.add_merge_request(BOTH, (ONE, TWO))
    return given


def test_a_merges_queue_counts_for_the_least_of_its_parts() -> None:
    given = shares(AdapterShare(weight=4, priority=3), AdapterShare(weight=0.5, priority=5))
    assert given.share_of(BOTH) == AdapterShare(weight=0.5, priority=3)
    given.set_share(TWO, AdapterShare(weight=9, priority=-1))
    assert given.share_of(BOTH) == AdapterShare(weight=4, priority=-1)
    given.remove_merge_request(BOTH)
    assert given.share_of(BOTH) == EVEN, "after its last request a merge is like any key"


def test_a_merge_waits_for_the_limits_of_each_part() -> None:
    given = shares(AdapterShare(max_concurrent=1), AdapterShare(tokens_per_second=10))
    assert not given.is_over_limit(BOTH, 0.0)
    given.admitted(ONE, 5, 0.0)
    assert given.is_over_limit(BOTH, 0.0)
    assert given.next_wake is None
    given.freed(ONE)
    given.admitted(TWO, 30, 0.0)  # the bucket held 10
    assert given.is_over_limit(BOTH, 1.9)
    assert given.next_wake == 2.0
    assert given.take_expired(2.0) == [TWO], "and with it all that is charged to it"
    assert not given.is_over_limit(BOTH, 2.0)


def test_queues_that_share_a_cap_are_named_when_a_request_is_freed() -> None:
    given = shares(AdapterShare(max_concurrent=1))
    given.add_merge_request(ALONE, (ONE,))
    assert given.sharing_limits_with((ONE,)) == [ONE, BOTH, ALONE]
    assert given.sharing_limits_with((TWO,)) == [TWO], "without a cap there is nothing to wait for"
    given.add_merge_request(BOTH, (ONE, TWO))
    for key in (BOTH, ALONE):
        given.remove_merge_request(key)
    assert given.sharing_limits_with((ONE,)) == [ONE, BOTH], "one request over it is left"
    given.remove_merge_request(BOTH)
    given.check({}, {})


def running(stage: Stage, *adapters: int) -> int:
    """Requests over these that have begun and not ended."""
    return sum(
        client.arrival.adapter in adapters and bool(client.received) and client.ended is None
        for client in stage.clients
    )


def test_a_cap_holds_over_an_adapter_and_all_its_merges_together() -> None:
    capped: dict[int | None, AdapterShare] = {1: AdapterShare(max_concurrent=2)}
    merges = {3: (1, 2), 4: (1,)}
    stage = Stage(story(ranks=ROOMY, limits=LIMITS, shares=capped, merges=merges))
    merged = [stage.arrive(arrive(new=6, adapter=key)) for key in (1, 3, 4) * 5]
    free = [stage.arrive(arrive(new=6, adapter=2)) for _ in range(3)]
    most = 0
    while stage.scheduler.has_work:
        stage.go_round()
        most = max(most, running(stage, 1, 3, 4))
        assert stage.tick < 300
    stage.check_end()
    assert most == 2
    assert max(waited(client) for client in free) < min(waited(client) for client in merged[-3:])


def waited(client: Client) -> int:
    """Ticks from arrival to the first token."""
    assert client.first_tick is not None
    return client.first_tick - client.arrived


def test_a_rate_holds_over_an_adapter_and_its_merges_and_counts_against_every_part() -> None:
    rate, ticks, length = 2.0, 150, 11
    slow: dict[int | None, AdapterShare] = {2: AdapterShare(tokens_per_second=rate)}
    merges = {3: (1, 2), 4: (2,)}
    stage = Stage(story(ranks=ROOMY, limits=LIMITS, shares=slow, merges=merges))
    over = [stage.arrive(arrive(new=8, adapter=key)) for key in (2, 3, 4) * 20]
    for _ in range(ticks):
        stage.go_round()
    used = sum(len(client.received) + 3 for client in over if client.received)
    assert 0.8 * rate * ticks <= used <= rate * (ticks + 1) + LIMITS.max_running * length
    served = {client.arrival.adapter for client in over if client.ended is not None}
    assert served == {2, 3, 4}, "all three are served"


def test_a_preempted_merge_is_charged_once() -> None:
    capped: dict[int | None, AdapterShare] = {1: AdapterShare(max_concurrent=1)}
    stage = Stage(story(limits=LIMITS, shares=capped, merges={3: (1, 2)}))
    for key in (3, 1, 3, 2):
        stage.arrive(arrive(new=8, adapter=key))
    for _ in range(6):
        stage.go_round()
    assert running(stage, 1, 3) == 1
    stage.lose_group()
    stage.run(300)
    stage.check_end()
    assert not stage.scheduler._admission.rate_limits._merges


PATIENCE, STEPS = 6, 5
FEW = Limits(max_step_tokens=32, max_running=8, max_queued=10_000, patience_steps=PATIENCE)


@pytest.mark.parametrize("slots", [1, 4])
def test_a_merge_of_two_capped_adapters_gets_both_though_neither_is_ever_idle(slots: int) -> None:
    """Nor do two of them wait for each other, though they need the same in another order."""
    one = AdapterShare(max_concurrent=1)
    tale = story(
        ranks=capacity(adapter_slots=slots),
        limits=FEW,
        shares={1: one, 2: one},
        merges={3: (1, 2), 4: (2, 1)},
    )
    stage = Stage(tale)
    busy = [arrive(new=STEPS, adapter=key) for key in (1, 2)]
    flood(stage, busy, 30)
    late = [stage.arrive(arrive(new=STEPS, adapter=key)) for key in (3, 4)]
    flood(stage, busy, 300)
    # Ahead are one admission of each other queue and, with one slot, their pending loads.
    assert max(map(waited, late)) <= 4 * (PATIENCE + STEPS + 6)
    assert all(sum(c.arrival.adapter == key for c in done(stage)) > 5 for key in (1, 2))


def done(stage: Stage) -> list[Client]:
    return [client for client in stage.clients if client.ended is not None]


def test_new_merges_over_a_capped_adapter_do_not_overtake_waiting_queues() -> None:
    tale = story(
        ranks=capacity(adapter_slots=2),
        limits=FEW,
        shares={1: AdapterShare(max_concurrent=1)},
        merges={key: (1,) for key in range(10, 40)},
    )
    stage = Stage(tale)
    clients = []
    for key in range(10, 20):
        clients.append(stage.arrive(arrive(new=STEPS, adapter=key)))
        stage.go_round()
    plain = stage.arrive(arrive(new=STEPS, adapter=1))
    for key in range(20, 40):
        clients.append(stage.arrive(arrive(new=STEPS, adapter=key)))
        stage.go_round()
    stage.run(2000)
    stage.check_end()
    begun = [client.first_tick or 0 for client in clients]
    assert begun == sorted(begun)
    assert plain.first_tick is not None
    assert plain.first_tick < begun[3], "the one without requests so far is first"


def test_a_merge_of_lower_priority_is_not_starved_by_its_parts() -> None:
    shares: dict[int | None, AdapterShare] = {
        1: AdapterShare(max_concurrent=1, priority=2),
        2: AdapterShare(priority=-2),
    }
    stage = Stage(story(ranks=ROOMY, limits=FEW, shares=shares, merges={3: (1, 2)}))
    busy = [arrive(new=STEPS, adapter=key) for key in (1, 4)]
    flood(stage, busy, 30)
    late = stage.arrive(arrive(new=STEPS, adapter=3))
    flood(stage, busy, 300)
    assert waited(late) <= (PASSED_OVER + 3 * 3) * (STEPS + 2)

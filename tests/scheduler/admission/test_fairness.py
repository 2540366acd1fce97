"""No adapter starves: bounds in steps, under load that never ends."""

from dataclasses import replace
from itertools import pairwise

import pytest

from configs.runtime import AdapterShare
from configs.wire.adapters import AdapterKey
from scheduler.adapters.residency import AdapterReadiness, Residency
from scheduler.adapters.resident import AdapterState
from scheduler.admission import admission_queue
from scheduler.admission.limits import Limits, Overloaded
from scheduler.admission.queues import PASSED_OVER
from scheduler.running import SHORTEST_SLICE
from tests.scheduler.small import arrive, capacity, story
from tests.scheduler.stage import Client, Stage
from tests.strategies import Arrive

PATIENCE = 12


def limits(max_running: int = 4, max_step_tokens: int = 32) -> Limits:
    return Limits(
        max_step_tokens=max_step_tokens,
        max_running=max_running,
        max_queued=10_000,
        quantum_tokens=16,
        patience_steps=PATIENCE,
    )


def waited(stage: Stage, client: Client) -> int:
    """Ticks from arrival to the first token."""
    assert client.first_tick is not None
    return client.first_tick - client.arrived


def flood(stage: Stage, arrivals: list[Arrive], ticks: int, depth: int = 6) -> None:
    """Keep `depth` requests of each kind alive for so many ticks."""
    alive: list[list[Client]] = [[] for _ in arrivals]
    for _ in range(ticks):
        for arrival, clients in zip(arrivals, alive, strict=True):
            clients[:] = [client for client in clients if client.ended is None]
            while len(clients) < depth:
                clients.append(stage.arrive(arrival))
        stage.go_round()


def test_a_new_adapter_does_not_overtake_older_pending_loads() -> None:
    """With a slot free now and then, all adapters wait about equally long."""
    steps, num_adapters = 10, 8
    stage = Stage(story(ranks=capacity(adapter_slots=2), limits=limits(max_running=8)))
    for index in range(60):
        stage.arrive(arrive(new=steps, adapter=index % num_adapters + 1))
        for _ in range(steps // 2):
            stage.go_round()
    stage.run(1000)
    ticks = sorted(waited(stage, client) for client in stage.clients[10:50])
    assert ticks[-1] <= 3 * ticks[len(ticks) // 2]


@pytest.mark.parametrize("steps_of_a_request", [4, 20])
def test_an_adapter_gets_room_though_another_never_stops(steps_of_a_request: int) -> None:
    stage = Stage(story(ranks=capacity(adapter_slots=1), limits=limits()))
    busy = arrive(new=steps_of_a_request, adapter=1)
    flood(stage, [busy], 30)
    late = stage.arrive(arrive(adapter=2))
    flood(stage, [busy], 3 * (PATIENCE + steps_of_a_request))
    # Its patience, what the other still runs, and a few ticks to stage, load and reply.
    assert waited(stage, late) <= PATIENCE + steps_of_a_request + 6


def test_the_nth_pending_load_waits_n_times_the_length_of_a_request() -> None:
    steps = 10
    stage = Stage(story(ranks=capacity(adapter_slots=1), limits=limits()))
    busy = arrive(new=steps, adapter=1)
    flood(stage, [busy], 20)
    late = [stage.arrive(arrive(new=steps, adapter=key)) for key in range(2, 10)]
    flood(stage, [busy], 20 * (PATIENCE + steps))
    for position, client in enumerate(late, start=1):
        assert waited(stage, client) <= (position + 1) * (PATIENCE + steps + 6)


def test_every_adapter_of_many_under_constant_load_is_served_again_and_again() -> None:
    steps, num_adapters = 6, 7
    stage = Stage(story(ranks=capacity(adapter_slots=2), limits=limits(max_running=3)))
    loads = [arrive(new=steps, adapter=key) for key in range(1, num_adapters + 1)]
    flood(stage, loads, 1500, depth=3)
    served: dict[AdapterKey | None, list[int]] = {}
    for client in stage.clients:
        if client.first_tick is not None:
            served.setdefault(client.arrival.adapter, []).append(client.first_tick)
    assert len(served) == num_adapters
    bound = num_adapters * (PATIENCE + 2 * steps + 6)
    for each in served.values():
        each.sort()
        gaps = [later - earlier for earlier, later in pairwise(each)]
        assert max([each[0], stage.tick - each[-1], *gaps]) <= bound


@pytest.mark.parametrize("budget", [8, 16])
def test_more_pending_loads_than_a_step_looks_at_are_all_served(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pending loads that got room but lack tokens must not let younger ones reserve over them."""
    monkeypatch.setattr(admission_queue, "MAX_LOADS_SEEN", 2)
    steps, num_adapters = 5, 30
    tight = limits(max_running=8, max_step_tokens=budget)
    stage = Stage(story(ranks=capacity(adapter_slots=4), limits=tight))
    for index in range(4 * num_adapters):
        stage.arrive(arrive(length=20, new=steps, adapter=index % num_adapters + 1))
    stage.run(4 * num_adapters * (20 // (budget - 4) + steps))
    first = [stage.clients[index].first_tick or 0 for index in range(num_adapters)]
    assert all(later >= earlier - 8 for earlier, later in pairwise(first))


def test_a_large_adapter_is_not_overtaken_for_ever_by_small_ones() -> None:
    ranks = capacity(adapter_pages=4, adapter_slots=4)
    tale = story(ranks=ranks, limits=limits())
    large = AdapterKey(9)
    tale.shapes[large] = type(tale.shapes[large])((4, 4), 10)
    stage = Stage(tale)
    small = [arrive(new=8, adapter=key) for key in range(1, 7)]
    flood(stage, small, 30, depth=2)
    client = stage.arrive(arrive(adapter=large))
    flood(stage, small, 400, depth=2)
    # Seven ticks, and one slice more: it needs several slots, and then any adapter may be closed.
    assert waited(stage, client) <= 7 * (PATIENCE + 8 + 6) + PATIENCE + 4 * SHORTEST_SLICE


def test_the_base_model_is_not_starved_by_adapters_nor_they_by_it() -> None:
    stage = Stage(story(ranks=capacity(adapter_slots=2), limits=limits(max_running=2)))
    flood(stage, [arrive(new=5), arrive(new=5, adapter=1), arrive(new=5, adapter=2)], 600)
    done = {None: 0, 1: 0, 2: 0}
    for client in stage.clients:
        done[client.arrival.adapter] += client.ended is not None
    assert max(done.values()) <= 1.3 * min(done.values())


def test_long_prompts_of_one_adapter_do_not_delay_short_ones_of_another() -> None:
    """Rounds are in tokens: between two of the short ones comes at most a quantum and a prompt."""
    stage = Stage(story(limits=limits(max_running=8, max_step_tokens=16)))
    flood(stage, [arrive(length=60, new=2, adapter=1)], 30, depth=20)
    late = stage.arrive(arrive(length=4, new=2, adapter=2))
    flood(stage, [arrive(length=60, new=2, adapter=1)], 40, depth=20)
    prompt_steps = -(-62 // 16)
    assert waited(stage, late) <= 3 * prompt_steps + 6


def test_a_long_prompt_gets_its_blocks_though_short_ones_keep_coming() -> None:
    tale = story(ranks=capacity(num_blocks=20), limits=limits(max_running=6))
    stage = Stage(tale)
    flood(stage, [arrive(length=8, new=8)], 30)
    late = stage.arrive(arrive(length=70, new=2, adapter=1, first=5))
    flood(stage, [arrive(length=8, new=8)], 200)
    assert waited(stage, late) <= 60


def test_running_requests_get_their_tokens_while_a_long_prompt_is_computed() -> None:
    stage = Stage(story(limits=limits(max_step_tokens=8)))
    first = stage.arrive(arrive(length=3, new=40))
    for _ in range(4):
        stage.go_round()
    stage.arrive(arrive(length=100, new=2, first=7))
    before = len(first.received)
    for _ in range(10):
        stage.go_round()
    assert len(first.received) == before + 10


def alive(stage: Stage, adapter: int | None) -> int:
    """Requests of an adapter that have begun and not ended."""
    return sum(
        client.arrival.adapter == adapter and client.ended is None and bool(client.received)
        for client in stage.clients
    )


def test_a_flood_of_one_adapter_does_not_delay_the_others() -> None:
    """Ticks until the first token, with and without ten times as much from another."""

    def slowest(depth: int) -> int:
        ranks = capacity(adapter_slots=3, num_blocks=200)
        stage = Stage(story(ranks=ranks, limits=limits(max_running=6)))
        calm = [arrive(new=6, adapter=2), arrive(new=6, adapter=3, first=5)]
        for tick in range(240):
            while depth and alive(stage, 1) + len(stage.scheduler._admission.queues.waiting_for(
                AdapterKey(1)
            )) < depth:  # fmt: skip
                stage.arrive(arrive(new=6, adapter=1, first=9))
            if tick % 8 == 0:
                for arrival in calm:
                    stage.arrive(arrival)
            stage.go_round()
        others = [c for c in stage.clients if c.arrival.adapter != 1 and c.arrived < 200]
        return max(waited(stage, client) for client in others)

    alone, flooded = slowest(0), slowest(40)
    # A slot is free when one of the running requests ends: after 6 steps and those in flight.
    assert flooded <= alone + 6 + 3


def test_a_queue_full_of_one_adapter_is_open_to_others() -> None:
    stage = Stage(story(limits=replace(limits(max_running=2), max_queued=8)))
    for _ in range(2 + 8):
        stage.arrive(arrive(new=20, adapter=1))
    with pytest.raises(Overloaded):
        stage.arrive(arrive(new=20, adapter=1))
    late = stage.arrive(arrive(new=2, adapter=2))
    stage.run(600)
    assert waited(stage, late) <= 2 * 20 + 6


def test_an_adapter_runs_no_more_requests_than_its_cap() -> None:
    capped = story(limits=limits(max_running=8), shares={1: AdapterShare(max_concurrent=2)})
    stage = Stage(capped)
    for _ in range(12):
        stage.arrive(arrive(new=6, adapter=1))
    seen = []
    while stage.scheduler.has_work:
        stage.go_round()
        seen.append(alive(stage, 1))
        assert stage.tick < 200
    assert max(seen) == 2
    # One slot stays empty for a tick or two when a request ends: no more than that is lost.
    assert stage.tick <= 12 // 2 * (6 + 4) + 6


def test_a_rate_holds_in_the_long_run_and_does_not_delay_others() -> None:
    rate = 2.0
    slow = story(limits=limits(max_running=8), shares={1: AdapterShare(tokens_per_second=rate)})
    stage = Stage(slow)
    clients = [stage.arrive(arrive(new=8, adapter=1)) for _ in range(40)]
    for _ in range(100):
        stage.go_round()
    used = sum(len(c.received) + 3 for c in clients if c.received)
    assert rate * 100 * 0.8 <= used <= rate * (100 + 1) + 8 * (8 + 3)
    late = stage.arrive(arrive(adapter=2))
    for _ in range(6):
        stage.go_round()
    assert waited(stage, late) <= 5
    assert stage.scheduler.next_wake is not None


def test_an_adapter_in_debt_takes_no_room_on_the_device() -> None:
    """Others run on its slot meanwhile, and no request waits for its sake."""
    in_debt: dict[int | None, AdapterShare] = {1: AdapterShare(tokens_per_second=0.5)}
    stage = Stage(story(ranks=capacity(adapter_slots=1), limits=limits(), shares=in_debt))
    first = stage.arrive(arrive(new=30, adapter=1))
    second = stage.arrive(arrive(new=2, adapter=1))
    while first.ended is None:
        stage.go_round()
    ended = stage.tick
    others = [stage.arrive(arrive(new=3, adapter=key)) for key in (2, 3, 4)]
    for _ in range(30):
        stage.go_round()
    assert all(client.ended is not None for client in others)
    assert second.first_tick is None
    stage.run(200)
    assert waited(stage, second) >= 2 * 33 - 2
    assert waited(stage, second) <= 2 * 33 + PATIENCE + ended


def test_a_request_of_an_adapter_in_debt_evicts_nothing() -> None:
    """It came while another adapter had the slot; the other goes on until the debt is paid."""
    in_debt: dict[int | None, AdapterShare] = {1: AdapterShare(tokens_per_second=0.1)}
    stage = Stage(story(ranks=capacity(adapter_slots=1), limits=limits(), shares=in_debt))
    first = stage.arrive(arrive(new=4, adapter=1))
    while first.ended is None:
        stage.go_round()
    busy = arrive(new=4, adapter=2)
    flood(stage, [busy], 20)
    late = stage.arrive(arrive(new=2, adapter=1))
    before = stage.scheduler.adapter_states()[AdapterKey(2)]
    flood(stage, [busy], 2 * PATIENCE)
    turns_of_others = sorted(c.first_tick for c in stage.clients if c.first_tick is not None)
    assert max(later - earlier for earlier, later in pairwise(turns_of_others[1:])) <= 4 + 2
    assert late.first_tick is None
    assert stage.scheduler.adapter_states()[AdapterKey(2)] is before is AdapterState.DEVICE


def test_a_higher_priority_is_first_and_a_lower_one_is_not_starved() -> None:
    steps = 4
    ranked: dict[int | None, AdapterShare] = {
        1: AdapterShare(priority=2),
        2: AdapterShare(priority=-2),
    }
    stage = Stage(story(limits=limits(max_running=1), shares=ranked))
    high, low = arrive(new=steps, adapter=1), arrive(new=steps, adapter=2)
    flood(stage, [high], 20)
    late = stage.arrive(low)
    flood(stage, [high], 600)
    # One slot, so that an admission takes what a request runs, and two plans in flight.
    bound = (PASSED_OVER + 3 * 2) * (steps + 2)
    assert waited(stage, late) <= bound
    first_turns = [c.first_tick for c in stage.clients if c.arrival.adapter == 1 and c.first_tick]
    assert late.first_tick is not None
    passed = [tick for tick in first_turns if late.arrived < tick < late.first_tick]
    assert len(passed) >= PASSED_OVER


def test_a_step_costs_the_same_however_many_adapters_are_known() -> None:
    """Counted in looks at adapters, which is what could grow."""

    def looks(num_adapters: int) -> int:
        stage = Stage(story(ranks=capacity(host_bytes=10**6), limits=limits(), num_adapters=10**4))
        for key in range(1, num_adapters + 1):
            stage.arrive(arrive(new=30, adapter=key))
        for _ in range(12):
            stage.go_round()
        count = 0
        readiness = Residency.readiness

        def counted(self: Residency, key: AdapterKey) -> AdapterReadiness:
            nonlocal count
            count += 1
            return readiness(self, key)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Residency, "readiness", counted)
            stage.scheduler.schedule(float(stage.tick + 1))
        return count

    assert looks(400) <= looks(40) <= 3 * admission_queue.MAX_LOADS_SEEN

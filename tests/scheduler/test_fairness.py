"""Nobody starves: bounds in steps, under loads that never end."""

from itertools import pairwise

import pytest

from configs.adapters import AdapterKey
from scheduler import scheduler
from scheduler.policy import Limits
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
    """Turns from arrival to the first token."""
    assert client.first_turn is not None
    return client.first_turn - client.arrived


def flood(stage: Stage, arrivals: list[Arrive], turns: int, depth: int = 6) -> None:
    """Keep `depth` requests of each kind alive for so many turns."""
    alive: list[list[Client]] = [[] for _ in arrivals]
    for _ in range(turns):
        for arrival, clients in zip(arrivals, alive, strict=True):
            clients[:] = [client for client in clients if client.ended is None]
            while len(clients) < depth:
                clients.append(stage.arrive(arrival))
        stage.go_round()


def test_a_newcomer_does_not_overtake_older_claims() -> None:
    """With a slot free now and then, everybody waits about as long as everybody else."""
    steps, num_adapters = 10, 8
    stage = Stage(story(ranks=capacity(adapter_slots=2), limits=limits(max_running=8)))
    for index in range(60):
        stage.arrive(arrive(new=steps, adapter=index % num_adapters + 1))
        for _ in range(steps // 2):
            stage.go_round()
    stage.run(1000)
    turns = sorted(waited(stage, client) for client in stage.clients[10:50])
    assert turns[-1] <= 3 * turns[len(turns) // 2]


@pytest.mark.parametrize("steps_of_a_request", [4, 20])
def test_an_adapter_gets_room_though_another_never_stops(steps_of_a_request: int) -> None:
    stage = Stage(story(ranks=capacity(adapter_slots=1), limits=limits()))
    busy = arrive(new=steps_of_a_request, adapter=1)
    flood(stage, [busy], 30)
    late = stage.arrive(arrive(adapter=2))
    flood(stage, [busy], 3 * (PATIENCE + steps_of_a_request))
    # Its patience, what the other still runs, and a few turns to stage, fill and answer.
    assert waited(stage, late) <= PATIENCE + steps_of_a_request + 6


def test_the_nth_claim_waits_for_n_times_what_a_request_runs() -> None:
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
        if client.first_turn is not None:
            served.setdefault(client.arrival.adapter, []).append(client.first_turn)
    assert len(served) == num_adapters
    bound = num_adapters * (PATIENCE + 2 * steps + 6)
    for turns in served.values():
        turns.sort()
        gaps = [later - earlier for earlier, later in pairwise(turns)]
        assert max([turns[0], stage.turn - turns[-1], *gaps]) <= bound


@pytest.mark.parametrize("budget", [8, 16])
def test_far_more_claims_than_a_step_looks_at_are_all_served(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claims that got room but lack tokens must not let younger ones reserve over them."""
    monkeypatch.setattr(scheduler, "MAX_CLAIMS_SEEN", 2)
    steps, num_adapters = 5, 30
    tight = limits(max_running=8, max_step_tokens=budget)
    stage = Stage(story(ranks=capacity(adapter_slots=4), limits=tight))
    for index in range(4 * num_adapters):
        stage.arrive(arrive(length=20, new=steps, adapter=index % num_adapters + 1))
    stage.run(4 * num_adapters * (20 // (budget - 4) + steps))
    first = [stage.clients[index].first_turn or 0 for index in range(num_adapters)]
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
    assert waited(stage, client) <= 7 * (PATIENCE + 8 + 6)


def test_the_base_model_is_not_starved_by_adapters_nor_they_by_it() -> None:
    stage = Stage(story(ranks=capacity(adapter_slots=2), limits=limits(max_running=2)))
    flood(stage, [arrive(new=5), arrive(new=5, adapter=1), arrive(new=5, adapter=2)], 600)
    done = {None: 0, 1: 0, 2: 0}
    for client in stage.clients:
        done[client.arrival.adapter] += client.ended is not None
    assert max(done.values()) <= 1.3 * min(done.values())


def test_one_tenants_long_prompts_do_not_hold_up_anothers_short_ones() -> None:
    """Turns are in tokens: between two of the short ones comes at most a quantum and a prompt."""
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


def test_running_requests_all_get_their_token_while_a_long_prompt_comes_in() -> None:
    stage = Stage(story(limits=limits(max_step_tokens=8)))
    first = stage.arrive(arrive(length=3, new=40))
    for _ in range(4):
        stage.go_round()
    stage.arrive(arrive(length=100, new=2, first=7))
    before = len(first.received)
    for _ in range(10):
        stage.go_round()
    assert len(first.received) == before + 10

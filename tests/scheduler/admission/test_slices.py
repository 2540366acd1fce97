"""Slices: how long an adapter keeps its slot on the device while others wait for one."""

from dataclasses import replace

import msgspec
import pytest

from configs.wire.adapters import AdapterKey, AdapterShape
from scheduler.adapters.resident import AdapterState
from scheduler.running import SHORTEST_SLICE
from tests.scheduler.admission.test_fairness import PATIENCE, limits, waited
from tests.scheduler.small import arrive, capacity, story
from tests.scheduler.stage import Stage
from tests.strategies import Unload


@pytest.mark.parametrize("slice_steps", [5, 20])
def test_long_requests_make_room_for_another_adapter_and_resume(
    slice_steps: int,
) -> None:
    tight = replace(limits(), slice_steps=slice_steps)
    stage = Stage(story(ranks=capacity(adapter_slots=1, num_blocks=200), limits=tight))
    busy = [stage.arrive(arrive(new=150, adapter=1, first=first)) for first in (1, 4, 7)]
    for _ in range(8):
        stage.go_round()
    late = stage.arrive(arrive(new=4, adapter=2))
    stage.run(2000)
    assert waited(stage, late) <= PATIENCE + slice_steps + 8
    assert all(len(client.received) == 150 for client in busy)
    snapshot = stage.scheduler.snapshot()
    assert snapshot.num_preemptions == 3
    # What was computed is found again, but for a block and what two plans in flight had added.
    assert stage.computed <= 3 * (152 + 2 * 4 + 2) + 6


def test_an_adapter_that_makes_room_is_unloaded_and_forgotten() -> None:
    """The third takes the pages of both others, of which the first is gone long before."""
    tight = replace(limits(), slice_steps=30, prefix_caching=False)
    told = story(ranks=capacity(adapter_slots=3, num_blocks=200), limits=tight)
    told = replace(told, shapes={**told.shapes, AdapterKey(3): AdapterShape((8, 8), 10)})
    stage = Stage(told)
    first, second = (
        stage.arrive(arrive(new=most, adapter=key)) for key, most in ((1, 45), (2, 59))
    )
    for _ in range(8):
        stage.go_round()
    stage.act(Unload(AdapterKey(1)))
    third = stage.arrive(arrive(adapter=3))
    stage.run(400)
    assert [len(each.received) for each in (first, second, third)] == [45, 59, 4]
    assert AdapterKey(1) not in stage.scheduler.adapter_states()


@pytest.mark.parametrize(("adapter_slots", "adapters", "most"), [(1, 2, 6), (3, 5, 6)])
def test_prompts_longer_than_a_slice_end_though_the_cache_holds_not_all(
    adapter_slots: int, adapters: int, most: int
) -> None:
    """Each takes two thirds of the blocks, so nothing is kept of what another had computed."""
    tight = replace(limits(max_step_tokens=64), slice_steps=4, patience_steps=0)
    ranks = capacity(adapter_slots=adapter_slots, num_blocks=150)
    told = story(ranks=msgspec.structs.replace(ranks, max_total_tokens=500), limits=tight)
    stage = Stage(told)
    for key in range(1, adapters + 1):
        stage.arrive(arrive(length=400, new=40, adapter=key, first=key))
    stage.run(4000)
    assert stage.computed <= most * adapters * 440


def test_a_request_is_not_preempted_before_its_slice_is_over() -> None:
    """Two adapters alternate on one slot; each time every request gets a slice."""
    tight = replace(limits(max_running=2), slice_steps=10, patience_steps=0)
    stage = Stage(story(ranks=capacity(adapter_slots=1, num_blocks=200), limits=tight))
    for adapter in (1, 2):
        stage.arrive(arrive(new=100, adapter=adapter))
    stage.run(2000)
    assert stage.scheduler.snapshot().num_preemptions <= 2 * 100 // 10


@pytest.mark.parametrize("pending", [1, 2, 4, 8])
def test_slices_are_short_where_few_wait_for_many_and_where_many_wait_for_few(
    pending: int,
) -> None:
    """A single pending load hardly waits, and the wait does not grow with the number of many."""
    residents, longest = 4, 100
    tight = replace(limits(max_running=8, max_step_tokens=64), slice_steps=longest)
    stage = Stage(story(ranks=capacity(adapter_slots=residents, num_blocks=300), limits=tight))
    busy = [stage.arrive(arrive(new=160, adapter=key, first=key)) for key in (1, 2, 3, 4)]
    for _ in range(8):
        stage.go_round()
    late = [stage.arrive(arrive(new=2, adapter=5 + key)) for key in range(pending)]
    stage.run(2000)
    first = min(waited(stage, client) for client in late)
    many = 2 * SHORTEST_SLICE * residents**2 // pending
    share = max(min(longest * pending // residents, many), SHORTEST_SLICE + PATIENCE)
    assert share - 8 <= first <= share + 8
    assert all(len(client.received) == 160 for client in busy)


def test_a_request_that_ends_soon_is_not_preempted() -> None:
    tight = replace(limits(max_running=2), slice_steps=10, patience_steps=0)
    stage = Stage(story(ranks=capacity(adapter_slots=1, num_blocks=200), limits=tight))
    first, second = (
        stage.arrive(arrive(new=10 + SHORTEST_SLICE, adapter=adapter)) for adapter in (1, 2)
    )
    stage.run(400)
    assert stage.scheduler.snapshot().num_preemptions == 0
    assert waited(stage, second) - waited(stage, first) <= 10 + SHORTEST_SLICE + 6


def test_an_adapter_yields_after_its_slice_though_new_requests_arrive() -> None:
    """A slot is shared by time: requests that just joined start no new slice."""
    tight = limits(max_running=40, max_step_tokens=200)
    stage = Stage(story(ranks=capacity(adapter_slots=3, num_blocks=900), limits=tight))
    late = None
    for tick in range(170):
        if tick % 8 == 0:
            for key in (1, 2, 3):
                stage.arrive(arrive(new=100, adapter=key, first=tick))
        if tick == 150:
            late = stage.arrive(arrive(adapter=4))
        stage.go_round()
    assert late is not None
    # Its patience, and what it takes to drain, to load and to reply.
    assert waited(stage, late) <= PATIENCE + 6
    stage.run(2000)


def test_the_adapter_that_began_last_keeps_its_slot() -> None:
    tight = replace(limits(max_running=8, max_step_tokens=64), slice_steps=100)
    stage = Stage(story(ranks=capacity(adapter_slots=2, num_blocks=300), limits=tight))
    old = stage.arrive(arrive(new=180, adapter=1))
    for _ in range(60):
        stage.go_round()
    young = stage.arrive(arrive(new=180, adapter=2, first=3))
    again = stage.arrive(arrive(new=180, adapter=1, first=6))  # the last to admit is the old one
    for _ in range(4):
        stage.go_round()
    late = stage.arrive(arrive(new=40, adapter=3))
    for _ in range(PATIENCE + 5):
        stage.go_round()
        assert stage.scheduler.adapter_states()[AdapterKey(2)] is AdapterState.DEVICE
    assert waited(stage, late) <= PATIENCE + 6
    stage.run(2000)
    assert all(len(client.received) == 180 for client in (old, young, again))


def test_steps_full_of_one_adapters_prompts_count_for_several() -> None:
    """Patience is time: another adapter does not wait the longer the longer the steps are."""
    wide = limits(max_running=200, max_step_tokens=2048)
    stage = Stage(story(ranks=capacity(adapter_slots=1, num_blocks=9000), limits=wide))
    stage.arrive(arrive(new=150, adapter=1))
    for _ in range(60):
        stage.go_round()
    for first in range(120):
        stage.arrive(arrive(length=150, new=40, adapter=1, first=first))
    late = stage.arrive(arrive(adapter=2))
    for _ in range(PATIENCE + 6):
        stage.go_round()
    assert waited(stage, late) < PATIENCE
    stage.run(4000)

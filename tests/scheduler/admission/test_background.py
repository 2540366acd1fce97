"""Background requests take what others leave, and nothing else."""

from dataclasses import replace

from configs.wire.adapters import AdapterKey
from scheduler.adapters.resident import AdapterState
from scheduler.admission.limits import Limits
from tests.scheduler.admission.test_fairness import flood, limits, waited
from tests.scheduler.small import arrive, capacity, story
from tests.scheduler.stage import Stage


def test_a_background_request_waits_while_others_do() -> None:
    stage = Stage(story(limits=limits(max_running=1)))
    late = stage.arrive(replace(arrive(new=4), background=True))
    flood(stage, [arrive(new=4), arrive(new=4, adapter=1)], 400)
    assert late.first_tick is None
    stage.run(500)
    assert late.ended is not None
    assert len(late.received) == 4


def test_one_that_runs_leaves_its_slot_to_others_and_goes_on_later() -> None:
    stage = Stage(story(limits=limits(max_running=2)))
    jobs = [stage.arrive(replace(arrive(new=60, first=n), background=True)) for n in (1, 2)]
    for _ in range(8):
        stage.go_round()
    assert all(job.first_tick is not None for job in jobs)
    online = [stage.arrive(arrive(new=3)) for _ in range(2)]
    while any(client.ended is None for client in online):
        stage.go_round()
    # Two plans may be in flight with the one that leaves.
    assert max(waited(stage, client) for client in online) <= 6
    assert stage.scheduler.snapshot().num_preemptions == 2
    stage.run(500)
    assert [len(job.received) for job in jobs] == [60, 60]


def test_one_that_runs_leaves_its_blocks_to_others() -> None:
    stage = Stage(story(limits=limits(), ranks=capacity(num_blocks=12)))
    job = stage.arrive(replace(arrive(new=40), background=True))
    for _ in range(30):
        stage.go_round()
    online = stage.arrive(arrive(length=20, new=20))
    while online.ended is None:
        stage.go_round()
    assert waited(stage, online) <= 6
    stage.run(500)
    assert len(job.received) == 40


def test_no_adapter_leaves_the_device_for_a_background_request() -> None:
    stage = Stage(story(limits=limits(), ranks=capacity(adapter_slots=1)))
    late = stage.arrive(replace(arrive(adapter=2), background=True))
    first = stage.arrive(arrive(adapter=1))
    flood(stage, [arrive(adapter=1)], 300)
    assert first.ended is not None
    assert late.first_tick is None or late.first_tick < (first.first_tick or 0)
    assert stage.scheduler.adapter_states()[AdapterKey(1)] is AdapterState.DEVICE


def test_an_online_request_of_the_same_adapter_is_first() -> None:
    stage = Stage(story(limits=limits(max_running=1)))
    jobs = [stage.arrive(replace(arrive(new=3, adapter=1), background=True)) for _ in range(5)]
    online = stage.arrive(arrive(new=3, adapter=1))
    stage.run(500)
    assert online.first_tick is not None
    assert all((job.first_tick or 0) > online.first_tick for job in jobs)


def test_background_requests_have_no_others_refused() -> None:
    few = Limits(max_running=1, max_queued=2)
    stage = Stage(story(limits=few))
    for _ in range(20):
        stage.arrive(replace(arrive(), background=True))
    online = [stage.arrive(arrive()) for _ in range(2)]
    stage.run(2000)
    assert all(client.ended is not None for client in (*online, *stage.clients))

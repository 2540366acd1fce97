"""Loads delay nothing: a running request gets a token at each tick, whatever is moved."""

import pytest

from configs.wire.adapters import AdapterKey
from configs.wire.sampling import Stopping
from scheduler.admission.limits import Limits
from scheduler.events import AdapterPinned, AdapterUnloaded, AdapterWanted
from scheduler.snapshot import AdapterCounts
from tests.scheduler.small import arrive, capacity, story
from tests.scheduler.stage import Client, Stage
from tests.strategies import Arrive

PINNED = AdapterKey(1)
OTHERS = [AdapterKey(key) for key in range(2, 34)]
TICKS = 160


def begun(slots: int, host_bytes: int, delay: int, copy: int) -> tuple[Stage, list[Client]]:
    """A stage on which two requests run, one over the base model and one over a pinned adapter."""
    tale = story(
        ranks=capacity(num_blocks=300, adapter_slots=slots, host_bytes=host_bytes),
        limits=Limits(max_step_tokens=64, max_running=16, max_queued=1000, patience_steps=8),
    )
    tale.delays.update({key: delay + key % 3 if delay else 0 for key in OTHERS})
    tale.copies.update({key: copy + key % 2 if copy else 0 for key in OTHERS})
    stage = Stage(tale)
    stage.send(AdapterPinned(PINNED, True))
    prompt = (1, 2, 3)
    running = [stage.arrive(Arrive(prompt, Stopping(190), key)) for key in (None, PINNED)]
    while not all(client.received for client in running):
        stage.go_round()
    for _ in range(2):
        stage.go_round()
    return stage, running


def tick(stage: Stage, running: list[Client]) -> None:
    """Go round once: each of them gets one token, no fewer and no more."""
    before = [len(client.received) for client in running]
    stage.go_round()
    assert [len(client.received) for client in running] == [count + 1 for count in before]


def counts(stage: Stage) -> AdapterCounts:
    return stage.scheduler.snapshot().adapter_counts


@pytest.mark.parametrize("delay", [0, 6], ids=["quick disk", "slow disk"])
@pytest.mark.parametrize("copy", [0, 5], ids=["quick bus", "slow bus"])
@pytest.mark.parametrize(
    ("slots", "host_bytes"), [(3, 1000), (3, 50), (8, 100)], ids=["device", "both", "host"]
)
def test_loads_and_evictions_do_not_delay_running_requests(
    slots: int, host_bytes: int, copy: int, delay: int
) -> None:
    """Two new requests every third tick push adapters through tiers that are far too small."""
    stage, running = begun(slots, host_bytes, delay, copy)
    for index in range(TICKS):
        if index % 3 == 0:
            for offset in (0, 1):
                key = OTHERS[(2 * index // 3 + offset) % len(OTHERS)]
                stage.arrive(arrive(new=2, adapter=key))
        tick(stage, running)
    found = counts(stage)
    assert found.loads >= 16
    assert found.device_evictions >= 8
    if host_bytes < 10 * len(OTHERS):
        assert found.host_evictions >= 8


def test_pins_and_unloads_do_not_delay_running_requests() -> None:
    """Loads without requests, pins, unloads, and adapters that cannot be read."""
    stage, running = begun(slots=4, host_bytes=80, delay=3, copy=2)
    object.__setattr__(stage.story, "failing", frozenset(OTHERS[::3]))
    for index in range(TICKS):
        key = OTHERS[index // 4 % len(OTHERS)]
        if index % 4 == 0:
            stage.wanted.add(key)
            stage.send(AdapterWanted(key))
            stage.send(AdapterPinned(key, index % 8 == 0))
        elif index % 4 == 3:
            stage.send(AdapterUnloaded(OTHERS[(index // 4 - 2) % len(OTHERS)]))
        tick(stage, running)
    assert counts(stage).staged >= 16
    assert len(stage.has_failed) >= 8
    assert counts(stage).loads >= 8


def test_a_disk_that_hangs_does_not_delay_running_requests() -> None:
    """Nor does it delay new ones: requests over other adapters come and end meanwhile."""
    stage, running = begun(slots=4, host_bytes=1000, delay=0, copy=0)
    hung, quick = OTHERS[:8], OTHERS[8:]
    stage.story.delays.update({key: 10_000 for key in hung})
    waiting = [stage.arrive(arrive(new=2, adapter=key)) for key in hung]
    served = []
    for index in range(TICKS):
        if index % 4 == 0:
            served.append(stage.arrive(arrive(new=2, adapter=quick[index // 4 % len(quick)])))
        tick(stage, running)
    assert all(client.ended is not None for client in served[:-10])
    assert not any(client.received for client in waiting)

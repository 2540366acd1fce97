"""The map of adapters: from disk to the device and back, and what is refused on the way."""

from configs.wire.adapters import AdapterKey, AdapterRefusal, AdapterShape
from configs.wire.plan import Capacity
from scheduler.adapters.residency import AdapterReadiness, Residency
from scheduler.adapters.resident import AdapterState
from scheduler.step import StepBuilder
from tests.scheduler.small import capacity

ONE, TWO = AdapterKey(1), AdapterKey(2)
SMALL = AdapterShape((1, 1), 10)


def staged(residency: Residency, key: AdapterKey, shape: AdapterShape = SMALL) -> None:
    residency.add_waiting(key)
    assert residency.host.to_stage() == [key]
    assert residency.staged(key, shape) is None


def used(residency: Residency, key: AdapterKey) -> StepBuilder:
    """A request of a staged adapter is admitted, after a load if it needs one."""
    step = StepBuilder(10)
    if residency.readiness(key) is AdapterReadiness.CAN_LOAD:
        residency.load(key, step)
        residency.loaded(key)
    residency.acquire(key)
    residency.remove_waiting(key)
    return step


def state(residency: Residency, key: AdapterKey) -> AdapterState | None:
    return residency.states().get(key)


def test_from_disk_to_the_device_and_idle() -> None:
    residency = Residency(capacity())
    residency.add_waiting(ONE)
    assert state(residency, ONE) is AdapterState.DISK
    assert residency.host.to_stage() == [1]
    assert state(residency, ONE) is AdapterState.STAGING
    assert residency.readiness(ONE) is AdapterReadiness.NOT_STAGED
    residency.staged(ONE, SMALL)
    assert state(residency, ONE) is AdapterState.HOST
    assert residency.readiness(ONE) is AdapterReadiness.CAN_LOAD
    step = StepBuilder(10)
    residency.load(ONE, step)
    assert [(load.key, len(load.pages)) for load in step.loads] == [(1, 2)]
    assert state(residency, ONE) is AdapterState.LOADING
    assert residency.readiness(ONE) is AdapterReadiness.LOADING
    assert residency.has_moves
    residency.loaded(ONE)
    assert residency.readiness(ONE) is AdapterReadiness.READY
    assert state(residency, ONE) is AdapterState.DEVICE
    used(residency, ONE)
    residency.release(ONE)
    residency.check([], [])
    assert state(residency, ONE) is AdapterState.DEVICE


def test_a_second_request_needs_no_second_load() -> None:
    residency = Residency(capacity())
    staged(residency, ONE)
    used(residency, ONE)
    residency.add_waiting(ONE)
    assert used(residency, ONE).loads == []


def test_without_idle_room_an_adapter_is_blocked() -> None:
    residency = Residency(capacity(adapter_slots=1))
    staged(residency, ONE)
    residency.load(ONE, StepBuilder(10))
    staged(residency, TWO)
    residency.remove_waiting(ONE)
    assert residency.readiness(TWO) is AdapterReadiness.MUST_WAIT, "the load is not finished"
    residency.loaded(ONE)
    assert residency.readiness(TWO) is AdapterReadiness.CAN_LOAD
    residency.add_waiting(ONE)
    assert residency.readiness(TWO) is AdapterReadiness.MUST_WAIT, (
        "a request waits for what is there"
    )
    used(residency, ONE)
    assert residency.readiness(TWO) is AdapterReadiness.MUST_WAIT, "and uses it"
    residency.release(ONE)
    assert residency.readiness(TWO) is AdapterReadiness.CAN_LOAD
    used(residency, TWO)
    assert state(residency, ONE) is AdapterState.HOST


def refusal(ranks: Capacity, shape: AdapterShape) -> str:
    residency = Residency(ranks)
    residency.add_waiting(ONE)
    residency.host.to_stage()
    failure = residency.staged(ONE, shape)
    assert failure is not None
    assert failure.refusal is AdapterRefusal.TOO_LARGE
    residency.remove_waiting(ONE)
    step = StepBuilder(1)
    step.dropped = residency.host.drops()
    assert [resident.key for resident in step.dropped] == [1], "the copy is of no use"
    residency.applied(step)
    residency.check([], [])
    assert residency.states() == {}
    return failure.message


def test_an_adapter_that_never_fits_is_refused_with_numbers() -> None:
    too_many = AdapterShape((1, 9), 10)
    message = refusal(capacity(adapter_pages=8), too_many)
    assert "9 pages of 8 rank rows for down_proj" in message
    assert "has 8" in message
    assert "1001 bytes" in refusal(capacity(host_bytes=1000), AdapterShape((1, 1), 1001))
    assert "max_device_adapters" in refusal(capacity(adapter_slots=0), SMALL)


def test_a_failed_adapter_is_tried_again_by_the_next_request() -> None:
    residency = Residency(capacity())
    residency.add_waiting(ONE)
    residency.host.to_stage()
    residency.failed(ONE)
    residency.remove_waiting(ONE)
    assert residency.states() == {}
    residency.add_waiting(ONE)
    assert residency.host.to_stage() == [1]


def test_unexpected_replies_are_ignored() -> None:
    residency = Residency(capacity())
    assert residency.staged(ONE, SMALL) is None
    residency.failed(ONE)
    assert residency.states() == {}
    staged(residency, TWO)
    residency.failed(TWO)
    assert state(residency, TWO) is AdapterState.HOST


def test_a_pinned_adapter_is_staged_and_loaded_without_a_request_and_stays() -> None:
    residency = Residency(capacity(adapter_slots=1))
    residency.pin(ONE, True)
    assert residency.host.to_stage() == [1]
    residency.staged(ONE, SMALL)
    assert residency.has_moves
    step = StepBuilder(10)
    residency.load_pins(step)
    assert [load.key for load in step.loads] == [1]
    residency.loaded(ONE)
    assert not residency.has_moves
    staged(residency, TWO)
    assert residency.readiness(TWO) is AdapterReadiness.MUST_WAIT
    residency.pin(ONE, False)
    assert residency.readiness(TWO) is AdapterReadiness.CAN_LOAD


def test_an_unloaded_adapter_is_removed_when_no_request_uses_it() -> None:
    residency = Residency(capacity())
    staged(residency, ONE)
    used(residency, ONE)
    residency.unload(ONE)
    assert state(residency, ONE) is AdapterState.DEVICE
    residency.release(ONE)
    last = StepBuilder(1)
    last.dropped = residency.host.drops()
    assert [resident.key for resident in last.dropped] == [1]
    residency.applied(last)
    assert residency.states() == {}
    residency.unload(TWO)
    assert residency.states() == {}


def test_a_new_request_cancels_an_unload() -> None:
    residency = Residency(capacity())
    staged(residency, ONE)
    used(residency, ONE)
    residency.unload(ONE)
    residency.add_waiting(ONE)
    residency.release(ONE)
    residency.remove_waiting(ONE)
    assert state(residency, ONE) is AdapterState.DEVICE


def test_after_a_loss_only_wanted_adapters_are_kept() -> None:
    residency = Residency(capacity(adapter_slots=3))
    for key in (ONE, TWO):
        staged(residency, key)
        used(residency, key)
    residency.add_waiting(TWO)
    residency.pin(AdapterKey(3), True)
    residency.reset(capacity(adapter_slots=3))
    assert residency.states() == {2: AdapterState.DISK, 3: AdapterState.DISK}
    assert residency.host.to_stage() == [2, 3]
    assert residency.staged(TWO, SMALL) is None
    assert residency.readiness(TWO) is AdapterReadiness.CAN_LOAD


def test_a_plan_begins_a_limited_number_of_loads() -> None:
    residency = Residency(capacity(adapter_slots=8))
    keys = [AdapterKey(index) for index in range(1, 8)]
    for key in keys:
        residency.pin(key, True)
    for key in residency.host.to_stage():
        residency.staged(key, SMALL)
    steps = [StepBuilder(10), StepBuilder(10), StepBuilder(10)]
    for step in steps:
        residency.load_pins(step)
    assert [[load.key for load in step.loads] for step in steps] == [keys[:4], keys[4:], []]


def test_an_adapter_without_room_on_some_rank_is_staged_again() -> None:
    residency = Residency(capacity(host_bytes=1000))
    residency.add_waiting(ONE)
    residency.host.to_stage()
    residency.deferred(ONE, AdapterShape((1, 1), 900))
    assert state(residency, ONE) is AdapterState.DISK
    step = StepBuilder(1)
    step.dropped = residency.host.drops()
    assert [resident.key for resident in step.dropped] == [ONE]
    residency.applied(step)
    assert residency.host.to_stage() == [ONE]


def test_a_late_report_of_a_load_is_ignored() -> None:
    residency = Residency(capacity())
    residency.loaded(ONE)
    staged(residency, TWO)
    residency.loaded(TWO)
    assert state(residency, TWO) is AdapterState.HOST

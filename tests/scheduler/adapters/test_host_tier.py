"""The host tier: what is staged and dropped, never beyond its bytes."""

from configs.wire.adapters import AdapterKey, AdapterShape
from scheduler.adapters.host_tier import HostTier
from scheduler.adapters.resident import HostCopyState, Resident


def wanted(tier: HostTier, key: int, waiting: int = 1) -> Resident:
    resident = Resident(AdapterKey(key), waiting=waiting, pinned=not waiting)
    tier.enqueue(resident)
    return resident


def staged(tier: HostTier, resident: Resident, num_bytes: int) -> None:
    resident.shape = AdapterShape((1,), num_bytes)
    tier.staged(resident)
    tier.check()


def on_host(tier: HostTier, key: int, num_bytes: int) -> Resident:
    """A staged adapter that no request waits for any more."""
    resident = wanted(tier, key)
    assert tier.to_stage() == [key]
    staged(tier, resident, num_bytes)
    resident.waiting = 0
    return resident


def test_each_key_is_named_once_until_it_is_answered() -> None:
    tier = HostTier(80)
    first = wanted(tier, 1)
    wanted(tier, 2)
    assert tier.to_stage() == [1, 2]
    assert tier.to_stage() == []
    tier.failed(first)
    tier.enqueue(first)
    assert tier.to_stage() == [1]


def test_an_adapter_that_is_not_wanted_any_more_is_not_named() -> None:
    tier = HostTier(80)
    resident = wanted(tier, 1)
    resident.waiting = 0
    assert tier.to_stage() == []


def test_before_sizes_are_known_an_eighth_of_the_tier_is_guessed() -> None:
    tier = HostTier(80)
    for key in range(1, 20):
        wanted(tier, key)
    assert tier.to_stage() == list(range(1, 9))


def test_the_next_ones_are_guessed_to_be_as_large_as_the_largest() -> None:
    tier = HostTier(100)
    on_host(tier, 1, 30)
    for key in (2, 3, 4):
        wanted(tier, key)
    assert tier.to_stage() == [2, 3]


def test_the_least_recent_copy_is_dropped_for_a_wanted_adapter() -> None:
    tier = HostTier(60)
    first, second = on_host(tier, 1, 30), on_host(tier, 2, 30)
    tier.touch(first)
    third = wanted(tier, 3)
    assert tier.to_stage() == []
    assert tier.drops() == [second]
    assert tier.drops() == []
    assert tier.to_stage() == [], "the bytes are free only when the drop was applied"
    tier.dropped(second)
    assert tier.to_stage() == [3]
    staged(tier, third, 30)
    assert tier.num_bytes == 60


def test_nothing_is_dropped_while_there_is_room() -> None:
    tier = HostTier(90)
    on_host(tier, 1, 30)
    wanted(tier, 2)
    assert tier.to_stage() == [2]
    assert tier.drops() == []


def test_copies_that_requests_wait_for_or_plans_load_are_kept() -> None:
    tier = HostTier(60)
    first, second = on_host(tier, 1, 30), on_host(tier, 2, 30)
    first.waiting = 1
    second.loading = True
    wanted(tier, 3)
    assert tier.to_stage() == []
    assert tier.drops() == []
    first.slot = 0  # On the device: the host copy is only a convenience now.
    assert tier.drops() == [first]


def test_a_pinned_copy_is_dropped_last_and_only_for_a_request() -> None:
    tier = HostTier(60)
    first, second = on_host(tier, 1, 30), on_host(tier, 2, 30)
    first.pinned = second.pinned = True
    other = wanted(tier, 3, waiting=0)
    assert tier.to_stage() == []
    assert tier.drops() == [], "one pin does not drop another"
    other.waiting = 1
    assert tier.to_stage() == []
    assert tier.drops() == [first]


def test_pins_without_room_do_not_delay_requests() -> None:
    tier = HostTier(60)
    on_host(tier, 1, 30)
    on_host(tier, 2, 30)
    wanted(tier, 3, waiting=0)
    wanted(tier, 4)
    assert tier.to_stage() == []
    dropped = tier.drops()
    assert len(dropped) == 1
    tier.dropped(dropped[0])
    assert tier.to_stage() == [3], "first come first served once there is room"


def test_a_dropped_adapter_is_not_staged_again_before_the_drop_was_applied() -> None:
    tier = HostTier(60)
    resident = on_host(tier, 1, 30)
    tier.discard(resident)
    assert tier.has_unsent_drops
    resident.waiting = 1
    tier.enqueue(resident)
    assert tier.to_stage() == []
    assert tier.drops() == [resident]
    assert tier.to_stage() == []
    tier.dropped(resident)
    assert tier.to_stage() == [1]
    tier.check()


def test_an_adapter_larger_than_expected_evicts_others() -> None:
    tier = HostTier(60)
    first, second = on_host(tier, 1, 10), on_host(tier, 2, 10)
    third = on_host(tier, 3, 45)
    assert tier.drops() == [first]
    assert tier.drops() == []
    assert second.host_copy is HostCopyState.HELD
    assert third.host_copy is HostCopyState.HELD


def test_one_that_was_too_large_is_tried_again_when_its_own_size_is_free() -> None:
    tier = HostTier(60)
    first, second = on_host(tier, 1, 10), on_host(tier, 2, 10)
    third = wanted(tier, 3)
    assert tier.to_stage() == [3]
    third.shape = AdapterShape((1,), 45)
    tier.failed(third, partly=True)
    tier.enqueue(third)
    assert tier.to_stage() == [], "some rank may hold it until the drop was applied"
    assert tier.drops() == [third]
    tier.dropped(third)
    assert tier.to_stage() == [], "45 bytes are not free, though 10 are"
    assert tier.drops() == [first]
    tier.dropped(first)
    assert tier.to_stage() == [3]
    staged(tier, third, 45)
    assert second.host_copy is HostCopyState.HELD


def test_what_failed_on_some_ranks_is_dropped_on_all() -> None:
    tier = HostTier(60)
    resident = wanted(tier, 1)
    tier.to_stage()
    tier.failed(resident, partly=True)
    tier.check()
    assert tier.has_unsent_drops
    assert tier.drops() == [resident]
    tier.dropped(resident)
    tier.check()
    assert tier.num_bytes == 0

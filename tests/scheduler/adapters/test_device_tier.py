"""The device tier: room, eviction, reservations."""

import msgspec
import pytest

from configs.wire.adapters import AdapterKey, AdapterShape
from scheduler.adapters.device_tier import DeviceTier
from scheduler.adapters.resident import HostCopyState, Resident
from tests.scheduler.small import capacity


def adapter(key: int, pages: int = 1) -> Resident:
    return Resident(AdapterKey(key), AdapterShape((pages, pages), 10), host_copy=HostCopyState.HELD)


def loaded_adapter(tier: DeviceTier, key: int, pages: int = 1, users: int = 0) -> Resident:
    resident = adapter(key, pages)
    tier.allocate(resident)
    resident.users = users
    tier.touch(resident)
    return resident


def check(tier: DeviceTier, *residents: Resident) -> None:
    tier.check({resident.key: resident for resident in residents})


def test_an_adapter_gets_a_slot_and_pages_of_its_own() -> None:
    tier = DeviceTier(capacity(adapter_pages=4))
    first, second = loaded_adapter(tier, 1, 2), loaded_adapter(tier, 2, 2)
    assert first.slot != second.slot
    assert set(first.pages[0]).isdisjoint(second.pages[0])
    check(tier, first, second)


def test_adapters_share_the_few_pages_of_a_small_pool() -> None:
    tier = DeviceTier(msgspec.structs.replace(capacity(adapter_slots=4), pool_pages=(8, 1)))
    first, second = (
        Resident(AdapterKey(key), AdapterShape((1, 1), 10), host_copy=HostCopyState.HELD)
        for key in (1, 2)
    )
    tier.allocate(first)
    first.users = 1
    tier.refresh(first)
    assert not tier.has_room(second)
    assert tier.has_room(
        Resident(AdapterKey(3), AdapterShape((7, 0), 10), host_copy=HostCopyState.HELD)
    )
    first.users = 0
    tier.refresh(first)
    assert tier.allocate(second) == [first]
    tier.touch(second)
    check(tier, second)


def test_the_least_recent_idle_adapter_makes_room() -> None:
    tier = DeviceTier(capacity(adapter_slots=3))
    first, second, third = (loaded_adapter(tier, key) for key in (1, 2, 3))
    tier.touch(first)
    fourth = adapter(4)
    assert tier.allocate(fourth) == [second]
    fourth.loading = True
    tier.refresh(fourth)
    assert not second.on_device
    check(tier, first, third, fourth)


def test_a_wanted_adapter_stays_until_a_reservation_closes_it() -> None:
    tier = DeviceTier(capacity(adapter_slots=1))
    first = loaded_adapter(tier, 1)
    first.waiting = 1
    tier.refresh(first)
    assert not tier.has_room(adapter(2))
    claimant = adapter(2)
    tier.reserve(claimant)
    assert tier.allocate(claimant) == [first]


def test_an_adapter_is_not_closed_before_its_first_admission() -> None:
    """Else two adapters could be loaded in alternation for ever, and neither ever used."""
    tier = DeviceTier(capacity(adapter_slots=2))
    owed, running = loaded_adapter(tier, 1), loaded_adapter(tier, 2, users=1)
    owed.waiting, owed.first_admission_due = 1, True
    tier.refresh(owed)
    tier.reserve(adapter(3))
    assert (tier.is_closed(owed.key), tier.is_closed(running.key)) == (False, True)
    tier.end_reservation()
    running.first_admission_due = True
    tier.reserve(adapter(4))
    assert tier.reserved is None, "it is tried again when one of them was served"
    check(tier, owed, running)


def test_users_loads_and_pins_prevent_an_eviction() -> None:
    tier = DeviceTier(capacity(adapter_slots=3))
    used, loaded, pinned = (
        loaded_adapter(tier, 1, users=1),
        loaded_adapter(tier, 2),
        loaded_adapter(tier, 3),
    )
    loaded.loading, pinned.pinned = True, True
    tier.refresh(loaded)
    tier.refresh(pinned)
    check(tier, used, loaded, pinned)
    assert not tier.has_room(adapter(4))
    used.users = 0
    tier.refresh(used)
    assert tier.has_room(adapter(4))
    with pytest.raises(AssertionError):
        tier.evict(loaded)


def test_no_more_adapters_are_evicted_than_needed() -> None:
    tier = DeviceTier(capacity(adapter_pages=6, adapter_slots=4))
    first, second, third = (loaded_adapter(tier, key, 2) for key in (1, 2, 3))
    assert tier.has_room(adapter(4, 4))
    assert tier.allocate(adapter(4, 4)) == [first, second]
    assert third.on_device


def test_a_reservation_closes_only_adapters_that_hold_its_room() -> None:
    tier = DeviceTier(capacity(adapter_slots=3))
    residents = [loaded_adapter(tier, key, users=1) for key in (1, 2, 3)]
    claimant, other = adapter(4), adapter(5)
    tier.reserve(claimant)
    assert tier.reserved == 4
    assert [tier.is_closed(r.key) for r in residents] == [True, False, False]
    residents[0].users = 0
    tier.refresh(residents[0])
    assert tier.has_room(claimant)
    assert not tier.has_room(other), "what comes free is reserved"
    assert tier.allocate(claimant) == [residents[0]]
    claimant.loading = True
    assert tier.reserved is None
    assert tier.take_reopened() == [1]
    assert tier.take_reopened() == []
    check(tier, *residents, claimant)


def test_a_pin_yields_only_to_an_adapter_that_never_fits_beside_it() -> None:
    tier = DeviceTier(capacity(adapter_slots=2))
    pinned, used = loaded_adapter(tier, 1), loaded_adapter(tier, 2, users=1)
    pinned.pinned = True
    tier.refresh(pinned)
    tier.reserve(adapter(3))
    assert (tier.is_closed(pinned.key), tier.is_closed(used.key)) == (False, True)
    tier.end_reservation()
    used.pinned = True
    claimant = adapter(3)
    tier.reserve(claimant)
    assert tier.is_closed(pinned.key)
    assert tier.has_room(claimant)
    assert tier.allocate(claimant) == [pinned]
    claimant.loading = True
    check(tier, pinned, used, claimant)


def test_a_pin_does_not_yield_while_others_wait_for_their_first_admission() -> None:
    """They will have had it soon; the pin's running requests would be interrupted for nothing."""
    tier = DeviceTier(capacity(adapter_slots=2))
    pinned, owed = loaded_adapter(tier, 1, users=1), loaded_adapter(tier, 2, users=1)
    pinned.pinned = owed.first_admission_due = True
    claimant = adapter(3)
    tier.reserve(claimant)
    assert tier.reserved is None
    owed.first_admission_due = False
    tier.reserve(claimant)
    assert (tier.is_closed(pinned.key), tier.is_closed(owed.key)) == (False, True)
    tier.end_reservation()
    check(tier, pinned, owed)


def test_a_reservation_can_end_without_being_used() -> None:
    tier = DeviceTier(capacity(adapter_slots=1))
    pinned = loaded_adapter(tier, 1)
    pinned.pinned = True
    tier.refresh(pinned)
    tier.reserve(adapter(2))
    assert pinned.evictable
    tier.end_reservation()
    assert not pinned.evictable
    assert tier.take_reopened() == [1]
    check(tier, pinned)

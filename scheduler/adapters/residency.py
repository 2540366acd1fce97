"""Residency: where every adapter is (disk, host memory, device), and which to move next.

The tiers (host_tier.py, device_tier.py) know memory; this file knows requests, pins and plans.
docs/design/adapters.md draws an adapter's life.
"""

from collections import Counter
from enum import Enum

from configs.wire.adapters import AdapterKey, AdapterRefusal, AdapterShape
from configs.wire.plan import Capacity
from scheduler.adapters.device_tier import DeviceTier
from scheduler.adapters.host_tier import HostTier
from scheduler.adapters.resident import AdapterState, HostCopyState, Resident
from scheduler.events import AdapterFailure
from scheduler.request import Request
from scheduler.snapshot import AdapterCounts, AdapterTiers, AdapterView
from scheduler.step import StepBuilder


class AdapterReadiness(Enum):
    """What an adapter can do for a request now."""

    READY = "on the device, admitting"
    LOADING = "on its way to the device"
    CAN_LOAD = "staged, and the device has room"
    MUST_WAIT = "staged, but it must wait for the device"
    NOT_STAGED = "not staged"


class Residency:
    """Every adapter that is used, waited for or pinned, and every one that holds memory.

    now: the admission queue's time, in steps.
    num_loading: adapters with a copy to the device that is not finished on all ranks.
    """

    def __init__(self, capacity: Capacity) -> None:
        self.host = HostTier(capacity.host_bytes)
        self.device = DeviceTier(capacity)
        self._capacity = capacity
        self._residents: dict[AdapterKey, Resident] = {}
        self._unloaded_pins: dict[AdapterKey, Resident] = {}
        self._uses = [0, 0, 0]  # on the device, on the host, not staged
        self._device_evictions = 0
        self._host_evictions = 0
        self._staged = [0, 0]  # adapters, bytes
        self._loaded = [0, 0]
        self.num_loading = 0
        self.now = 0

    @property
    def has_moves(self) -> bool:
        """Whether an adapter is being loaded, or the next plan has a pin's load or a drop."""
        if self.host.has_unsent_drops or self.num_loading:
            return True
        return any(self.readiness(key) is AdapterReadiness.CAN_LOAD for key in self._unloaded_pins)

    def states(self) -> dict[AdapterKey, AdapterState]:
        """Where each known adapter is."""
        return {key: resident.state for key, resident in self._residents.items()}

    def views(self) -> list[AdapterView]:
        """Every known adapter."""
        return [
            AdapterView(
                key=key,
                state=each.state,
                running=each.users,
                waiting=each.waiting,
                pinned=each.pinned,
                draining=each.unloading,
                host_bytes=_host_bytes(each),
                device_pages=sum(len(pages) for pages in each.pages) if each.on_device else 0,
            )
            for key, each in self._residents.items()
        ]

    def tiers(self) -> AdapterTiers:
        """How full the tiers are."""
        return AdapterTiers(
            host_bytes=self.host.num_bytes,
            host_capacity_bytes=self.host.capacity_bytes,
            device_pages=self.device.num_pages,
            device_capacity_pages=sum(self._capacity.pages),
            device_adapters=self.device.num_loaded,
            device_slots=self._capacity.adapter_slots,
        )

    def counts(self) -> AdapterCounts:
        """What happened since start."""
        device_hits, host_hits, misses = self._uses
        host_evictions = self._host_evictions + self.host.num_evictions
        evictions = (self._device_evictions, host_evictions)
        moved = (*self._staged, *self._loaded)
        return AdapterCounts(device_hits, host_hits, misses, *evictions, *moved)

    def readiness(self, key: AdapterKey) -> AdapterReadiness:
        """What a request of this adapter would find; changes nothing."""
        resident = self._residents[key]
        if resident.loading:
            return AdapterReadiness.LOADING
        if resident.on_device:
            closed = self.device.is_closed(key)
            return AdapterReadiness.MUST_WAIT if closed else AdapterReadiness.READY
        if resident.host_copy is not HostCopyState.HELD:
            return AdapterReadiness.NOT_STAGED
        has_room = self.device.has_room(resident)
        return AdapterReadiness.CAN_LOAD if has_room else AdapterReadiness.MUST_WAIT

    def admitting_since(self, key: AdapterKey) -> int:
        """When the adapter admitted the first request after it was loaded or idle."""
        return self._residents[key].admitting_since

    def add_waiting(self, key: AdapterKey) -> None:
        """A request waits for the adapter: staging starts now, not when the request is next."""
        resident = self._get_or_add(key)
        on_host = resident.host_copy is HostCopyState.HELD
        self._uses[0 if resident.on_device else 1 if on_host else 2] += 1
        resident.waiting += 1
        resident.unloading = False
        self.device.refresh(resident)
        self.host.enqueue(resident)

    def remove_waiting(self, key: AdapterKey) -> None:
        """A request does not wait any more: it was admitted or ended."""
        resident = self._residents[key]
        resident.waiting -= 1
        assert resident.waiting >= 0, resident
        # Without waiting requests nothing is due: other adapters may take its room.
        resident.first_admission_due = resident.first_admission_due and resident.waiting > 0
        if resident.waiting == 0 and key == self.device.reserved:
            self.device.end_reservation()
        self._update(resident)

    def load(self, key: AdapterKey, step: StepBuilder) -> None:
        """Bring a staged adapter that has room to the device, beginning with this step."""
        resident = self._residents[key]
        assert resident.host_copy is HostCopyState.HELD, resident
        for victim in self.device.allocate(resident):
            self._evicted(victim)
        # Idle since before now: its slice begins with the first request that it admits.
        resident.loading, resident.idle_since = True, -1
        resident.first_admission_due = resident.waiting > 0
        self.num_loading += 1
        self.device.refresh(resident)
        self._unloaded_pins.pop(resident.key, None)
        step.add_load(resident)
        _count(self._loaded, resident)

    def loaded(self, key: AdapterKey) -> None:
        """All ranks have finished copying the adapter to the device."""
        resident = self._residents.get(key)
        if resident is not None and resident.loading:
            resident.loading = False
            self.num_loading -= 1
            self._update(resident)

    def acquire(self, key: AdapterKey) -> int:
        """Hold the slot of an adapter that is ready, for a request."""
        resident = self._residents[key]
        assert resident.on_device, resident
        assert not resident.loading, resident
        if resident.idle_since is not None and resident.idle_since < self.now:
            resident.admitting_since = self.now  # For a whole step it could have been evicted.
        resident.idle_since = None
        resident.users += 1
        resident.first_admission_due = False
        self.device.touch(resident)
        self.host.touch(resident)
        return resident.slot

    def release(self, key: AdapterKey) -> None:
        """A request that held the adapter has ended, and all plans that named it were applied."""
        resident = self._residents[key]
        resident.users -= 1
        assert resident.users >= 0, resident
        if not (resident.users or resident.waiting):
            resident.idle_since = self.now
        self._update(resident)

    def cancel_reservation(self, key: AdapterKey) -> None:
        """Requests for the adapter may not be admitted for now: no room is kept for them."""
        if key == self.device.reserved:
            self.device.end_reservation()
        resident = self._residents[key]
        resident.first_admission_due = False
        self.device.refresh(resident)

    def reserve(self, key: AdapterKey, latest: int | None = None) -> None:
        """Have others make room for an adapter that has waited for long; see DeviceTier."""
        self.device.reserve(self._residents[key], latest)

    def staged(self, key: AdapterKey, shape: AdapterShape) -> AdapterFailure | None:
        """The ranks hold the adapter in host memory; a failure if it can never be loaded."""
        resident = self._residents.get(key)
        if resident is None or resident.host_copy is not HostCopyState.STAGING:
            return None  # A reply to a command that was sent to an earlier group of ranks.
        assert len(shape.num_pages) == len(self._capacity.projections), shape
        resident.shape = shape
        self.host.staged(resident)
        _count(self._staged, resident)
        failure = self._too_large(shape)
        if failure is not None:  # Unpinned first, or the pin would have it staged again.
            self._unpin(resident)
            self.host.discard(resident)
        self._update(resident)
        return failure

    def deferred(self, key: AdapterKey, shape: AdapterShape) -> None:
        """Some rank had no room for the adapter; it is staged again once there is enough."""
        resident = self._residents.get(key)
        if resident is not None and resident.host_copy is HostCopyState.STAGING:
            resident.shape = shape
            self.host.failed(resident, partly=True)
            self._update(resident)

    def failed(self, key: AdapterKey, partly: bool = False) -> None:
        """The adapter could not be staged; the next request for it tries again.

        partly: some rank holds it, or may come to.
        """
        resident = self._residents.get(key)
        if resident is not None and resident.host_copy is HostCopyState.STAGING:
            self.host.failed(resident, partly)
            self._unpin(resident)
            self._update(resident)

    def pin(self, key: AdapterKey, pinned: bool) -> None:
        """Keep the adapter on the device from when there is room, or no longer."""
        resident = self._get_or_add(key)
        self._unpin(resident)
        if pinned:
            resident.pinned = True
            resident.unloading = False
            if not resident.on_device:
                self._unloaded_pins[key] = resident
        if self.device.reserved is not None:
            self.device.end_reservation()  # It was computed with the old pins.
        self.host.enqueue(resident)
        self._update(resident)

    def request_staging(self, key: AdapterKey) -> bool:
        """Have the adapter staged without a request; True if there is nothing to wait for."""
        resident = self._get_or_add(key)
        resident.unloading = False
        resident.stage_requested = not (
            resident.host_copy is HostCopyState.HELD or resident.on_device
        )
        self.host.enqueue(resident)
        return not resident.stage_requested

    def take_stage_request(self, key: AdapterKey) -> bool:
        """Whether a command waits for the adapter to be staged; from now on none does."""
        resident = self._residents.get(key)
        if resident is None or not resident.stage_requested:
            return False
        resident.stage_requested = False
        self._update(resident)
        return True

    def unload(self, key: AdapterKey) -> None:
        """Forget the adapter once no request uses it or waits for it."""
        resident = self._get_or_add(key)
        resident.unloading = True
        self.pin(key, False)

    def load_pins(self, step: StepBuilder) -> None:
        """Load staged pinned adapters that have room, without waiting for a request."""
        for key in list(self._unloaded_pins):  # `load` removes entries.
            if step.may_load and self.readiness(key) is AdapterReadiness.CAN_LOAD:
                self.load(key, step)

    def applied(self, step: StepBuilder) -> None:
        """A plan with drops was executed by all ranks."""
        for resident in step.dropped:
            self.host.dropped(resident)
            self._update(resident)

    @property
    def moving(self) -> list[AdapterKey]:
        """Adapters that are being copied to the host or to the device."""
        return [key for key, each in self._residents.items() if _is_moving(each)]

    def reset(self, capacity: Capacity) -> None:
        """The ranks are gone, or new ones came with this `capacity` and no adapter yet."""
        self._capacity = capacity
        self._host_evictions += self.host.num_evictions
        self.host = HostTier(capacity.host_bytes, min(self.host.largest, capacity.host_bytes))
        self.device = DeviceTier(capacity)
        self._unloaded_pins = {}
        self.num_loading = 0
        for key, resident in list(self._residents.items()):
            # What requests and operators need survives the ranks; where bytes were does not.
            fresh = Resident(
                key,
                waiting=resident.waiting,
                pinned=resident.pinned,
                stage_requested=resident.stage_requested,
            )
            self._residents[key] = fresh
            if fresh.pinned:
                self._unloaded_pins[key] = fresh
            self.host.enqueue(fresh)
            self._update(fresh)

    def check(self, held: list[Request], waiting: list[Request]) -> None:
        """Assert that memory adds up and that users and waiting count exactly these requests."""
        self.host.check()
        self.device.check(self._residents)
        users = Counter(request.adapter for request in held)
        waits = Counter(request.adapter for request in waiting)
        for key, resident in self._residents.items():
            assert (resident.users, resident.waiting) == (users[key], waits[key]), resident
            assert not resident.forgettable, resident
        assert {*users, *waits} - {None} <= set(self._residents)
        assert self.num_loading == sum(r.loading for r in self._residents.values())
        pins = {key for key, r in self._residents.items() if r.pinned and not r.on_device}
        assert self._unloaded_pins.keys() == pins

    def _get_or_add(self, key: AdapterKey) -> Resident:
        if key not in self._residents:
            self._residents[key] = Resident(key)
        return self._residents[key]

    def _unpin(self, resident: Resident) -> None:
        resident.pinned = False
        self._unloaded_pins.pop(resident.key, None)

    def _too_large(self, shape: AdapterShape) -> AdapterFailure | None:
        """Why an adapter of this shape can never be loaded; None if it can."""
        capacity = self._capacity
        if capacity.adapter_slots < 1:
            message = "the device has no room for adapters; raise max_device_adapters"
            return AdapterFailure(AdapterRefusal.TOO_LARGE, message)
        needs = zip(capacity.projections, shape.num_pages, capacity.pages, strict=True)
        for name, count, most in needs:
            if count > most:
                message = (
                    f"the adapter needs {count} pages of 8 rank rows for {name}, but the device "
                    f"has {most}; lower its rank or raise device_pages"
                )
                return AdapterFailure(AdapterRefusal.TOO_LARGE, message)
        if shape.host_bytes > capacity.host_bytes:
            message = (
                f"the adapter needs {shape.host_bytes} bytes of host memory on each rank, but "
                f"the tier has {capacity.host_bytes}; raise host_bytes"
            )
            return AdapterFailure(AdapterRefusal.TOO_LARGE, message)
        return None

    def _evicted(self, resident: Resident) -> None:
        """The adapter was evicted; it may be staged and loaded again."""
        self._device_evictions += 1
        if resident.pinned:  # A reservation took its room; it is loaded again when there is some.
            self._unloaded_pins[resident.key] = resident
        self.host.enqueue(resident)
        if resident.forgettable:
            del self._residents[resident.key]

    def _update(self, resident: Resident) -> None:
        """A count has fallen: unload what was to be unloaded, forget empty records."""
        self.device.refresh(resident)
        # Bytes that are being copied cannot be dropped: `loaded` or `staged` comes here again.
        busy = resident.users or resident.waiting or _is_moving(resident)
        if resident.unloading and not busy:
            resident.unloading = False
            if resident.on_device:
                self.device.evict(resident)
            if resident.host_copy is HostCopyState.HELD:
                self.host.discard(resident)
        if resident.forgettable:
            self._residents.pop(resident.key, None)


def _is_moving(resident: Resident) -> bool:
    return resident.loading or resident.host_copy is HostCopyState.STAGING


def _host_bytes(resident: Resident) -> int:
    """Bytes of its host copy on each rank."""
    held = resident.host_copy is HostCopyState.HELD
    return resident.shape.host_bytes if held and resident.shape else 0


def _count(sums: list[int], resident: Resident) -> None:
    """Add an adapter to (adapters, bytes)."""
    assert resident.shape is not None
    sums[0] += 1
    sums[1] += resident.shape.host_bytes

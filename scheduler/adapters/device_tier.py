"""DeviceTier: which adapters hold a slot and pages on the device, and which must make room.

An adapter is evicted only while no request holds it or waits for it and it is not being loaded;
the least recently admitting one goes first. A reservation, for an adapter that has waited for
long, closes the adapters that hold the room it needs: they stop admitting, so that they become idle
though requests wait for them. An adapter is not closed before it has admitted one of the requests
that it was loaded for; otherwise two adapters could evict each other for ever without serving
anything.
"""

from collections import OrderedDict
from collections.abc import Sequence

from configs.wire.adapters import AdapterKey
from configs.wire.plan import Capacity
from scheduler.adapters.page_pool import AdapterPages
from scheduler.adapters.resident import Resident


class DeviceTier:
    """Loaded adapters in the order of their last admission.

    reserved: the adapter that others make room for, and admit nothing meanwhile.
    """

    def __init__(self, capacity: Capacity) -> None:
        num_projections = len(capacity.projections)
        self._none = [0] * num_projections
        self._pages = AdapterPages(capacity.pages, capacity.adapter_slots)
        self._loaded: OrderedDict[AdapterKey, Resident] = OrderedDict()
        self._idle_slots = 0
        self._idle_pages = [0] * num_projections
        self.reserved: AdapterKey | None = None
        self._closed: set[AdapterKey] = set()
        self._reopened: list[AdapterKey] = []

    @property
    def num_loaded(self) -> int:
        """How many adapters hold a slot."""
        return len(self._loaded)

    @property
    def num_pages(self) -> int:
        """Pages that they hold, over all projections."""
        return sum(len(pages) for resident in self._loaded.values() for pages in resident.pages)

    @property
    def closed(self) -> list[AdapterKey]:
        """Loaded adapters that admit nothing, to make room for the reserved one."""
        return sorted(key for key in self._closed if key in self._loaded)

    def is_closed(self, key: AdapterKey) -> bool:
        """Whether the adapter admits nothing, to make room for the reserved one."""
        return key in self._closed

    def has_room(self, resident: Resident) -> bool:
        """Whether the adapter could be loaded now, into free or idle slots and pages."""
        assert resident.shape is not None
        if self.reserved not in (None, resident.key):
            return False
        return self._pages.fits(resident.shape.num_pages, self._idle_slots, self._idle_pages)

    def allocate(self, resident: Resident) -> list[Resident]:
        """Give the adapter a slot and pages; returns the idle adapters that were evicted for it."""
        assert resident.shape is not None
        assert not resident.on_device, resident
        evicted = []
        # In the order of their last admissions, which is that of the dictionary.
        for victim in [r for r in self._loaded.values() if r.evictable]:
            if self._pages.fits(resident.shape.num_pages, 0, self._none):
                break
            self.evict(victim)
            evicted.append(victim)
        resident.slot, resident.pages = self._pages.allocate(resident.shape.num_pages)
        self._loaded[resident.key] = resident
        if resident.key == self.reserved:
            self.end_reservation()
        return evicted

    def evict(self, resident: Resident) -> None:
        """Free its slot and pages; all plans that named them were applied."""
        assert resident.evictable, resident
        self._pages.release(resident.slot, resident.pages)
        del self._loaded[resident.key]
        self._count(resident, False)
        resident.slot, resident.pages = -1, []

    def touch(self, resident: Resident) -> None:
        """The adapter admitted a request."""
        self._loaded.move_to_end(resident.key)
        self.refresh(resident)

    def refresh(self, resident: Resident) -> None:
        """Users, waiting, loading or the pin has changed: count it as idle or not."""
        self._count(resident, self._is_evictable(resident))

    def reserve(self, resident: Resident, latest: int | None = None) -> None:
        """Close the least recently admitting adapters until this one has room among them.

        latest: only adapters that began to admit at this step or before; None: any. A pinned one is
        closed only for an adapter that could never be loaded beside the pinned ones. Nothing is
        closed while that would have to include an adapter that is due a first admission.
        """
        assert self.reserved is None, self.reserved
        assert resident.shape is not None
        # A stable sort: pinned ones last, else by their last admissions.
        loaded = sorted(self._loaded.values(), key=lambda r: r.pinned)
        unpinned = [other for other in loaded if not other.pinned]
        others = loaded if self._to_close(resident, unpinned) is None else unpinned
        others = [
            r
            for r in others
            if not r.first_admission_due and (latest is None or r.admitting_since <= latest)
        ]
        closed = self._to_close(resident, others)
        if closed is None:
            return
        self.reserved = resident.key
        self._closed = {other.key for other in closed}
        for other in closed:
            self.refresh(other)

    def end_reservation(self) -> None:
        """Adapters that were closed and are still loaded admit again."""
        closed, self._closed, self.reserved = self._closed, set(), None
        # Sorted, because a set's order may differ between runs and plans must not.
        for key in sorted(closed):
            if key in self._loaded:
                self.refresh(self._loaded[key])
            self._reopened.append(key)

    def take_reopened(self) -> list[AdapterKey]:
        """The adapters that ended reservations had closed, each named once."""
        reopened, self._reopened = self._reopened, []
        return reopened

    def check(self, residents: dict[AdapterKey, Resident]) -> None:
        """Assert that no slot or page is held twice or lost, and that the idle sums are right."""
        loaded = list(self._loaded.values())
        self._pages.check([r.slot for r in loaded], [r.pages for r in loaded])
        assert self._loaded.keys() == {key for key, r in residents.items() if r.on_device}
        assert all(residents[r.key] is r for r in loaded)
        idle = [r for r in loaded if self._is_evictable(r)]
        assert all(r.evictable == self._is_evictable(r) for r in residents.values())
        assert self._idle_slots == len(idle)
        for index, count in enumerate(self._idle_pages):
            assert count == sum(len(r.pages[index]) for r in idle)

    def _is_evictable(self, resident: Resident) -> bool:
        if not resident.on_device or resident.users or resident.loading:
            return False
        if resident.first_admission_due:
            return False
        return resident.key in self._closed or not (resident.pinned or resident.waiting)

    def _to_close(
        self, resident: Resident, others: Sequence[Resident]
    ) -> Sequence[Resident] | None:
        """The first of these without which it would have room; None if not even without all."""
        assert resident.shape is not None
        counts, pages = resident.shape.num_pages, self._none
        for index, other in enumerate(others):
            if self._pages.fits(counts, index, pages):
                return others[:index]
            # What this one would free, added to what those before it would.
            pages = [have + len(own) for have, own in zip(pages, other.pages, strict=True)]
        return others if self._pages.fits(counts, len(others), pages) else None

    def _count(self, resident: Resident, evictable: bool) -> None:
        """Keep the sums of the slots and pages that could be evicted at once."""
        if evictable == resident.evictable:
            return
        resident.evictable = evictable
        sign = 1 if evictable else -1
        self._idle_slots += sign
        for index, pages in enumerate(resident.pages):
            self._idle_pages[index] += sign * len(pages)

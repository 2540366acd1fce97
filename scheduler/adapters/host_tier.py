"""HostTier: which adapters the ranks hold in host memory, which to stage next, which to drop."""

from collections import OrderedDict

from configs.wire.adapters import AdapterKey
from scheduler.adapters.resident import HostCopyState, Resident

FIRST_GUESS_DIVISOR = 8
"""Before any adapter was staged, each is expected to need this fraction of the tier."""


class HostTier:
    """Host copies in the order of their last use, within `capacity_bytes` on each rank.

    The size of an adapter is not known before the ranks have read it, so room is kept for one as
    large as the largest so far. If it is larger, the ranks report its size, and it is staged again
    when there is room for that. The bytes of a dropped copy count until the plan with the drop was
    applied. Until then its adapter is not staged again: the ranks would drop the new copy.
    """

    def __init__(self, capacity_bytes: int, largest: int = 0) -> None:
        """largest: what the largest adapter so far took, in bytes."""
        self.capacity_bytes = capacity_bytes
        self.largest = largest
        self.num_evictions = 0
        self._copies: OrderedDict[AdapterKey, Resident] = OrderedDict()
        self._queue: dict[AdapterKey, Resident] = {}
        self._expected: dict[AdapterKey, int] = {}
        self._dropping: dict[AdapterKey, int] = {}
        self._unsent: list[Resident] = []
        self._copies_bytes = 0
        self._dropping_bytes = 0
        self._short: Resident | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies, those that are being dropped included."""
        return self._copies_bytes + self._dropping_bytes

    @property
    def has_unsent_drops(self) -> bool:
        """Whether the next plan must have the ranks drop something."""
        return bool(self._unsent)

    def enqueue(self, resident: Resident) -> None:
        """Have the adapter staged when it is next, if it is still wanted then."""
        if resident.wanted:
            self._queue[resident.key] = resident

    def to_stage(self) -> list[AdapterKey]:
        """Keys to stage now, first wanted first; each is named once until the ranks reply."""
        named, settled = [], []
        self._short = None
        for key, resident in self._queue.items():
            if not resident.wanted:
                settled.append(key)
            elif resident.host_copy is HostCopyState.DROPPING:
                continue
            elif self._has_room(resident):
                resident.host_copy = HostCopyState.STAGING
                self._expected[key] = self._guess(resident)
                named.append(key)
            elif resident.waiting > 0:
                # Smaller ones behind it must not take the room that it waits for.
                self._short = resident
                break
            else:  # Only pinned: it must not delay adapters that requests wait for.
                self._short = self._short or resident
        for key in (*settled, *named):
            del self._queue[key]
        return named

    def staged(self, resident: Resident) -> None:
        """The ranks hold the adapter; its shape is known."""
        assert resident.shape is not None
        del self._expected[resident.key]
        resident.host_copy = HostCopyState.HELD
        self._copies[resident.key] = resident
        self._copies_bytes += resident.shape.host_bytes
        # An adapter that can never fit must not make all guesses too large.
        self.largest = max(self.largest, min(resident.shape.host_bytes, self.capacity_bytes))

    def failed(self, resident: Resident, partly: bool = False) -> None:
        """The adapter could not be staged; partly: some ranks hold it and must drop it."""
        expected = self._expected.pop(resident.key)
        resident.host_copy = HostCopyState.NONE
        if partly:
            self._drop(resident, expected)

    def touch(self, resident: Resident) -> None:
        """The adapter was used."""
        if resident.host_copy is HostCopyState.HELD:
            self._copies.move_to_end(resident.key)

    def discard(self, resident: Resident) -> None:
        """Drop the host copy with the next plan."""
        assert not resident.loading, resident
        assert resident.shape is not None
        del self._copies[resident.key]
        self._copies_bytes -= resident.shape.host_bytes
        self._drop(resident, resident.shape.host_bytes)

    def drops(self) -> list[Resident]:
        """The copies that the next plan drops: those that must go, and idle ones to make room."""
        short = self._short if self._short is not None and self._short.wanted else None
        reserved = sum(self._expected.values()) + (self._guess(short) if short else 0)
        needed_by_request = short is not None and short.waiting > 0
        while self._copies and self._copies_bytes + reserved > self.capacity_bytes:
            victim = self._victim(needed_by_request)
            if victim is None:
                break
            self.discard(victim)
            self.num_evictions += 1
        dropped, self._unsent = self._unsent, []
        return dropped

    def dropped(self, resident: Resident) -> None:
        """The plan with the drop was applied; the bytes are free."""
        self._dropping_bytes -= self._dropping.pop(resident.key)
        resident.host_copy = HostCopyState.NONE
        self.enqueue(resident)

    def check(self) -> None:
        """Assert that bytes add up and that every adapter is in one state."""
        sizes = [r.shape.host_bytes for r in self._copies.values() if r.shape is not None]
        assert sum(sizes) == self._copies_bytes, (sizes, self._copies_bytes)
        assert all(r.host_copy is HostCopyState.HELD for r in self._copies.values())
        assert sum(self._dropping.values()) == self._dropping_bytes, self._dropping
        assert self._dropping.keys().isdisjoint(self._copies)
        assert all(r.host_copy is HostCopyState.DROPPING for r in self._unsent)

    def _drop(self, resident: Resident, num_bytes: int) -> None:
        """Have the ranks drop what they hold, with the next plan."""
        resident.host_copy = HostCopyState.DROPPING
        self._dropping[resident.key] = num_bytes
        self._dropping_bytes += num_bytes
        self._unsent.append(resident)

    def _guess(self, resident: Resident) -> int:
        """The bytes that the adapter is expected to take."""
        if resident.shape is not None:
            return resident.shape.host_bytes
        return self.largest or self.capacity_bytes // FIRST_GUESS_DIVISOR

    def _has_room(self, resident: Resident) -> bool:
        held = self._copies_bytes + self._dropping_bytes
        # Alone an adapter is tried however large it may be: the ranks report its true size.
        if held == 0 and not self._expected:
            return True
        expected = sum(self._expected.values()) + self._guess(resident)
        return held + expected <= self.capacity_bytes

    def _victim(self, needed_by_request: bool) -> Resident | None:
        """The least recent copy that is not needed; a pinned one only if a request needs room."""
        idle = [
            r for r in self._copies.values() if not r.loading and (r.on_device or r.waiting == 0)
        ]
        for resident in idle:
            if resident.on_device or not resident.pinned:
                return resident
        return idle[0] if idle and needed_by_request else None

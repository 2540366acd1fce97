"""Resident: what is known about one adapter and where its bytes are."""

from dataclasses import dataclass, field
from enum import StrEnum

from configs.wire.adapters import AdapterKey, AdapterShape


class AdapterState(StrEnum):
    """Where an adapter's bytes are, for people; DEVICE may have a host copy too."""

    DISK = "disk"
    STAGING = "staging"
    HOST = "host"
    LOADING = "filling"
    DEVICE = "device"


@dataclass(slots=True, eq=False)
class Resident:
    """One adapter that is used, awaited, pinned, or somewhere in memory.

    shape: pages and bytes; None before it was staged once.
    on_host, staging: a host copy is there; the ranks were asked for one.
    dropping: a plan in flight, or the next one, makes the ranks forget the host copy.
    slot, pages: what it holds on the device; -1 and empty while it is not there.
    users: requests that hold its slot.
    loading: its copy to the device was begun, and not all ranks have finished it.
    first_admission_due: it was loaded for waiting requests and has admitted none of them yet.
    waiting: queued requests.
    pinned, unloading: an operator keeps it on the device, or lets it go when it is idle.
    evictable: the device tier may take its slot and pages back at once.
    stage_requested: an operator's command waits until it is staged.
    admitting_since: when it admitted the first request after it was loaded or idle.
    idle_since: when it became idle; None while it is not. Both in the admission queue's time.
    """

    key: AdapterKey
    shape: AdapterShape | None = None
    on_host: bool = False
    staging: bool = False
    dropping: bool = False
    slot: int = -1
    pages: list[list[int]] = field(default_factory=list)
    users: int = 0
    loading: bool = False
    first_admission_due: bool = False
    waiting: int = 0
    pinned: bool = False
    unloading: bool = False
    evictable: bool = False
    stage_requested: bool = False
    admitting_since: int = 0
    idle_since: int | None = None

    @property
    def on_device(self) -> bool:
        """Whether it has a slot, though its bytes may still be on their way there."""
        return self.slot >= 0

    @property
    def wanted(self) -> bool:
        """Whether it should be staged to host memory."""
        needed = self.waiting > 0 or self.pinned or self.stage_requested
        return needed and not (self.on_device or self.on_host or self.staging)

    @property
    def forgettable(self) -> bool:
        """Whether nothing at all would be lost with this record."""
        busy = self.users or self.loading or self.waiting or self.staging or self.dropping
        return not (busy or self.stage_requested or self.pinned or self.on_host or self.on_device)

    @property
    def state(self) -> AdapterState:
        """Where its bytes are."""
        if self.on_device:
            return AdapterState.LOADING if self.loading else AdapterState.DEVICE
        if self.on_host:
            return AdapterState.HOST
        return AdapterState.STAGING if self.staging else AdapterState.DISK

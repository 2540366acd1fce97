"""Resident: one adapter, where its bytes are and what needs them."""

from dataclasses import dataclass, field
from enum import Enum, StrEnum

from configs.wire.adapters import AdapterKey, AdapterShape


class AdapterState(StrEnum):
    """Where an adapter's bytes are, for operators; DEVICE may have a host copy too."""

    DISK = "disk"
    STAGING = "staging"
    HOST = "host"
    LOADING = "filling"
    DEVICE = "device"


class HostCopyState(Enum):
    """What the ranks hold of an adapter in host memory."""

    NONE = "nothing"
    STAGING = "being staged"
    HELD = "all of it"
    DROPPING = "nothing, once the plan that drops it was applied"


_HOST_STATES = {
    HostCopyState.NONE: AdapterState.DISK,
    HostCopyState.STAGING: AdapterState.STAGING,
    HostCopyState.HELD: AdapterState.HOST,
    HostCopyState.DROPPING: AdapterState.DISK,
}


@dataclass(slots=True, eq=False)
class Resident:
    """One adapter that is used, waited for, pinned, or somewhere in memory.

    shape: pages and bytes; None before it was staged once.
    host_copy: what the ranks hold of it in host memory.
    slot, pages: what it holds on the device; -1 and empty while it is not there.
    users: requests that hold its slot.
    loading: its copy to the device was begun, and not all ranks have finished it.
    first_admission_due: it was loaded for waiting requests and has admitted none of them yet.
    waiting: queued requests.
    pinned, unloading: an operator keeps it on the device, or lets it go when it is idle.
    evictable: the device tier may evict it at once; the tier's sums count it as idle.
    stage_requested: an operator's command waits until it is staged.
    admitting_since: when it admitted the first request after it was loaded or idle.
    idle_since: when it became idle; None while it is not. Both in the admission queue's time.
    """

    key: AdapterKey
    shape: AdapterShape | None = None
    host_copy: HostCopyState = HostCopyState.NONE
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
        """Whether it has a slot; while `loading` its bytes are still being copied."""
        return self.slot >= 0

    @property
    def wanted(self) -> bool:
        """Whether it should be staged to host memory."""
        needed = self.waiting > 0 or self.pinned or self.stage_requested
        held = self.host_copy in (HostCopyState.STAGING, HostCopyState.HELD)
        return needed and not (held or self.on_device)

    @property
    def forgettable(self) -> bool:
        """Whether nothing would be lost with this record."""
        busy = self.users or self.loading or self.waiting or self.stage_requested or self.pinned
        return not (busy or self.on_device) and self.host_copy is HostCopyState.NONE

    @property
    def state(self) -> AdapterState:
        """Where its bytes are."""
        if self.on_device:
            return AdapterState.LOADING if self.loading else AdapterState.DEVICE
        return _HOST_STATES[self.host_copy]

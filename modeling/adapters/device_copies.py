"""Fills: copies into adapter pages on a stream of their own, ordered by events alone.

A fill waits, on its stream, for the last step that may read what lay in its slot or its pages.
A step that reads a slot waits, on the device, for that slot's fill; no other step waits for
anything, and no thread does. The scheduler lets rows use an adapter only after its fill was
reported, so that wait is over before it begins; it holds whoever comes earlier.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from modeling.transfer import DeviceEvent


class CopyEvent:
    """A fill under way."""

    def __init__(self, event: DeviceEvent | None) -> None:
        """`event`: behind the last copy; None where it is done already."""
        self.event = event

    @property
    def done(self) -> bool:
        """Whether all bytes are there."""
        return self.event is None or self.event.query()

    def wait(self) -> None:
        """Block until all bytes are there."""
        if self.event is not None:
            self.event.synchronize()


class DeviceCopies:
    """The order of fills and steps on one device; on a CPU both are done when they return.

    `copy` and `in_use` belong to the thread that launches steps.
    """

    def __init__(self, device: torch.device) -> None:
        """Make the stream."""
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._reads: dict[int, torch.cuda.Event] = {}
        self._copying: dict[int, torch.cuda.Event] = {}

    @contextmanager
    def copy(self, slot: int, over: Iterable[int]) -> Iterator[CopyEvent]:
        """Copy into a slot and its pages inside; over: the slots whose pages those were before."""
        filled = CopyEvent(None)
        if self._stream is None:
            yield filled
            return
        with torch.cuda.stream(self._stream):
            for reader in {slot, *over}:
                if reader in self._reads:
                    self._stream.wait_event(self._reads[reader])
            yield filled
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
        filled.event = self._copying[slot] = event

    @contextmanager
    def in_use(self, slots: Sequence[int]) -> Iterator[None]:
        """Launch a step inside that reads these slots (-1: the base model)."""
        used = set(slots) - {-1}
        if self._stream is None or not used:
            yield
            return
        here = torch.cuda.current_stream(self._device)
        for slot in used & self._copying.keys():
            event = self._copying[slot]
            here.wait_event(event)
            if CopyEvent(event).done:
                del self._copying[slot]
        yield
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(here)
        for slot in used:
            self._reads[slot] = event

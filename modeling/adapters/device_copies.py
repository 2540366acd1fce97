"""DeviceCopies: copies into adapter pages on their own stream, ordered by events alone.

A copy waits, on its stream, for the last step that may read what its slot or its pages held. A
step that reads a slot waits, on the device, for that slot's copy. No other step waits, and no
thread does. The scheduler lets rows use an adapter only after its copy was reported as done, so
normally the step's wait is over before it begins; it guards against an earlier use.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from modeling.transfer import DeviceEvent


class CopyEvent:
    """The end of one load's copies."""

    def __init__(self, event: DeviceEvent | None) -> None:
        """event: recorded after the last copy; None if it is done already."""
        self.event = event

    @property
    def done(self) -> bool:
        """Return whether all bytes are copied."""
        return self.event is None or self.event.query()

    def wait(self) -> None:
        """Block until all bytes are copied."""
        if self.event is not None:
            self.event.synchronize()


class DeviceCopies:
    """Orders copies and steps on one device; on a CPU both are done when they return.

    `copy` and `in_use` must be called by the thread that launches steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._reads: dict[int, torch.cuda.Event] = {}
        self._copying: dict[int, torch.cuda.Event] = {}

    @contextmanager
    def copy(self, slot: int, over: Iterable[int]) -> Iterator[CopyEvent]:
        """Queue copies into a slot and its pages inside; over: slots that had the pages before."""
        copied = CopyEvent(None)
        if self._stream is None:
            yield copied
            return
        with torch.cuda.stream(self._stream):
            # Steps in flight may still read the slot's tables, or these pages through the slots
            # that had them: the copy waits for the last step of each.
            for reader in {slot, *over}:
                if reader in self._reads:
                    self._stream.wait_event(self._reads[reader])
            yield copied
            # blocking: a thread that waits for the load sleeps instead of spinning.
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
        copied.event = self._copying[slot] = event

    @contextmanager
    def in_use(self, slots: Sequence[int]) -> Iterator[None]:
        """Launch a step that reads these slots (-1: the base model) inside."""
        used = set(slots) - {-1}
        if self._stream is None or not used:
            yield
            return
        steps = torch.cuda.current_stream(self._device)
        for slot in used & self._copying.keys():
            event = self._copying[slot]
            steps.wait_event(event)
            # A finished copy needs no further wait: the dictionary stays small.
            if CopyEvent(event).done:
                del self._copying[slot]
        yield
        # Behind the step's last kernel: later copies into these slots wait for it.
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(steps)
        for slot in used:
            self._reads[slot] = event

"""Copies between host and device that never stop the device.

Host memory is pinned, and is written again only when the device is past the copy that reads it.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

LINE_BYTES = 128
"""A line of a GPU's cache. Triton compiles a kernel for aligned pointers and again for others: all
are aligned, so that no request waits for the second compilation."""

NUM_BUFFERS = 2
"""How many steps may be in flight: each has a host buffer of its own."""


class DeviceEvent(Protocol):
    """A point in a device's work, as torch.cuda.Event marks one."""

    def query(self) -> bool:
        """Whether the device is past this point."""
        ...

    def synchronize(self) -> None:
        """Block until the device is past this point."""
        ...


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy a host array to the device; the caller must not write to it afterwards.

    Through pinned memory, which torch gives back only once the copy is done: a plain copy
    would wait for every step that is still in flight.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def ints(values: Sequence[int], device: torch.device) -> Tensor:
    """Copy numbers to the device as int64."""
    return to_device(np.array(values, dtype=np.int64), device)


def pack_to_device(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> tuple[Tensor, ...]:
    """Copy several arrays to the device in one transfer; shapes and types stay."""
    bounds = [0, *accumulate(aligned(array.nbytes) for array in arrays)]
    packed = np.zeros(bounds[-1], dtype=np.uint8)
    for array, start in zip(arrays, bounds, strict=False):
        packed[start : start + array.nbytes] = (
            np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        )
    whole = to_device(packed, device)
    return tuple(
        whole[start : start + array.nbytes].view(_torch_type(array)).view(array.shape)
        for array, start in zip(arrays, bounds, strict=False)
    )


def aligned(num_bytes: int) -> int:
    """The next whole number of cache lines."""
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES


def _torch_type(array: npt.NDArray[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype


class TransferBuffer:
    """Static device bytes, rewritten each step from host memory that exists twice.

    Two steps may be in flight, and the copy of either may not have run yet: so they alternate
    between two host buffers. A step calls `begin`, writes, calls `send`, and calls `sent` once all
    that reads the host buffer is queued. `begin` waits for the step before the last, which a runner
    that is one step ahead has waited for already. The device bytes exist once: the stream's order
    puts a step's copy behind the work of the step before.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.device_bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._pinned = device.type == "cuda"
        self._host = [
            torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
            for _ in range(NUM_BUFFERS)
        ]
        self._events: list[torch.cuda.Event | None] = [None] * NUM_BUFFERS
        self._current = 0

    def begin(self) -> tuple[int, npt.NDArray[np.uint8]]:
        """Return the next host buffer's number (0 or 1) and bytes, which nothing reads any more."""
        self._current = (self._current + 1) % NUM_BUFFERS
        event = self._events[self._current]
        if event is not None:
            event.synchronize()
        host: npt.NDArray[np.uint8] = self._host[self._current].numpy()
        return self._current, host

    def send(self, num_bytes: int) -> None:
        """Copy the first bytes to the device, behind what the current stream does."""
        host = self._host[self._current][:num_bytes]
        self.device_bytes[:num_bytes].copy_(host, non_blocking=True)

    def sent(self) -> None:
        """Record, behind all queued work, the event that the buffer's next `begin` waits for."""
        if self._pinned:
            event = self._events[self._current] or torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device_bytes.device))
            self._events[self._current] = event


class StepClock:
    """How long the device was idle before each step: nothing was queued in time."""

    def __init__(self, device: torch.device) -> None:
        """Devices other than CUDA give no times."""
        self._device = device
        self._last: torch.cuda.Event | None = None

    def begin(self) -> "StepStart | None":
        """Record the event at which a step begins, behind what the current stream does."""
        if self._device.type != "cuda":
            return None
        began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        began.record(torch.cuda.current_stream(self._device))
        return StepStart(self, self._last, began)

    def end(self, event: torch.cuda.Event | None) -> None:
        """Take the event behind a step's last work."""
        self._last = event


@dataclass(frozen=True)
class StepStart:
    """A step's beginning on the device, and the end of the step before it."""

    clock: StepClock
    before: torch.cuda.Event | None
    began: torch.cuda.Event

    def idle_seconds(self) -> float | None:
        """Seconds between the two; None for the first step. The device must be past both."""
        if self.before is None:
            return None
        milliseconds: float = self.before.elapsed_time(self.began)
        return max(milliseconds, 0.0) / 1e3


class HostCopy:
    """A copy of device tensors to the host; `wait` blocks until it is done."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Start the copies behind what the current stream does; at least one tensor, one device."""
        self._event: torch.cuda.Event | None = None
        # A non-blocking copy to the CPU lands in pinned memory of its own, so nothing that a
        # later step does can overwrite it: not even where the CPU is the device.
        self._host = [tensor.to("cpu", non_blocking=True, copy=True) for tensor in tensors]
        device = tensors[0].device
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    @property
    def event(self) -> torch.cuda.Event | None:
        """The event behind the copies; None where the CPU is the device."""
        return self._event

    def wait(self) -> list[Tensor]:
        """Return the tensors on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


@contextmanager
def no_waits() -> Iterator[None]:
    """RuntimeError meanwhile where the host waits for a GPU."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this switch a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

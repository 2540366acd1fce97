"""Between host and device without a stop: pinned copies that the stream's order protects."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGNMENT = 16
"""Elements: 128 bytes of int64, a line of a GPU's cache."""


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy a host array to the device; the caller must not write to it afterwards.

    Through pinned memory, which torch gives back only once the copy is done: a plain copy
    would wait for every step that is still in flight.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def pack_to_device(
    arrays: Sequence[npt.NDArray[np.int64]], device: torch.device
) -> tuple[Tensor, ...]:
    """Copy several one-dimensional int64 arrays to the device in one transfer."""
    # Kernels are compiled for aligned and for unaligned pointers: let there be one kind only.
    starts = [0, *accumulate(-(-len(array) // ALIGNMENT) * ALIGNMENT for array in arrays)]
    packed = np.zeros(starts[-1], dtype=np.int64)
    for array, start in zip(arrays, starts, strict=False):
        packed[start : start + len(array)] = array
    whole = to_device(packed, device)
    return tuple(
        whole[start : start + len(array)] for array, start in zip(arrays, starts, strict=False)
    )


class HostCopy:
    """Device tensors on their way to the host; `wait` blocks until they are there."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Start the copies behind what the current stream does; at least one tensor, one device."""
        self._event: torch.cuda.Event | None = None
        # A non-blocking copy to the CPU lands in pinned memory of its own, so nothing that a
        # later step does can overwrite it.
        self._host = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        device = tensors[0].device
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> list[Tensor]:
        """Return the tensors on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._host

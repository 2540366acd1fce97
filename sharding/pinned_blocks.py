"""PinnedBlocks: host memory that a device copies from while the next bytes are read."""

from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor


class CopyEnd(Protocol):
    """The end of one copy, as torch.cuda.Event marks it."""

    def synchronize(self) -> None:
        """Block until the copy is done."""
        ...


class PinnedBlocks:
    """A few blocks of host memory that reading threads share.

    A device copies from pinned memory at full speed and without the CPU. Each block keeps the event
    of its last copy, and nothing writes to the block before that copy is done. With more blocks
    than readers, a reader writes one block while the device copies another.
    """

    def __init__(self, count: int, num_bytes: int, stream: torch.cuda.Stream | None) -> None:
        """Allocate `count` blocks of `num_bytes`; copies are queued on `stream`, None on a CPU."""
        self._stream = stream
        self._free: SimpleQueue[tuple[Tensor, CopyEnd | None]] = SimpleQueue()
        for _ in range(count):
            memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=stream is not None)
            self._free.put((memory, None))

    @contextmanager
    def block_for(self, target: Tensor) -> Iterator[Tensor]:
        """Lend a block, shaped and typed as the contiguous `target`, to be written by the caller.

        At the end of the `with`, a copy of it to `target` is queued. Waits for a free block.
        """
        memory, copied = self._free.get()
        try:
            if copied is not None:  # The block's last copy may still read it.
                copied.synchronize()
            host = memory[: target.nbytes].view(target.dtype).view(target.shape)
            yield host
            copied = self.start_copy(target, host)
        finally:
            # After a failed read too, with the event of the last copy that was queued.
            self._free.put((memory, copied))

    def start_copy(self, target: Tensor, host: Tensor) -> CopyEnd | None:
        """Queue the copy on the stream; returns its end, None if it is done already."""
        # Reading threads have a stream and an inference mode of their own, not the caller's: the
        # stream must be the one that uses the tensor, which may be an inference tensor.
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            target.copy_(host, non_blocking=True)
            return None if self._stream is None else self._stream.record_event()

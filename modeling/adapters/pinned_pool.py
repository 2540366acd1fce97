"""PinnedPool: the host memory of all staged adapters, allocated at start and cut into chunks.

Chunks have one size and an adapter may take any of them, so memory does not fragment: only the end
of an adapter's last chunk and less than one row of each chunk are lost. On CUDA the memory is
pinned once, because pinning takes a lock that every launch needs.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from modeling.transfer import DeviceEvent


class PinnedPool:
    """Chunks 0 .. num_chunks - 1 of `chunk_bytes` each; any thread may allocate and free."""

    def __init__(self, num_chunks: int, chunk_bytes: int, pinned: bool) -> None:
        """Allocate the memory; pinned: for copies to a CUDA device beside its steps."""
        self.num_chunks = num_chunks
        self.chunk_bytes = chunk_bytes
        self._memory = torch.empty(num_chunks * chunk_bytes, dtype=torch.uint8)
        if pinned and num_chunks:
            # Not at exit: CUDA may be gone by then, and the system frees the memory anyway.
            weakref.finalize(self, _pin(self._memory)).atexit = False
        # Chunks from here on were never taken, and the system has given them no memory yet (unless
        # it is pinned). Freed chunks are taken first, so memory that is not needed is not touched.
        self._fresh = 0
        self._free: list[int] = []
        self._leaving: list[tuple[DeviceEvent, list[int]]] = []
        self._lock = threading.Lock()

    @property
    def num_taken(self) -> int:
        """Return how many chunks are taken or still being copied."""
        with self._lock:
            return self._fresh - len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` chunks, or None if there are fewer; waits for copies out of them."""
        with self._lock:
            self._collect(count)
            if count > self._room():
                return None
            taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
            fresh = count - len(taken)
            taken += range(self._fresh, self._fresh + fresh)
            self._fresh += fresh
            return taken

    def free(self, chunks: Sequence[int], after: DeviceEvent | None = None) -> None:
        """Give chunks back; they are free once `after`, the last copy out of them, is done."""
        with self._lock:
            if after is None or after.query():
                self._free.extend(chunks)
            else:
                self._leaving.append((after, list(chunks)))

    def rows(self, chunk: int, offset: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return a view of a chunk from `offset` bytes on, as [rows, width]."""
        first = chunk * self.chunk_bytes + offset
        num_bytes = shape[0] * shape[1] * dtype.itemsize
        assert offset + num_bytes <= self.chunk_bytes, (offset, shape, dtype)
        return self._memory[first : first + num_bytes].view(dtype).view(shape)

    def check(self, taken: Sequence[int]) -> None:
        """Assert that every chunk is free, being copied, or in `taken` exactly once."""
        with self._lock:
            leaving = [chunk for _, chunks in self._leaving for chunk in chunks]
            found = sorted([*self._free, *leaving, *taken])
            assert found == list(range(self._fresh)), "chunks are lost or taken twice"
            assert self._fresh <= self.num_chunks

    def _room(self) -> int:
        return self.num_chunks - self._fresh + len(self._free)

    def _collect(self, count: int) -> None:
        """Free chunks after their copies; waits for copies only if `count` chunks are not free."""
        waiting = []
        for after, chunks in self._leaving:
            # Only when there is no other room: a wait here holds up the thread that stages.
            if not after.query() and self._room() < count:
                after.synchronize()
            if after.query():
                self._free.extend(chunks)
            else:
                waiting.append((after, chunks))
        self._leaving = waiting


def _pin(memory: Tensor) -> Callable[[], None]:
    """Register memory with CUDA; returns the function that unregisters it.

    Torch's pinned allocator would round the size up to a power of two.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address, num_bytes = memory.data_ptr(), memory.nbytes
    code = int(runtime.cudaHostRegister(address, num_bytes, 0))
    if code != 0:
        raise ValueError(
            f"{num_bytes} bytes of host memory cannot be pinned (CUDA error {code}): lower "
            "adapters.host_bytes, which is for each rank"
        )
    return partial(runtime.cudaHostUnregister, address)

"""PinnedPool: the host memory of all staged adapters, allocated at start and cut into chunks.

Chunks have one size and an adapter may take any of them, so memory does not fragment: only the end
of an adapter's last chunk and less than one row of each chunk are lost. It takes few pieces of
neighbours where there are some, for what lies in one piece is copied by one call. On CUDA the
memory is pinned once, because pinning takes a lock that every launch needs.
"""

import bisect
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from torch import Tensor

from modeling.transfer import DeviceEvent

_CLEARING = 8
"""Threads that clear memory before it is pinned."""


class PinnedPool:
    """Chunks 0 .. num_chunks - 1 of `chunk_bytes` each; any thread may allocate and free."""

    def __init__(self, num_chunks: int, chunk_bytes: int, pinned: bool) -> None:
        """Allocate the memory; pinned: for copies to a CUDA device beside its steps."""
        self.num_chunks = num_chunks
        self.chunk_bytes = chunk_bytes
        # NumPy requests huge pages: the first write to them is several times as fast, and later
        # ones find their addresses sooner.
        memory = np.empty(num_chunks * chunk_bytes, np.uint8)
        self._bytes = memory.data
        self._memory = torch.from_numpy(memory)
        self._typed: dict[torch.dtype, Tensor] = {}
        if pinned and num_chunks:
            # Not at exit: CUDA may be gone by then, and the system frees the memory anyway.
            weakref.finalize(self, _pin(self._memory)).atexit = False
        # Chunks from here on were never taken, and the system has given them no memory yet (unless
        # it is pinned). Freed chunks are taken first, so memory that is not needed is not touched.
        self._fresh = num_chunks if pinned else 0
        # Pieces in the pool's order; no two are neighbours.
        self._free = [range(self._fresh)] if self._fresh else []
        self._leaving: list[tuple[DeviceEvent, list[range]]] = []
        self._lock = threading.Lock()

    @property
    def num_taken(self) -> int:
        """Return how many chunks are taken or still being copied."""
        with self._lock:
            return self._fresh - self._num_free()

    def allocate(self, count: int) -> list[range] | None:
        """Take `count` chunks, in pieces; None if there are fewer. Waits for copies out of them."""
        with self._lock:
            self._collect(count)
            if count > self._room():
                return None
            taken = []
            while count and self._free:
                taken.append(self._take(count))
                count -= len(taken[-1])
            if count:
                taken.append(range(self._fresh, self._fresh + count))
                self._fresh += count
            return taken

    def free(self, pieces: Sequence[range], after: DeviceEvent | None = None) -> None:
        """Give chunks back; they are free once `after`, the last copy out of them, is done."""
        with self._lock:
            if after is None or after.query():
                self._give(pieces)
            else:
                self._leaving.append((after, list(pieces)))

    def rows(self, piece: range, offset: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return a view of a piece from `offset` bytes on, as [rows, width].

        Offsets and chunks are multiples of the type's size.
        """
        first = self._first(piece, offset, shape[0] * shape[1] * dtype.itemsize)
        numbers = self._typed.get(dtype)
        if numbers is None:
            numbers = self._typed[dtype] = self._memory.view(dtype)
        # One call: after each a thread waits for the interpreter while others stage.
        return numbers.as_strided(shape, (shape[1], 1), first // dtype.itemsize)

    def numbers(self, pieces: Sequence[range], dtype: torch.dtype) -> list[Tensor]:
        """Return each piece as a row of numbers, [1, n]."""
        most = self.chunk_bytes // dtype.itemsize
        return [self.rows(piece, 0, (1, len(piece) * most), dtype) for piece in pieces]

    def data(self, piece: range, offset: int, num_bytes: int) -> memoryview:
        """Return bytes of a piece from `offset` on."""
        first = self._first(piece, offset, num_bytes)
        return self._bytes[first : first + num_bytes]

    def _first(self, piece: range, offset: int, num_bytes: int) -> int:
        """Return the pool's byte where these bytes of a piece begin."""
        assert offset + num_bytes <= len(piece) * self.chunk_bytes, (piece, offset, num_bytes)
        return piece.start * self.chunk_bytes + offset

    def check(self, taken: Sequence[range]) -> None:
        """Assert that every chunk is free, being copied, or in `taken` exactly once."""
        with self._lock:
            leaving = [piece for _, pieces in self._leaving for piece in pieces]
            found = sorted(chunk for piece in (*self._free, *leaving, *taken) for chunk in piece)
            assert found == list(range(self._fresh)), "chunks are lost or taken twice"
            assert self._fresh <= self.num_chunks
            ends = [piece.stop for piece in self._free]
            assert not {piece.start for piece in self._free} & {*ends}, "neighbours are apart"

    def _num_free(self) -> int:
        return sum(map(len, self._free))

    def _room(self) -> int:
        return self.num_chunks - self._fresh + self._num_free()

    def _take(self, count: int) -> range:
        """Take up to `count` chunks in one piece: of the smallest that has so many, else all."""
        large = [piece for piece in self._free if len(piece) >= count]
        found = min(large, key=len) if large else max(self._free, key=len)
        index = self._free.index(found)
        self._free[index : index + 1] = [found[count:]] if len(found) > count else []
        return found[:count]

    def _give(self, pieces: Sequence[range]) -> None:
        """Add pieces to those that are free, joined with their neighbours."""
        for piece in pieces:
            index = bisect.bisect(self._free, piece.start, key=lambda free: free.start)
            first, last = index, index
            if index and self._free[index - 1].stop == piece.start:
                first = index - 1
            if index < len(self._free) and self._free[index].start == piece.stop:
                last = index + 1
            joined = [*self._free[first:index], piece, *self._free[index:last]]
            self._free[first:last] = [range(joined[0].start, joined[-1].stop)]

    def _collect(self, count: int) -> None:
        """Free chunks after their copies; waits for copies only if `count` chunks are not free."""
        waiting = []
        for after, pieces in self._leaving:
            # Only when there is no other room: a wait here holds up the thread that stages.
            if not after.query() and self._room() < count:
                after.synchronize()
            if after.query():
                self._give(pieces)
            else:
                waiting.append((after, pieces))
        self._leaving = waiting


def _pin(memory: Tensor) -> Callable[[], None]:
    """Register memory with CUDA; returns the function that unregisters it.

    Torch's pinned allocator would round the size up to a power of two.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address, num_bytes = memory.data_ptr(), memory.nbytes
    # Pinning would have the system give and clear one page after the other, on one thread.
    with ThreadPoolExecutor(_CLEARING) as pool:
        list(pool.map(Tensor.zero_, memory.chunk(_CLEARING)))
    code = int(runtime.cudaHostRegister(address, num_bytes, 0))
    if code != 0:
        raise ValueError(
            f"{num_bytes} bytes of host memory cannot be pinned (CUDA error {code}): lower "
            "adapters.host_bytes, which is for each rank"
        )
    return partial(runtime.cudaHostUnregister, address)

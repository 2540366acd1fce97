"""Sums through symmetric memory: a buffer that every rank of a node has mapped.

NCCL's all-reduce of a few kilobytes costs 17 microseconds on NVLink, nearly all of it latency.
Where a rank's kernel may read its peers' memory, one launch does it in six
(`torch.distributed._symmetric_memory`).

Why nothing is overwritten too early: both operations begin and end with a barrier of the kernel's
blocks across ranks, and a block waits for the same block of every peer. So when the kernel has
ended on a rank, every peer has finished reading that rank's buffer, and the next kernel on the
stream may write there: everything that reads or writes the buffer runs on one stream, in the same
order on every rank. This holds for eager and captured steps alike, and for two steps in flight,
which are queued on that one stream. A sum is written to memory of its own, so it outlives the
buffer's next use.

Every rank adds in the order of the ranks, so all get the same bytes.

Sums that a norm's kernel makes itself (`PeerBuffers`) begin with a barrier and end without one.

Not used on purpose: `one_shot_all_reduce_copy` signals its peers before all warps of a block
have copied their part, and the `multimem` operations need NVLink multicast.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from math import prod

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from configs.wire.sums import MeasuredSums
from sharding.group import Summand, TensorParallel

ALIGNMENT = 16
"""Bytes that the kernels move at once; a summand that is no multiple of it goes through NCCL."""

MOST_ROWS = 256
"""Rows of a summand that a norm sums, at most: each has a flag of each rank."""

SUMMAND_BYTES = 1 << 22
"""Bytes of a summand that a norm sums, at most: 256 rows of 8,192 in bfloat16."""

TWO_SHOT_RANKS = (2, 4, 8)
"""Group sizes that torch's two-shot kernel is compiled for."""


class Method(StrEnum):
    """A way to sum.

    ONE_SHOT: each rank reads all summands whole. TWO_SHOT: each rank sums its share of the
    elements, then reads the other ranks' sums.
    """

    NCCL = "nccl"
    ONE_SHOT = "one-shot"
    TWO_SHOT = "two-shot"


Sum = Callable[[Tensor], Tensor]
"""From a summand in the buffer to the sum in memory of its own."""


class DoubleBuffer:
    """Two buffers of equal size, used alternately.

    Two, because a layer may hold two summands before it sums them (GPT-NeoX's parallel residual);
    when it takes a third, the first was summed.
    """

    def __init__(self, memory: Tensor) -> None:
        """memory: uint8, aligned, of even length."""
        self.buffer_bytes = memory.numel() // 2
        assert self.buffer_bytes % ALIGNMENT == 0
        self._memory = memory
        self._start = memory.data_ptr()
        self._next = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the next buffer as a contiguous tensor, which must fit."""
        count = prod(shape)
        assert count * dtype.itemsize <= self.buffer_bytes
        # No check that the buffer is free: its last sum was queued before, on the same stream.
        first = self._next * self.buffer_bytes // dtype.itemsize
        self._next = 1 - self._next
        return self._memory.view(dtype)[first : first + count].view(*shape)

    def holds(self, x: Tensor) -> bool:
        """Return whether x is a tensor that `take` returned."""
        offset = x.data_ptr() - self._start
        return offset in (0, self.buffer_bytes) and x.is_contiguous()


class PeerBuffers:
    """Two buffers, used alternately, from which kernels sum; each has flags of its own.

    A kernel's sum has one barrier, at its begin: a rank sets its flags on the peers once its
    summand is written, waits for the peers' flags on itself, resets those, and reads. Nothing is
    lost or overwritten too early, as between two uses of a buffer there is another sum:

    1. A rank sets flags of sum k+1 only when its sum k has ended, as it does so after the kernels
       before (`gdc_wait`). So where sum k+1 has ended, sum k has ended on every rank: its buffer
       and its flags are free.
    2. Sum k+1 uses the other buffer, and what follows it on the stream the buffer of sum k. What
       the model computes between is ordered by the stream, launched or captured.
    3. Steps are recorded apart, so one may begin with the buffer that the step before used last.
       Between them is the sum of the embedding, with which every step begins. `all_reduce`
       makes it, and its barriers prove as much as sum k+1 does.

    `tests/sharding/test_peer_buffers.py` tries every order in which ranks can run.

    One summand at a time: layers that hold two (GPT-NeoX) take theirs from a `DoubleBuffer`.
    """

    def __init__(self, memory: Tensor, addresses: Sequence[int]) -> None:
        """memory: uint8 [peer_bytes], this rank's. addresses: where each rank has it."""
        size = len(addresses)
        self._buffers = DoubleBuffer(memory[: 2 * SUMMAND_BYTES])
        self._first = memory.data_ptr()
        self.flags = memory[2 * SUMMAND_BYTES :].view(torch.int32).view(2, size, MOST_ROWS)
        self.flags.zero_()
        offsets = [
            (i * SUMMAND_BYTES, 2 * SUMMAND_BYTES + 4 * i * size * MOST_ROWS) for i in (0, 1)
        ]
        table = [[[base + offset for base in addresses] for offset in each] for each in offsets]
        self._peers = torch.tensor(table, dtype=torch.int64, device=memory.device)

    def take(self, shape: Sequence[int], dtype: torch.dtype, group: TensorParallel) -> Summand:
        """Return the next buffer, which must fit, as a summand of the group."""
        partial = self._buffers.take(shape, dtype)
        return Summand(partial, self._peers[int(partial.data_ptr() != self._first)], group)


def peer_bytes(size: int) -> int:
    """Return the bytes of `PeerBuffers` of so many ranks."""
    return 2 * (SUMMAND_BYTES + 4 * size * MOST_ROWS)


class SizeTable:
    """The method for each number of bytes, as measured; sizes ascend, each is an upper bound."""

    def __init__(self, choices: Sequence[tuple[int, Method]]) -> None:
        self.choices = tuple(choices)

    def method(self, num_bytes: int) -> Method:
        """Return the method of the smallest measured size that is as large; NCCL beyond all."""
        return next((m for size, m in self.choices if num_bytes <= size), Method.NCCL)

    def __str__(self) -> str:
        """Runs of one method: "one-shot to 256 KiB, two-shot to 32 MiB, nccl above"."""
        steps = []
        for i, (size, method) in enumerate(self.choices):
            if i + 1 == len(self.choices) or self.choices[i + 1][1] is not method:
                steps.append((method, _bytes(size)))
        parts = [f"{method} to {size}" for method, size in steps if method is not Method.NCCL]
        if any(method is Method.NCCL for method, _ in steps[:-1]):
            parts = [f"{method} to {size}" for method, size in steps]
        return ", ".join([*parts, "nccl above"])


class SymmetricRanks:
    """Ranks that sum through a buffer where that was measured to be faster, else as `ranks` do."""

    def __init__(
        self,
        ranks: TensorParallel,
        buffers: DoubleBuffer,
        sums: Mapping[Method, Sum],
        table: SizeTable,
        peer_buffers: PeerBuffers | None = None,
        known_norm_rows: int | None = None,
    ) -> None:
        """sums: for each method of the table but NCCL. peer_buffers: for sums of norms.

        known_norm_rows: as in `MeasuredSums`, of a group before this one.
        """
        self._ranks = ranks
        self._buffers = buffers
        self._sums = sums
        self._table = table
        self._dtypes: frozenset[torch.dtype] = frozenset()
        self.peer_buffers = peer_buffers
        self._normed: tuple[torch.dtype | None, int] = (None, 0)
        self.known_norm_rows = known_norm_rows
        self.rank, self.size = ranks.rank, ranks.size
        self.method = ranks.method

    def serve(self, dtypes: frozenset[torch.dtype], method: str) -> None:
        """Use the buffers from now on, for these types; method: as in TensorParallel."""
        self._dtypes, self.method = dtypes, method

    def serve_norms(self, dtype: torch.dtype, most_rows: int, method: str) -> None:
        """Leave sums of up to so many rows of a type to norms from now on; method: as `serve`."""
        assert self.peer_buffers is not None
        assert most_rows <= MOST_ROWS
        self._normed, self.method = (dtype, most_rows), method
        self.known_norm_rows = most_rows

    @property
    def measured(self) -> MeasuredSums:
        """What was measured here, or known before."""
        methods = [(size, method.value) for size, method in self._table.choices]
        return MeasuredSums(methods, self.known_norm_rows)

    def summand(self, shape: Sequence[int], dtype: torch.dtype) -> Summand | None:
        """Return a summand where a norm sums faster."""
        normed, most_rows = self._normed
        num_bytes = prod(shape) * dtype.itemsize
        is_served = dtype is normed and len(shape) == 2 and 0 < shape[0] <= most_rows
        if not is_served or num_bytes > SUMMAND_BYTES or shape[1] * dtype.itemsize % ALIGNMENT:
            return None
        assert self.peer_buffers is not None
        return self.peer_buffers.take(shape, dtype, self)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks; x is not the sum's memory where the buffer is used."""
        method = self._method(x.shape, x.dtype)
        if method is Method.NCCL:
            # `output_buffer` gives no buffer for a summand of this size and type.
            assert not self._buffers.holds(x)
            return self._ranks.all_reduce(x)
        # A summand that was not computed into a buffer costs one copy.
        if not self._buffers.holds(x):
            x = self._buffers.take(x.shape, x.dtype).copy_(x)
        return self._sums[method](x)

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate over ranks along the last dimension."""
        return self._ranks.all_gather(x)

    def output_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Return one of the buffers, for a summand of a size that is summed there."""
        if self._method(shape, dtype) is Method.NCCL:
            return None
        return self._buffers.take(shape, dtype)

    def _method(self, shape: Sequence[int], dtype: torch.dtype) -> Method:
        num_bytes = prod(shape) * dtype.itemsize
        if dtype not in self._dtypes or num_bytes % ALIGNMENT or not num_bytes:
            return Method.NCCL
        return self._table.method(num_bytes)


def world() -> dist.ProcessGroup:
    """Return the process's default group, which `connect` made."""
    group = dist.group.WORLD
    assert group is not None
    return group


@dataclass(frozen=True)
class MappedMemory:
    """memory: this rank's, uint8. addresses: of every rank's, as this one's kernels see it."""

    memory: Tensor
    addresses: Sequence[int]

    def __getitem__(self, part: slice) -> "MappedMemory":
        """Return a part."""
        start, _, _ = part.indices(len(self.memory))
        return MappedMemory(self.memory[part], [address + start for address in self.addresses])


def prepare_mapping(device: torch.device) -> None:
    """Pay for the first allocation of such memory, two seconds; this rank does it alone."""
    with suppress(RuntimeError):  # `map_buffer` says why it cannot be.
        symmetric.empty(ALIGNMENT, dtype=torch.uint8, device=device)


def map_buffer(num_bytes: int, device: torch.device) -> MappedMemory:
    """Allocate memory that every rank of the world maps; all ranks call it together.

    RuntimeError where the peers' memory cannot be mapped.
    """
    memory: Tensor = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(memory, world())
    # An allocation may begin before the tensor, by as much on every rank.
    before = memory.data_ptr() - handle.buffer_ptrs[handle.rank]
    return MappedMemory(memory, [pointer + before for pointer in handle.buffer_ptrs])


def torch_sums() -> dict[Method, Sum]:
    """Torch's operations on a buffer that `map_buffer` made."""
    group_name, size = world().group_name, world().size()

    def summing(operation: Callable[..., Tensor]) -> Sum:
        return lambda x: operation(x, "sum", group_name, torch.empty_like(x))

    found = {Method.ONE_SHOT: summing(torch.ops.symm_mem.one_shot_all_reduce_out)}
    if size in TWO_SHOT_RANKS:
        found[Method.TWO_SHOT] = summing(torch.ops.symm_mem.two_shot_all_reduce_out)
    return found


def _bytes(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"

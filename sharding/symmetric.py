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

Not used on purpose: `one_shot_all_reduce_copy` signals its peers before all warps of a block
have copied their part, and the `multimem` operations need NVLink multicast.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from math import prod

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from sharding.group import TensorParallel

ALIGNMENT = 16
"""Bytes that the kernels move at once; a summand that is no multiple of it goes through NCCL."""

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


class SizeTable:
    """The method for each number of bytes, as measured; sizes ascend, each is an upper bound."""

    def __init__(self, choices: Sequence[tuple[int, Method]]) -> None:
        self._choices = tuple(choices)

    def method(self, num_bytes: int) -> Method:
        """Return the method of the smallest measured size that is as large; NCCL beyond all."""
        return next((m for size, m in self._choices if num_bytes <= size), Method.NCCL)

    def __str__(self) -> str:
        """Runs of one method: "one-shot to 256 KiB, two-shot to 32 MiB, nccl above"."""
        steps = []
        for i, (size, method) in enumerate(self._choices):
            if i + 1 == len(self._choices) or self._choices[i + 1][1] is not method:
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
    ) -> None:
        """sums: for each method of the table but NCCL."""
        self._ranks = ranks
        self._buffers = buffers
        self._sums = sums
        self._table = table
        self._dtypes: frozenset[torch.dtype] = frozenset()
        self.rank, self.size = ranks.rank, ranks.size
        self.method = ranks.method

    def serve(self, dtypes: frozenset[torch.dtype], method: str) -> None:
        """Use the buffers from now on, for these types; method: as in TensorParallel."""
        self._dtypes, self.method = dtypes, method

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


def map_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """Allocate uint8 memory that every rank of the world maps; all ranks call it together.

    RuntimeError where the peers' memory cannot be mapped.
    """
    memory: Tensor = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    symmetric.rendezvous(memory, world())
    return memory


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

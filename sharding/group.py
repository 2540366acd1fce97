"""TensorParallel: rank, size and the two collectives that a step may use."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import AllreduceOptions, HashStore, ReduceOp, Store


class TensorParallel(Protocol):
    """One rank's view of its tensor-parallel group.

    rank, size: this rank's number and how many there are.
    method: how it sums and why, for logs and reports.
    """

    rank: int
    size: int
    method: str

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over ranks; it may overwrite x. All ranks pass the same shape."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate over ranks along the last dimension: [.., n] to [.., size * n]."""
        ...

    def output_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Return memory out of which `all_reduce` reads a summand without a copy, or None.

        Its values are undefined. It is valid until the next `all_reduce`, or the next call but one.
        """
        return None

    def summand(self, shape: Sequence[int], dtype: torch.dtype) -> "Summand | None":
        """Return a summand of undefined values that a norm sums, or None: `all_reduce` shall.

        It must be summed, once, before the next call.
        """
        return None


@dataclass(frozen=True)
class Summand:
    """This rank's summand of [rows, n]; what reads it sums over ranks.

    partial: in memory that the peers read.
    peers: int64 [2, size], for each rank the addresses of its summand and of its flags.
    group: the ranks.
    """

    partial: Tensor
    peers: Tensor
    group: TensorParallel

    def total(self) -> Tensor:
        """Return the sum, [rows, n]."""
        return self.group.all_reduce(self.partial)


def summed(x: Tensor | Summand) -> Tensor:
    """Return x, or its sum over ranks if it is a summand."""
    return x.total() if isinstance(x, Summand) else x


class SingleRank(TensorParallel):
    """A group of one rank: no process group, no copy."""

    rank = 0
    size = 1
    method = "one rank"

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return x."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return x."""
        return x


class LoneRank(TensorParallel):
    """One rank of several without the others, to compile its kernels; its sums are wrong."""

    method = "without the other ranks"

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return x."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return x once for each rank."""
        return torch.cat([x] * self.size, dim=-1)


class ProcessGroupRanks(TensorParallel):
    """Several ranks over one backend of torch: gloo on CPU, NCCL on GPUs.

    One process may hold several gloo ranks (tests run them as threads): nothing here is global.
    """

    def __init__(self, backend: dist.ProcessGroup, method: str) -> None:
        """backend: connected. method: as in TensorParallel."""
        self._backend = backend
        self.rank = backend.rank()
        self.size = backend.size()
        self.method = method

    def all_reduce(self, x: Tensor) -> Tensor:
        """Overwrite x, which must be contiguous, with the sum over ranks, and return it."""
        # On CUDA `wait` makes the current stream wait, not this thread.
        self._backend.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate over ranks along the last dimension."""
        parts = x.new_empty(self.size, *x.shape)
        self._backend._allgather_base(parts.view(-1), x.contiguous().view(-1)).wait()
        # Gathered along a new first dimension, which becomes part of the last one.
        return parts.movedim(0, -2).flatten(-2)

    def maximum(self, values: Sequence[float], device: torch.device) -> list[float]:
        """Return each value's maximum over the ranks."""
        most = torch.tensor(values, dtype=torch.float64, device=device)
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.MAX)
        self._backend.allreduce([most], options).wait()
        return most.tolist()


def memory_store() -> Store:
    """Return a store for ranks that are threads of one process."""
    return HashStore()

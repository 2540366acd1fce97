"""TensorParallel: rank, size and the two collectives that a step may use."""

from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store


class TensorParallel(Protocol):
    """One rank's view of its tensor-parallel group."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place where that is free; returns the sum. Same shape everywhere."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate over ranks along the last dimension: [.., n] to [.., size * n]."""
        ...


class SingleRank:
    """The one-rank twin: no process group, no copy."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return x."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return x."""
        return x


class ProcessGroupRanks:
    """Several ranks over a torch process group (gloo on CPU, NCCL on GPUs).

    The group object is built by hand and not registered globally, so one process may hold
    several ranks (tests run them as threads) and a rebuilt group meets no stale state.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Wrap a connected group."""
        self._group = group
        self.rank = group.rank()
        self.size = group.size()

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks in place; x must be contiguous."""
        self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate over ranks along the last dimension."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._group.allgather([parts], [x.contiguous()]).wait()
        return torch.cat(parts, dim=-1)


def connect(
    store: Store, rank: int, size: int, device: torch.device, timeout_s: float
) -> TensorParallel:
    """Join a group through `store`; every collective fails after timeout_s (a peer hangs)."""
    if size == 1:
        return SingleRank()
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cpu":
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        return ProcessGroupRanks(cast(dist.ProcessGroup, gloo))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    nccl = dist.ProcessGroupNCCL(store, rank, size, options)
    return ProcessGroupRanks(cast(dist.ProcessGroup, nccl))


def memory_store() -> Store:
    """Where ranks that are threads of one process meet."""
    return HashStore()

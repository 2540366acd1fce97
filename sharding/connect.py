"""Connect the ranks of a group: the device's process group, and the method of its sums."""

from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import Store

from configs.engine import AllReduce
from configs.wire.sums import MeasuredSums
from sharding.all_reduce import with_symmetric_memory
from sharding.group import ProcessGroupRanks, SingleRank, TensorParallel
from sharding.progress import timed
from sharding.symmetric import SymmetricRanks, world


def connect(
    store: Store,
    rank: int,
    size: int,
    device: torch.device,
    timeout_s: float,
    all_reduce: AllReduce = AllReduce.AUTO,
    known: MeasuredSums | None = None,
) -> TensorParallel:
    """Join a group through `store`; a collective of gloo or NCCL fails after timeout_s.

    All ranks call it together. On CUDA each rank is a process of its own, with its device set.
    known: what such a group has measured on these GPUs; rank 0's counts.
    """
    if size == 1:
        return SingleRank()
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cpu":
        # Built by hand and not registered: a process may hold several of these.
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        return ProcessGroupRanks(cast(dist.ProcessGroup, gloo), "gloo")
    # Symmetric memory finds its group by a name that only registered groups have.
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=timeout)
    backend = cast(dist.ProcessGroup, world()._get_backend(device))
    ranks = ProcessGroupRanks(backend, "nccl")
    with timed("NCCL's first sum"):  # It connects the ranks.
        ranks.maximum([0.0], device)
    return with_symmetric_memory(ranks, store, device, all_reduce, known)


def measured_sums(group: TensorParallel) -> MeasuredSums | None:
    """Return what a group has measured, for `connect`; None where there was nothing to."""
    return group.measured if isinstance(group, SymmetricRanks) else None

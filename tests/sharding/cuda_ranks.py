"""Ranks on GPUs: one process each, as the server has them."""

import gc
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.multiprocessing.spawn import spawn

from configs.engine import AllReduce
from sharding.connect import connect
from sharding.group import TensorParallel

OnRank = Callable[[TensorParallel, torch.device], None]

TIMEOUT_S = 120.0


def run_cuda_ranks(size: int, on_rank: OnRank, all_reduce: AllReduce = AllReduce.AUTO) -> None:
    """Run a module's function on `size` GPUs; what a rank raises is raised here."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    work = (size, store.port, on_rank, all_reduce)
    spawn(_rank_main, work, nprocs=size)  # type: ignore[no-untyped-call]


def _rank_main(rank: int, size: int, port: int, on_rank: OnRank, all_reduce: AllReduce) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    failure = ""
    try:
        on_rank(connect(store, rank, size, device, TIMEOUT_S, all_reduce), device)
    except Exception:
        failure = traceback.format_exc()
    # NCCL waits for all graphs that hold its collectives, those in an error's frames too.
    gc.collect()
    dist.destroy_process_group()
    if failure:
        raise RuntimeError(failure)

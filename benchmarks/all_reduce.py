"""What an all-reduce costs in a captured step: `python -m benchmarks.all_reduce --gpus 2`.

One process for each GPU sums [rows, hidden] in bfloat16. The table has the microseconds of the
slowest rank for NCCL and for the one-shot and two-shot sums of symmetric memory, with inputs that
are in that memory already. Then come the method that a server selects (sharding/all_reduce.py),
which the first line names, and that sum with the norm behind it, in two launches and in one.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.multiprocessing.spawn import spawn

from configs.engine import AllReduce
from configs.env import export_rank_environment
from modeling.layers.fused import fused_ops
from modeling.layers.summed_norms import NormComparison, serve_summed_norms
from sharding.all_reduce import LARGEST_BYTES, captured_us
from sharding.connect import connect
from sharding.group import ProcessGroupRanks
from sharding.symmetric import (
    MOST_ROWS,
    DoubleBuffer,
    Method,
    Sum,
    SymmetricRanks,
    map_buffer,
    torch_sums,
    world,
)

DTYPE = torch.bfloat16
ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 256, 512, 1024, 2048)
TIMEOUT_S = 120.0


def rank_main(rank: int, size: int, port: int, hidden: int, rows: Sequence[int]) -> None:
    """One rank's part; rank 0 prints."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    selected = connect(store, rank, size, device, TIMEOUT_S, AllReduce.AUTO)
    nccl = ProcessGroupRanks(cast(dist.ProcessGroup, world()._get_backend(device)), "nccl")
    methods: dict[Method, Sum] = {Method.NCCL: nccl.all_reduce}
    buffers = None
    if isinstance(selected, SymmetricRanks):
        buffers = DoubleBuffer(map_buffer(2 * LARGEST_BYTES, device).memory)
        methods.update(torch_sums())
    serve_summed_norms(selected, hidden, DTYPE, device)
    comparison = None
    if isinstance(selected, SymmetricRanks) and (fused := fused_ops(device)):
        comparison = NormComparison(selected, fused, torch.ones(hidden, dtype=DTYPE, device=device))
    if rank == 0:
        print(json.dumps({"gpus": size, "torch": torch.__version__, "method": selected.method}))
        names = [*methods, "selected", "and norm", "in one"]
        print(" rows " + "".join(f"{name:>10}" for name in names), flush=True)
    with torch.inference_mode():
        for count in rows:
            x = torch.zeros(count, hidden, dtype=DTYPE, device=device)
            if buffers is not None and x.nbytes <= buffers.buffer_bytes:
                x = buffers.take(x.shape, x.dtype).zero_()
            times = [captured_us(sum_, x) for sum_ in methods.values()]
            room = selected.output_buffer(x.shape, x.dtype)
            times.append(captured_us(selected.all_reduce, room if room is not None else x.clone()))
            if comparison is not None and count <= MOST_ROWS:
                times += comparison.times(count)
            slowest = nccl.maximum(times, device)
            if rank == 0:
                print(f"{count:5} " + "".join(f"{us:10.1f}" for us in slowest), flush=True)
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """Start a process for each GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parsed = parser.parse_args(arguments)
    if torch.cuda.device_count() < parsed.gpus:
        sys.exit(f"this benchmark needs {parsed.gpus} CUDA devices")
    export_rank_environment()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    work = (parsed.gpus, store.port, parsed.hidden, tuple(parsed.rows))
    spawn(rank_main, work, nprocs=parsed.gpus)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()

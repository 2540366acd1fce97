"""Select how GPUs sum: each method is tried, compared with NCCL and measured at start."""

import json
import logging
import socket
from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor
from torch.distributed import Store

from configs.engine import AllReduce
from configs.wire.sums import MeasuredSums
from sharding.group import ProcessGroupRanks, TensorParallel
from sharding.progress import timed
from sharding.symmetric import (
    DoubleBuffer,
    Method,
    PeerBuffers,
    SizeTable,
    Sum,
    SymmetricRanks,
    map_buffer,
    peer_bytes,
    torch_sums,
)

LARGEST_BYTES = 1 << 25
"""Bytes of each of the two buffers, 32 MiB: 4,096 rows of 4,096 in bfloat16, twice the default
step budget."""

SIZES = tuple(1 << power for power in range(13, 26))
"""Bytes at which the methods are measured: one row of 4,096 in bfloat16 up to LARGEST_BYTES."""

CHECKED_SIZES = (16, 1 << 13, 1 << 17, (1 << 22) + 48)
"""Bytes at which the methods are compared with NCCL: one block, one, several and many."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

REPEATS, ROUNDS = 20, 3
"""Sums in one graph, and replays of it; the fastest replay counts."""

MICROSECONDS_PER_MS = 1e3

logger = logging.getLogger("loray.sharding.all_reduce")


class AllReduceError(ValueError):
    """Symmetric memory is configured where it does not work; the message says why."""


def with_symmetric_memory(
    ranks: ProcessGroupRanks,
    store: Store,
    device: torch.device,
    wanted: AllReduce,
    known: MeasuredSums | None = None,
) -> TensorParallel:
    """Return the ranks, summing through symmetric memory where it is wanted, correct and faster.

    known: rank 0's is not measured again. All ranks call it together and select the same. Raises
    AllReduceError if the config demands symmetric memory and it cannot be used.
    """
    if wanted is AllReduce.NCCL:
        return _nccl(ranks, "as configured")
    reason = unreachable(peers(ranks, store, device))
    if reason is None:
        try:
            with timed("mapping buffers of sums"):
                mapped = map_buffer(2 * LARGEST_BYTES + peer_bytes(ranks.size), device)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
    # A rank that failed alone must not leave the others in a barrier.
    if any(ranks.maximum([float(reason is not None)], device)):
        return _without(ranks, wanted, reason or "another rank cannot map its peers' memory")
    buffers, sums = DoubleBuffer(mapped.memory[: 2 * LARGEST_BYTES]), torch_sums()
    of_norms = mapped[2 * LARGEST_BYTES :]
    # Its flags are reset on every rank before any reaches the end of the measurements.
    peer_buffers = PeerBuffers(of_norms.memory, of_norms.addresses)
    known = of_rank_0(ranks, store, known)
    with torch.inference_mode():
        with timed("comparing sums"):
            dtypes, reason = correct_dtypes(ranks, buffers, sums, device)
        if not dtypes:
            return _without(ranks, wanted, reason)
        if known is None:
            methods = {Method.NCCL: ranks.all_reduce} if wanted is AllReduce.AUTO else {}
            with timed("measuring sums"):
                table = measure({**methods, **sums}, ranks, buffers, dtypes[0])
        else:
            table = SizeTable([(size, Method(method)) for size, method in known.methods])
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    description = f"symmetric memory for {names}: {table} (measured)"
    logger.info("all-reduce: %s", description)
    norm_rows = None if known is None else known.norm_rows
    symmetric = SymmetricRanks(ranks, buffers, sums, table, peer_buffers, norm_rows)
    symmetric.serve(frozenset(dtypes), description)
    return symmetric


def peers(ranks: ProcessGroupRanks, store: Store, device: torch.device) -> list[tuple[str, int]]:
    """Send (host, device number) to the other ranks and return all ranks'."""
    # The host's name, because device numbers mean GPUs of one host only.
    mine = json.dumps([socket.gethostname(), device.index])
    store.set(f"all_reduce/{ranks.rank}", mine)
    found = [json.loads(store.get(f"all_reduce/{rank}")) for rank in range(ranks.size)]
    return [(host, index) for host, index in found]


def of_rank_0(
    ranks: ProcessGroupRanks, store: Store, known: MeasuredSums | None
) -> MeasuredSums | None:
    """Return what rank 0 knows: ranks that sum in different ways would wait for each other."""
    if ranks.rank == 0:
        store.set("all_reduce/known", msgspec.json.encode(known).decode())
    return msgspec.json.decode(store.get("all_reduce/known"), type=MeasuredSums | None)


def unreachable(devices_of: Sequence[tuple[str, int]]) -> str | None:
    """Return why some rank's GPU cannot read another's memory; None when all can.

    devices_of: each rank's host and device number.
    """
    hosts = {host for host, _ in devices_of}
    if len(hosts) > 1:
        return f"the ranks are on {len(hosts)} hosts"
    devices = [index for _, index in devices_of]
    if len(set(devices)) < len(devices):
        return (
            "two ranks see their GPU under the same number: start Ray's nodes with "
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1"
        )
    if max(devices) >= torch.cuda.device_count():
        return f"this rank sees {torch.cuda.device_count()} GPUs of its group's"
    for a in devices:
        for b in devices:
            if a != b and not torch.cuda.can_device_access_peer(a, b):
                return f"GPU {a} cannot read the memory of GPU {b}"
    return None


def correct_dtypes(
    ranks: ProcessGroupRanks,
    buffers: DoubleBuffer,
    sums: Mapping[Method, Sum],
    device: torch.device,
) -> tuple[list[torch.dtype], str]:
    """Return the types in which every method gives NCCL's sums on every rank, and why not all."""
    right: list[torch.dtype] = []
    reason = ""
    for dtype in DTYPES:
        try:
            patterns = [_pattern(ranks, size, dtype, device) for size in CHECKED_SIZES]
            # All sizes, whatever is found: a rank that stopped early would leave its peers waiting.
            faults = [_differences(ranks, buffers, sums, x) for x in patterns]
            wrong = "; ".join(filter(None, faults))
        except RuntimeError as error:
            # Refused on the host, before any rank launched anything: all ranks come here.
            wrong = str(error).splitlines()[0]
        if any(ranks.maximum([float(bool(wrong))], device)):
            reason = f"{dtype}: {wrong or 'wrong on another rank'}"
            logger.info("symmetric memory does not serve %s", reason)
        else:
            right.append(dtype)
    return right, reason


def measure(
    methods: Mapping[Method, Sum],
    ranks: ProcessGroupRanks,
    buffers: DoubleBuffer,
    dtype: torch.dtype,
) -> SizeTable:
    """Return the fastest method in a CUDA graph for each of SIZES.

    The slowest rank's time counts, so every rank gets the same table.
    """
    choices = []
    for size in SIZES:
        x = buffers.take((size // dtype.itemsize,), dtype).zero_()
        mine = [captured_us(sum_, x) for sum_ in methods.values()]
        slowest = dict(zip(methods, ranks.maximum(mine, x.device), strict=True))
        shown = ", ".join(f"{method} {us:.1f}" for method, us in slowest.items())
        logger.debug("all-reduce of %d bytes: %s us", size, shown)
        choices.append((size, min(slowest, key=lambda method: slowest[method])))
    # The graphs are gone: their memory goes back to the device.
    torch.cuda.empty_cache()
    return SizeTable(choices)


def captured_us(sum_: Sum, x: Tensor) -> float:
    """Return the microseconds of one sum of x, measured in a CUDA graph of many."""
    # Capture needs a stream of its own, and a first call outside it that allocates what it needs.
    stream = torch.cuda.Stream(x.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        sum_(x)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(REPEATS):
                sum_(x)
        # The first replay loads the graph: it is not measured.
        graph.replay()
        times = []
        for _ in range(ROUNDS):
            start, stop = _timer(), _timer()
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
    torch.cuda.current_stream(x.device).wait_stream(stream)
    return float(min(times)) * MICROSECONDS_PER_MS / REPEATS


def _nccl(ranks: ProcessGroupRanks, reason: str) -> ProcessGroupRanks:
    ranks.method = f"nccl ({reason})"
    return ranks


def _without(ranks: ProcessGroupRanks, wanted: AllReduce, reason: str) -> ProcessGroupRanks:
    """Use NCCL, or raise AllReduceError if the config demands symmetric memory."""
    if wanted is AllReduce.SYMMETRIC:
        raise AllReduceError(
            f"all_reduce is symmetric, but symmetric memory cannot be used here: {reason}. "
            "Set all_reduce to auto or nccl"
        )
    logger.warning("sums go through NCCL, symmetric memory cannot be used: %s", reason)
    return _nccl(ranks, f"no symmetric memory: {reason}")


def _pattern(
    ranks: ProcessGroupRanks, size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return this rank's summand of a comparison: different numbers on each rank."""
    generator = torch.Generator(device).manual_seed(1 + ranks.rank)
    return torch.randn(size // dtype.itemsize, generator=generator, device=device).to(dtype)


def _differences(
    ranks: ProcessGroupRanks, buffers: DoubleBuffer, sums: Mapping[Method, Sum], x: Tensor
) -> str:
    """Describe how sums differ from NCCL's or between ranks; "" where they do not."""
    expected = ranks.all_reduce(x.clone())
    # Each addition may round differently, in another order.
    tolerance = ranks.size * torch.finfo(x.dtype).eps
    faults = []
    for method, sum_ in sums.items():
        found = sum_(buffers.take(x.shape, x.dtype).copy_(x))
        of_all_ranks = ranks.all_gather(found).view(ranks.size, -1)
        if not torch.allclose(found, expected, rtol=tolerance, atol=4 * tolerance):
            faults.append(f"the {method} sum of {x.nbytes} bytes is wrong")
        elif not bool((of_all_ranks == found).all()):
            faults.append(f"the {method} sums of {x.nbytes} bytes differ between ranks")
    return "; ".join(faults)


def _timer() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

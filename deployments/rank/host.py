"""A rank from its start to its end, in an actor or in a thread."""

import os
import socket
import sys
import time
from datetime import timedelta

import torch
from torch.distributed import Store, TCPStore

from configs.engine import AllReduce, Device, EngineConfig
from configs.env import read_kernels
from configs.wire.plan import Capacity
from deployments.rank.messages import LoadReport, MeasuredMemory, StoreAddress
from deployments.rank.transport import Channel
from deployments.rank.worker import Worker
from modeling.kernels.cache import warn_of_other_kernels
from modeling.runner.loading import pick_device
from modeling.runner.preload import preload
from modeling.runner.report import RunnerReport
from modeling.runner.select import load_runner
from modeling.runner.shared import BaseRunner, LoadedRunner
from sharding.connect import connect, measured_sums
from sharding.group import TensorParallel
from sharding.progress import timed

_LIBRARY_BYTES = 2**28


def open_store(host: str, size: int, timeout_s: float) -> tuple[Store, StoreAddress]:
    """Open a group's store on a free port, bound here so that no process can take it first."""
    timeout = timedelta(seconds=timeout_s)
    # By default the store listens on all interfaces, and it has no secret.
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address[:2], family=family, backlog=size)
    port = listener.getsockname()[1]
    store = TCPStore(
        host, port, size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, StoreAddress(host, port, size)


def join_store(address: StoreAddress, timeout_s: float) -> Store:
    """Open a client of a group's store."""
    host, port, size = address.host, address.port, address.size
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, port, size, False, timeout, wait_for_workers=False)


class RankHost:
    """One rank: loads its part of the model, then runs plans for a driver."""

    def __init__(
        self, config: EngineConfig, folder: str, rank: int, cuda_ordinal: int | None = None
    ) -> None:
        """folder: the base model's files here. cuda_ordinal: this rank's GPU, None for all."""
        self._cuda_ordinal = cuda_ordinal
        read_kernels(config.kernel_cache)
        self._config = config.model_copy(
            update={"model": config.model.model_copy(update={"id": folder})}
        )
        self._rank = rank
        self._group: TensorParallel | None = None
        self._loaded: LoadedRunner | None = None
        self._runner: BaseRunner | None = None

    def prepare(self, context: bool = True) -> None:
        """Import what a start needs and make the CUDA context; takes no memory beyond that.

        context: False where the process has no GPU yet.
        """
        # To ask for the present device would choose one.
        has_gpu = torch.cuda.is_available() and self._config.device is not Device.CPU
        device = self._enter_thread() if context or not has_gpu else torch.device("cuda")
        several = self._config.tensor_parallel > 1
        maps = several and self._config.all_reduce is not AllReduce.NCCL
        preload(self._config.attention, device, maps, context)

    def free_device_bytes(self) -> int | None:
        """Return the free memory of this rank's GPU; None on a CPU."""
        device = self._enter_thread()
        return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None

    def measure(
        self, store: Store, timeout_s: float, before: MeasuredMemory | None = None
    ) -> MeasuredMemory:
        """Join the group and load the weights; returns how many cache blocks would fit.

        before: what the rank that this one replaces has measured; it holds where as much is free.
        """
        self._started = time.monotonic()
        device = self._enter_thread()
        warn_of_other_kernels(device)
        size, all_reduce = self._config.tensor_parallel, self._config.all_reduce
        with timed("connecting the ranks"):
            known = None if before is None else before.sums
            self._group = connect(store, self._rank, size, device, timeout_s, all_reduce, known)
        # With an ordinal, this process sees GPUs of other ranks, too, and must not use them.
        spread = self._cuda_ordinal is None
        self._loaded = load_runner(self._config, self._group, device, spread)
        free = self.free_device_bytes()
        if before is not None and self._agreed(_is_as_free(free, before.free_bytes), device):
            return before
        tokens = self._config.limits.max_batch_total_tokens
        allowed = sys.maxsize if tokens is None else self._loaded.blocks_of(tokens)
        num_blocks = min(self._loaded.measure(), allowed)
        return MeasuredMemory(num_blocks, free, measured_sums(self._group))

    def _agreed(self, holds: bool, device: torch.device) -> bool:
        """Whether it holds on all ranks: they measure together, or none does."""
        assert self._group is not None
        count = torch.full((4,), float(holds), device=device)
        return self._group.all_reduce(count)[0].item() == self._config.tensor_parallel

    def allocate(self, num_blocks: int, record: bool = True) -> LoadReport:
        """Allocate num_blocks of cache (the group's minimum) and report what this rank holds.

        record: whether CUDA graphs are recorded now, or while steps run already.
        """
        self._enter_thread()
        assert self._loaded is not None, "measure comes first"
        assert self._group is not None
        self._runner = self._loaded.allocate(num_blocks, record)
        report = self._runner.report
        return LoadReport(
            rank=self._rank,
            pid=os.getpid(),
            capacity=capacity_of(report),
            dtype=report.dtype,
            device=report.device,
            attention=f"{report.attention} ({report.attention_reason})",
            adapter_kernel=f"{report.adapter_kernel} ({report.adapter_kernel_reason})",
            all_reduce=self._group.method,
            weight_bytes_resident=report.weight_bytes_resident,
            cache_bytes=report.kv_bytes,
            adapter_bytes=report.adapter_pool_bytes,
            load_seconds=time.monotonic() - self._started,
            weight_forms=dict(report.weight_forms),
            graphs_left=self._runner.num_unrecorded,
            state_bytes=report.state_bytes,
        )

    def run(self, channel: Channel) -> None:
        """Run plans until the driver closes the connection or a step fails."""
        if self._enter_thread().type == "cuda":
            # The host's operations are small, and a pool of threads would only delay them.
            torch.set_num_threads(1)
        assert self._runner is not None, "allocate comes first"
        threads = self._config.adapters.staging_threads
        Worker(self._runner, self._rank, channel, threads).run()

    def check(self) -> None:
        """Assert the runner's invariants while no step and no adapter's copy is in flight."""
        assert self._runner is not None, "allocate comes first"
        self._runner.check()

    def _enter_thread(self) -> torch.device:
        """Set torch's per-thread state: Ray may run every method on another thread."""
        if self._cuda_ordinal is not None:
            torch.cuda.set_device(self._cuda_ordinal)
        device = pick_device(self._config.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(self._config.cpu_threads)
        return device


def _is_as_free(here: int | None, before: int | None) -> bool:
    """Whether a GPU has as much free memory as before, but for what libraries take at times.

    Without a GPU what fits depends on the config alone.
    """
    if here is None or before is None:
        return here is before
    return here >= before - _LIBRARY_BYTES


def capacity_of(report: RunnerReport) -> Capacity:
    """Return the capacity in a runner's report, for the scheduler."""
    return Capacity(
        num_blocks=report.num_blocks,
        block_size=report.block_size,
        projections=report.projections,
        adapter_pages=report.adapter_pages,
        pool_pages=report.pool_pages,
        adapter_slots=report.adapter_slots,
        host_bytes=report.host_bytes,
        max_total_tokens=report.max_total_tokens,
        chunked=report.paged,
        prefix_caching=report.paged and report.kept_states != 0,
        rope_sets=report.rope_sets,
        kv_groups=report.kv_groups,
        drafts=report.paged and not report.state_bytes,
        draft_heads=report.draft_heads,
        kept_states=report.kept_states,
    )

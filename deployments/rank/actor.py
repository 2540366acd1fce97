"""The Ray actor of one rank; it runs a `RankHost`.

The driver imports this class but must not import torch: methods import it when they run.
"""

import os

import ray

from configs.engine import EngineConfig
from configs.env import cuda_ordinal
from configs.interpreter import shorten_switch_interval
from configs.observability import LogFormat
from deployments.observability.logs import configure_logs
from deployments.rank.messages import LoadReport, MeasuredMemory, StoreAddress
from deployments.rank.standby import RankProcess
from deployments.rank.transport import Address, dial


class RankActor:
    """One process of a tensor-parallel group; Ray runs its methods on plain threads."""

    def __init__(
        self,
        config: EngineConfig,
        folder: str,
        rank: int,
        log_format: LogFormat = LogFormat.TEXT,
        gpu: str | None = None,
    ) -> None:
        """Configure the process; `measure` loads the weights.

        gpu: Ray's id of the GPU, of a process for which Ray has reserved none.
        """
        from deployments.rank.host import RankHost

        configure_logs(f"rank-{rank}", log_format)
        shorten_switch_interval()
        gpus = ray.get_gpu_ids() if gpu is None else [gpu]
        # A rank with several GPUs sees no others (see RayRanks), so it may use all that it sees.
        ordinal = cuda_ordinal(str(gpus[0])) if len(gpus) == 1 else None
        self._host = RankHost(config, folder, rank, ordinal)
        self._rank = rank
        self._gpus = tuple(str(each) for each in gpus)

    def __repr__(self) -> str:
        """The name that Ray puts before this actor's log lines."""
        return f"rank-{self._rank}"

    def process(self) -> RankProcess:
        """Return where this rank runs."""
        return RankProcess(ray.get_runtime_context().get_node_id(), os.getpid(), self._gpus)

    def prepare(self) -> None:
        """Load what a start needs, so that this process can take over soon."""
        self._host.prepare()

    def free_device_bytes(self) -> int | None:
        """Return the free memory of this rank's GPU; None on a CPU."""
        return self._host.free_device_bytes()

    def open_store(self, size: int, timeout_s: float) -> StoreAddress:
        """Open the group's rendezvous on a free port of this node (rank 0 only)."""
        from deployments.rank.host import open_store

        self._store, address = open_store(ray.util.get_node_ip_address(), size, timeout_s)
        return address

    def measure(
        self, store: StoreAddress, timeout_s: float, before: MeasuredMemory | None
    ) -> MeasuredMemory:
        """Join the group, load the weights, as `RankHost.measure` does."""
        from deployments.rank.host import join_store

        return self._host.measure(join_store(store, timeout_s), timeout_s, before)

    def allocate(self, num_blocks: int, record: bool) -> LoadReport:
        """Allocate the cache and warm up; record: CUDA graphs, too."""
        return self._host.allocate(num_blocks, record)

    def run(self, address: Address, same_node: bool) -> None:
        """Run plans until the driver closes the connection; the call fails if the process ends."""
        self._host.run(dial(address, self._rank, same_node))

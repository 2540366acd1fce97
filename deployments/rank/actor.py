"""The Ray actor of one rank; it runs a `RankHost`.

The driver imports this class but must not import torch: methods import it when they run.
"""

from typing import TYPE_CHECKING

import ray

from configs.engine import EngineConfig
from configs.env import cuda_ordinal
from configs.interpreter import shorten_switch_interval
from configs.observability import LogFormat
from deployments.observability.logs import configure_logs
from deployments.rank.guard import Guard
from deployments.rank.messages import LoadReport, MeasuredMemory, StoreAddress
from deployments.rank.processes import Process, kill, this_process
from deployments.rank.standby import Detached, Known, RankProcess
from deployments.rank.transport import Address, dial

if TYPE_CHECKING:
    from deployments.rank.host import RankHost

_ENDING_S = 10.0


class RankActor:
    """One process of a tensor-parallel group; Ray runs its methods on plain threads."""

    def __init__(
        self,
        rank: int,
        log_format: LogFormat = LogFormat.TEXT,
        gpus: tuple[str, ...] | None = None,
        detached: Detached | None = None,
    ) -> None:
        """Configure the process; `join` makes it a rank.

        gpus: Ray's ids, of a process for which Ray has reserved none. detached: of a process that
        may outlive its driver.
        """
        configure_logs(f"rank-{rank}", log_format)
        shorten_switch_interval()
        self._rank = rank
        self._gpus = tuple(map(str, ray.get_gpu_ids())) if gpus is None else gpus
        self._detached = detached
        self._guard: Guard | None = None
        if detached is not None:
            self._guard = Guard(detached.driver, detached.wait_s, detached.keeper)
            self._guard.watch()
        self._joined: RankHost | None = None

    def __repr__(self) -> str:
        """The name that Ray puts before this actor's log lines."""
        return f"rank-{self._rank}"

    def process(self) -> RankProcess:
        """Return where this rank runs."""
        node = ray.get_runtime_context().get_node_id()
        return RankProcess(node, this_process(), self._gpus)

    def prepare(self, config: EngineConfig) -> None:
        """Load what a start needs, so that this process can take over soon.

        Makes no CUDA context while it is not known on which GPU.
        """
        self._host(config, "").prepare(context=bool(self._gpus))

    def waits(self) -> bool:
        """Whether this process has no driver that lives."""
        return self._guard is not None and self._guard.waits

    def acquire(self, driver: Process, gpus: tuple[str, ...]) -> bool:
        """Give this process to a driver of this machine; False if it has one or another GPU.

        The rank beside which it stood is killed: its driver has ended.
        """
        assert self._guard is not None
        assert self._detached is not None
        if self._gpus not in ((), gpus) or not self._guard.acquire(driver):
            return False
        self._gpus = gpus
        if self._detached.beside is not None:
            kill(self._detached.beside, _ENDING_S)
        return True

    def known(self) -> Known | None:
        """Return what the rank beside which it stood has measured."""
        return None if self._detached is None else self._detached.known

    def join(self, config: EngineConfig, folder: str) -> RankProcess:
        """Become a rank of a group; folder: the base model's files here."""
        if self._guard is not None:
            self._guard.work()
        self._joined = self._host(config, folder)
        return self.process()

    def free_device_bytes(self) -> int | None:
        """Return the free memory of this rank's GPU; None on a CPU."""
        return self._present.free_device_bytes()

    def open_store(self, size: int, timeout_s: float) -> StoreAddress:
        """Open the group's rendezvous on a free port of this node (rank 0 only)."""
        from deployments.rank.host import open_store

        self._store, address = open_store(ray.util.get_node_ip_address(), size, timeout_s)
        return address

    def measure(
        self, store: StoreAddress, timeout_s: float, before: MeasuredMemory | None
    ) -> MeasuredMemory:
        """Join the group's sums and load the weights, as `RankHost.measure` does."""
        from deployments.rank.host import join_store

        return self._present.measure(join_store(store, timeout_s), timeout_s, before)

    def allocate(self, num_blocks: int, record: bool) -> LoadReport:
        """Allocate the cache and warm up; record: CUDA graphs, too."""
        return self._present.allocate(num_blocks, record)

    def run(self, address: Address, same_node: bool) -> None:
        """Run plans until the driver closes the connection; the call fails if the process ends."""
        self._present.run(dial(address, self._rank, same_node))

    @property
    def _present(self) -> "RankHost":
        assert self._joined is not None, "join comes first"
        return self._joined

    def _host(self, config: EngineConfig, folder: str) -> "RankHost":
        from deployments.rank.host import RankHost

        # A rank with several GPUs sees no others (see RayRanks), so it may use all that it sees.
        ordinal = cuda_ordinal(self._gpus[0]) if len(self._gpus) == 1 else None
        return RankHost(config, folder, self._rank, ordinal)

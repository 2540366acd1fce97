"""The Ray actor of one rank; it runs a `RankHost`.

The driver imports this class but must not import torch: methods import it when they run.
"""

import logging
import threading
from typing import TYPE_CHECKING

import ray

from configs.engine import EngineConfig
from configs.env import cuda_ordinal
from configs.interpreter import freeze_objects, shorten_switch_interval
from configs.observability import LogFormat
from deployments.observability.logs import configure_logs
from deployments.rank.ahead import Expected, StartAhead
from deployments.rank.guard import Guard
from deployments.rank.messages import LoadReport, MeasuredMemory, StoreAddress
from deployments.rank.processes import Process, kill, this_process
from deployments.rank.standby import Detached, Known, RankProcess
from deployments.rank.transport import Address, dial

if TYPE_CHECKING:
    from deployments.rank.host import RankHost

_ENDING_S = 10.0

logger = logging.getLogger("loray.rank.actor")


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
            waits = (detached.driver, detached.wait_s, detached.keeper)
            self._guard = Guard(*waits, unled=self._start_ahead)
        self._expected: tuple[Expected, StoreAddress] | None = None
        self._ahead: StartAhead | None = None
        self._prepared = threading.Event()
        self._address: StoreAddress | None = None
        self._joined: RankHost | None = None
        if self._guard is not None:
            self._guard.watch()

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
        try:
            self._host(config, "").prepare(context=bool(self._gpus))
            # Here, so that less is left for `run`, for which requests wait.
            freeze_objects()
        finally:
            self._prepared.set()

    def expect(self, expected: Expected, store: StoreAddress) -> None:
        """Have this process start by itself once it has no driver; `prepare` comes first.

        store: by which the group connects.
        """
        self._expected = expected, store
        if self._guard is not None:
            self._guard.look()

    def waits(self) -> bool:
        """Whether this process has no driver that lives."""
        return self._guard is not None and self._guard.waits

    def acquire(self, driver: Process, gpus: tuple[str, ...], digest: str) -> bool:
        """Give this process to a driver of this machine; False if it has one or another GPU.

        digest: of what the driver starts (`digest_of`); ValueError if this process may hold other
        weights on the driver's GPU, and must end. The rank beside which it stood is killed: its
        driver has ended.
        """
        assert self._guard is not None
        other = self._expected is not None and self._expected[0].digest != digest
        if self._gpus not in ((), gpus) or (other and not gpus):
            return False
        if not self._guard.acquire(driver):
            return False
        self._end_beside()
        if other:
            raise ValueError("this process is for another config")
        self._gpus = gpus
        return True

    def known(self) -> Known | None:
        """Return what the rank beside which it stood has measured."""
        return None if self._detached is None else self._detached.known

    def join(self, config: EngineConfig, folder: str) -> RankProcess:
        """Become a rank of a group; folder: the base model's files here."""
        if self._guard is not None:
            self._guard.work()
        if self._ahead is None:
            self._joined = self._host(config, folder)
        return self.process()

    def free_device_bytes(self) -> int | None:
        """Return the free memory of this rank's GPU; None on a CPU."""
        return self._present.free_device_bytes()

    def open_store(self, size: int, timeout_s: float) -> StoreAddress:
        """Open the group's rendezvous on a free port of this node (rank 0 only); only once."""
        from deployments.rank.host import open_store

        if self._address is None:
            self._store, self._address = open_store(ray.util.get_node_ip_address(), size, timeout_s)
        return self._address

    def measure(
        self, store: StoreAddress, timeout_s: float, before: MeasuredMemory | None
    ) -> MeasuredMemory:
        """Join the group's sums and load the weights, as `RankHost.measure` does."""
        if self._ahead is not None:
            return self._ahead.measured(timeout_s)
        return _measure(self._present, store, timeout_s, before)

    def allocate(self, num_blocks: int, record: bool, timeout_s: float) -> LoadReport:
        """Allocate the cache and warm up; record: CUDA graphs, too."""
        if self._ahead is not None:
            return self._ahead.allocated(num_blocks, record, timeout_s)
        return self._present.allocate(num_blocks, record)

    def run(self, address: Address, same_node: bool) -> None:
        """Run plans until the driver closes the connection; the call fails if the process ends."""
        freeze_objects()
        self._present.run(dial(address, self._rank, same_node))

    @property
    def _present(self) -> "RankHost":
        assert self._joined is not None, "join comes first"
        return self._joined

    def _start_ahead(self) -> None:
        """Start as expected, on another thread; the guard's, which is here, must look on."""
        if self._expected is None or self._ahead is not None:
            return
        logger.info("no driver has this process: it loads the weights for the next one")
        expected, store = self._expected
        timeout_s = expected.config.recovery.start_timeout_s

        def measure() -> MeasuredMemory:
            self._prepared.wait(timeout_s)
            self._end_beside()
            self._joined = self._host(expected.config, expected.folder)
            return _measure(self._joined, store, timeout_s, expected.memory)

        def allocate(num_blocks: int, record: bool) -> LoadReport:
            return self._present.allocate(num_blocks, record)

        self._ahead = StartAhead(expected, measure, allocate)

    def _end_beside(self) -> None:
        """Kill the rank beside this process: its driver has ended."""
        if self._detached is not None and self._detached.beside is not None:
            kill(self._detached.beside, _ENDING_S)

    def _host(self, config: EngineConfig, folder: str) -> "RankHost":
        from deployments.rank.host import RankHost

        # A rank with several GPUs sees no others (see RayRanks), so it may use all that it sees.
        ordinal = cuda_ordinal(self._gpus[0]) if len(self._gpus) == 1 else None
        return RankHost(config, folder, self._rank, ordinal)


def _measure(
    host: "RankHost", store: StoreAddress, timeout_s: float, before: MeasuredMemory | None
) -> MeasuredMemory:
    from deployments.rank.host import join_store

    return host.measure(join_store(store, timeout_s), timeout_s, before)

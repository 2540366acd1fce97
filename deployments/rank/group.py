"""A group of ranks under Ray: one actor a rank in the driver's placement group.

Ray starts and kills the ranks and reports the end of one; plans travel by socket.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from configs.engine import EngineConfig
from configs.env import RANK_ENVIRONMENT
from configs.observability import LogFormat
from deployments.rank.actor import RankActor
from deployments.rank.ahead import Expected, digest_of
from deployments.rank.guard import UNUSED_S
from deployments.rank.messages import LoadReport, MeasuredMemory
from deployments.rank.processes import await_end, sigkill, this_process
from deployments.rank.standby import QUIET_S, Detached, Known, RankProcess, StandbyRanks
from deployments.rank.transport import Listener, RankLinks, RanksLost
from deployments.rank.waiting import (
    FreeProcess,
    acquire,
    keep_spares,
    num_gpus_here,
    start_detached,
    waiting_groups,
)

_ENDING_SECONDS = 10.0

logger = logging.getLogger("loray.rank.group")


class RayRanks:
    """Rank actors of one driver replica; `start` may be called again after `stop`."""

    def __init__(
        self,
        config: EngineConfig,
        folder: str,
        bundles: PlacementGroup | None,
        log_format: LogFormat = LogFormat.TEXT,
    ) -> None:
        """bundles: the replica's placement group; bundle 0 is the driver's, each other a rank's.

        A rank has all GPUs of its bundle.
        """
        self._config = config
        self._folder = folder
        self._bundles = bundles
        self._log_format = log_format
        self._namespace = f"loray-{secrets.token_hex(4)}"
        self._actors: list[ActorHandle] = []
        self._processes: list[RankProcess] = []
        self._links: RankLinks | None = None
        self._ending: list[Callable[[float], object]] = []
        self._standby = StandbyRanks(self._spawn_standby)
        self._standby_group = ""
        self._spares: threading.Timer | None = None
        # Whether these ranks replace others, for which requests may wait.
        self._replaces = False
        # What the last ranks that served have measured; a start that fails forgets it.
        self._measured: list[MeasuredMemory | None] = [None] * self._num_ranks

    def start(self) -> tuple[RankLinks, list[LoadReport]]:
        """Start, load and connect every rank; RanksLost says which step failed."""
        timeout_s = self._config.recovery.start_timeout_s
        size = self._num_ranks
        began = time.monotonic()
        config = self._rank_config
        try:
            self._actors = self._standby.take() or self._found_or_spawned()
            joined = [actor.join.remote(config, self._folder) for actor in self._actors]
            self._processes = ray.get(joined, timeout=timeout_s)
            store = ray.get(self._actors[0].open_store.remote(size, timeout_s), timeout=timeout_s)
            logger.info("%d ranks started in %.1f s, loading", size, time.monotonic() - began)
            self.await_ends()
            before, self._measured = self._measured, [None] * size
            measuring = [
                actor.measure.remote(store, timeout_s, memory)
                for actor, memory in zip(self._actors, before, strict=True)
            ]
            measured = ray.get(measuring, timeout=timeout_s)
            num_blocks = min(memory.num_blocks for memory in measured)
            record = not self._records_later
            allocated = [
                actor.allocate.remote(num_blocks, record, timeout_s) for actor in self._actors
            ]
            reports: list[LoadReport] = ray.get(allocated, timeout=timeout_s)
            self._links = self._connect()
        except (ray.exceptions.RayError, RanksLost) as error:
            self.stop()
            raise RanksLost(f"the ranks did not start: {error}") from error
        self._replaces = True
        if self._wants_standby:
            self._measured = measured
        if self._has_standby:
            self._prepare_standby(config, measured, num_blocks)
            self._spares = threading.Timer(QUIET_S, keep_spares, (config, self._log_format))
            self._spares.daemon = True
            self._spares.start()
        return self._links, reports

    def stop(self) -> None:
        """Kill every rank: CUDA graphs and communicators of live ranks refer to dead ones."""
        if self._links is not None:
            self._links.close()
            self._links = None
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        # A process that is stopped (SIGSTOP) reads no message of Ray's; only the kernel ends it.
        self._ending += [_kill_process(each) for each in self._processes]
        self._actors, self._processes = [], []

    def release(self) -> None:
        """Kill every rank and the standby processes, which take device memory too."""
        if self._spares is not None:
            self._spares.cancel()
        standby = self._standby.end()
        self.stop()
        self._ending += [_kill_process(each) for each in standby]

    def await_ends(self) -> None:
        """Wait until killed ranks have freed their memory: new ones measure what is free."""
        ending, self._ending = self._ending, []
        deadline = time.monotonic() + _ENDING_SECONDS
        for wait in ending:
            wait(max(0.0, deadline - time.monotonic()))

    @property
    def _num_ranks(self) -> int:
        if self._bundles is None:
            return self._config.tensor_parallel
        return len(self._bundles.bundle_specs) - 1

    @property
    def _records_later(self) -> bool:
        """Whether CUDA graphs are recorded while steps run already."""
        # Requests wait for ranks that take over.
        return self._config.cuda_graphs_later or (self._replaces and self._wants_standby)

    @property
    def _wants_standby(self) -> bool:
        return self._config.recovery.wants_standby(on_gpu="GPU" in self._rank_bundle(0))

    @property
    def _has_standby(self) -> bool:
        """Whether processes wait to take over."""
        # From all others Ray hides a rank's GPUs if they are several.
        several = any(len(process.gpus) > 1 for process in self._processes)
        return self._wants_standby and not several

    @property
    def _rank_config(self) -> EngineConfig:
        return self._config.model_copy(update={"tensor_parallel": self._num_ranks})

    @cached_property
    def _digest(self) -> str:
        return digest_of(self._rank_config, self._folder)

    def _prepare_standby(
        self, config: EngineConfig, measured: Sequence[MeasuredMemory], num_blocks: int
    ) -> None:
        """Start standby processes soon; config, num_blocks: of this start."""
        self._standby_group = secrets.token_hex(8)
        known = [Known(self._digest, memory) for memory in measured]
        here = ray.get_runtime_context().get_node_id()
        expected = [
            Expected(config, self._folder, self._digest, memory, num_blocks) for memory in measured
        ]
        if any(process.node != here for process in self._processes):
            expected = []  # Those of other nodes end with this driver.
        beside = (self._actors, self._processes, known)
        self._standby.soon(partial(self._standby.prepare, *beside, config, expected))

    def _found_or_spawned(self) -> list[ActorHandle]:
        """Return a process for each rank: all waited for a driver, or all are new."""
        ranks = range(self._num_ranks)
        for found in self._find() if self._wants_standby else ():
            if len(found) == self._num_ranks:
                known = [found[rank].known for rank in ranks]
                if all(each is not None and each.config == self._digest for each in known):
                    self._measured = [each and each.memory for each in known]
                    self._replaces = True
                return [found[rank].actor for rank in ranks]
            for actor, _ in found.values():
                self._ending.append(_kill_process(_process_of(actor)))
        return [self._spawn(rank) for rank in ranks]

    def _find(self) -> Iterator[dict[int, FreeProcess]]:
        """Acquire groups of processes of this node that wait for a driver, one after another.

        Each is a dict by ranks, of which some may be missing.
        """
        num_gpus = self._rank_bundle(0).get("GPU", 0)
        if self._bundles is None or num_gpus > 1:
            return
        nodes = placement_group_table(self._bundles)["bundles_to_node_id"]
        here = ray.get_runtime_context().get_node_id()
        for group in waiting_groups(self._num_ranks, self._log_format):
            there = {rank: actor for rank, actor in group.items() if nodes[1 + rank] == here}
            # Before any is acquired, as this may fail.
            gpus = self._gpus(there) if num_gpus else dict.fromkeys(there, ())
            found = {}
            for rank, actor in there.items():
                process = acquire(actor, gpus[rank], self._digest)
                if process is not None:
                    found[rank] = process
            if found:
                logger.info("processes that waited for a driver: of ranks %s", sorted(found))
                yield found

    def _gpus(self, there: Mapping[int, ActorHandle]) -> Mapping[int, tuple[str, ...]]:
        """Return Ray's ids of the GPUs of these ranks, which are on this node."""
        held = {rank: _process_of(actor).gpus for rank, actor in there.items()}
        whole = num_gpus_here() == self._num_ranks == len({*held.values()} - {()})
        # A group that has all GPUs of the node may take them in any order.
        return held if whole else dict(zip(there, self._ask_bundles([*there]), strict=True))

    def _ask_bundles(self, ranks: Sequence[int]) -> list[tuple[str, ...]]:
        bundle = self._rank_bundle(0)
        task = ray.remote(_gpu_ids)
        running = [
            task.options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                name="gpu-ids",
                scheduling_strategy=self._in_bundle(rank),
            ).remote()
            for rank in ranks
        ]
        timeout_s = self._config.recovery.start_timeout_s
        ids: list[tuple[str, ...]] = ray.get(running, timeout=timeout_s)
        return ids

    def _spawn_standby(self, rank: int, beside: RankProcess, known: Known) -> ActorHandle:
        """Start a rank's process beside the present one's, for which Ray reserves nothing more.

        Elsewhere than here it ends with its bundle.
        """
        driver = this_process()
        if beside.node != ray.get_runtime_context().get_node_id() or not driver.started:
            return self._actor(rank, 0, 0, beside.gpus)
        detached = Detached(
            self._standby_group, driver, UNUSED_S, beside=beside.process, known=known
        )
        return start_detached(rank, self._log_format, beside.gpus, detached, bool(beside.gpus))

    def _spawn(self, rank: int) -> ActorHandle:
        bundle = self._rank_bundle(rank)
        return self._actor(rank, bundle.get("CPU", 0), bundle.get("GPU", 0))

    def _actor(
        self, rank: int, num_cpus: float, num_gpus: float, gpus: tuple[str, ...] | None = None
    ) -> ActorHandle:
        """Start a rank's process; gpus: as in `RankActor`."""
        actor = ray.remote(RankActor).options(
            name=f"rank-{rank}",
            namespace=f"{self._namespace}-{secrets.token_hex(2)}",
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            max_concurrency=2,
            # One GPU: the rank sees all and picks its own. Several: Ray hides all others.
            runtime_env={"env_vars": RANK_ENVIRONMENT} if num_gpus == 1 or gpus else None,
            scheduling_strategy=self._in_bundle(rank),
        )
        return actor.remote(rank, self._log_format, gpus)

    def _in_bundle(self, rank: int) -> "PlacementGroupSchedulingStrategy | str":
        if self._bundles is None:
            return "DEFAULT"
        return PlacementGroupSchedulingStrategy(
            self._bundles, placement_group_bundle_index=1 + rank
        )

    def _rank_bundle(self, rank: int) -> dict[str, float]:
        if self._bundles is None:
            return {}
        specs: list[dict[str, float]] = self._bundles.bundle_specs
        return specs[1 + rank]

    def _connect(self) -> RankLinks:
        here = ray.get_runtime_context().get_node_id()
        listener = Listener(ray.util.get_node_ip_address(), secrets.token_urlsafe(32))
        try:
            runs = [
                actor.run.remote(listener.address, node == here)
                for actor, (node, *_) in zip(self._actors, self._processes, strict=True)
            ]
            links = RankLinks(listener.accept(len(runs), self._config.recovery.start_timeout_s))
        finally:
            listener.close()
        _report_end(runs, links.report_loss)
        return links


def _process_of(actor: ActorHandle) -> RankProcess:
    process: RankProcess = ray.get(actor.process.remote(), timeout=_ENDING_SECONDS)
    return process


def _gpu_ids() -> tuple[str, ...]:
    return tuple(map(str, ray.get_gpu_ids()))


def _kill_process(process: RankProcess) -> Callable[[float], object]:
    """SIGKILL a rank's process on any node; returns a function that waits for its end.

    The function takes the limit in seconds.
    """
    pid = process.process.pid
    if process.node == ray.get_runtime_context().get_node_id():
        sigkill(pid)
        return partial(await_end, pid)
    affinity = NodeAffinitySchedulingStrategy(process.node, soft=False)
    killer = ray.remote(_end_process).options(
        num_cpus=0, scheduling_strategy=affinity, max_retries=0, name="kill-rank"
    )
    killed = killer.remote(pid)
    # Where the node is gone too, the task fails at once.
    return lambda timeout_s: ray.wait([killed], timeout=timeout_s)


def _end_process(pid: int) -> None:
    sigkill(pid)
    await_end(pid, _ENDING_SECONDS)


def _report_end(runs: list["ray.ObjectRef[None]"], lost: Callable[[str], None]) -> None:
    """Call `lost` as soon as the `run` call of any rank ends."""

    def wait() -> None:
        done, _ = ray.wait(runs, num_returns=1)
        rank = runs.index(done[0])
        try:
            ray.get(done[0])
        except ray.exceptions.RayError as error:
            lost(f"rank-{rank} died: {str(error).splitlines()[0]}")
        else:
            lost(f"rank-{rank} left its loop")

    threading.Thread(target=wait, name="rank-ends", daemon=True).start()

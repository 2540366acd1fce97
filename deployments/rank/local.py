"""A group of ranks inside this process, one thread a rank: for tests and benchmarks."""

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from configs.engine import EngineConfig
from deployments.rank.host import RankHost
from deployments.rank.messages import LoadReport
from deployments.rank.transport import Channel, RankLinks
from sharding.group import memory_store
from sources.model import fetch_model


class LocalRanks:
    """Ranks as threads over socket pairs and, for more than one, gloo."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._links: RankLinks | None = None
        self._threads: list[threading.Thread] = []
        self._hosts: list[RankHost] = []

    def start(self) -> tuple[RankLinks, list[LoadReport]]:
        """Load every rank; returns the links and the load reports."""
        size = self._config.tensor_parallel
        timeout_s = self._config.recovery.start_timeout_s
        folder = str(fetch_model(self._config.model))
        hosts = self._hosts = [RankHost(self._config, folder, rank) for rank in range(size)]
        store = memory_store()
        with ThreadPoolExecutor(size) as pool:
            measured = pool.map(lambda host: host.measure(store, timeout_s), hosts)
            num_blocks = min(memory.num_blocks for memory in measured)
            reports = list(pool.map(lambda host: host.allocate(num_blocks), hosts))
        pairs = [socket.socketpair() for _ in hosts]
        for rank, (host, (_, rank_end)) in enumerate(zip(hosts, pairs, strict=True)):
            self._spawn(rank, partial(host.run, Channel(rank_end)))
        self._links = RankLinks([Channel(driver_end) for driver_end, _ in pairs])
        return self._links, reports

    def stop(self) -> None:
        """Close the connections and wait for the threads."""
        if self._links is not None:
            self._links.close()
            self._links = None
        for thread in self._threads:
            thread.join(timeout=10.0)
        self._threads.clear()
        self._hosts = []

    def release(self) -> None:
        """End as `stop` does: no process waits to take over."""
        self.stop()

    def await_ends(self) -> None:
        """Return at once: `stop` has waited."""

    def check(self) -> None:
        """Assert every rank's invariants while no step and no adapter's copy is in flight."""
        for host in self._hosts:
            host.check()

    def _spawn(self, rank: int, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=f"rank-{rank}", daemon=True)
        self._threads.append(thread)
        thread.start()

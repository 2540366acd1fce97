"""Standby processes: one for each rank, with torch and CUDA loaded, to take over from lost ranks.

A process's start, its imports and its CUDA context take seconds, more than weights do. A standby
process has done that, and holds no weights and no part of the cache. It takes over where its rank
was: on the same node, the same GPU.

On the driver's node it outlives the driver for half a minute and loads the weights meanwhile
(`ahead.py`), and the next driver finds it (`waiting.py`).
"""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import ray
from ray.actor import ActorHandle

from configs.engine import EngineConfig
from deployments.rank.ahead import Expected
from deployments.rank.messages import MeasuredMemory
from deployments.rank.processes import Process

logger = logging.getLogger("loray.rank.standby")

# What a GPU must have free beside its rank: a standby process takes 0.7 to 1.3 GB of an H200's
# memory, and steps need some too.
LEAST_FREE_BYTES = 2 * 10**9
QUIET_S = 2.0
"""How long new ranks serve before others start beside them: what waits for them comes first."""

_ANSWER_TIMEOUT_S = 30.0


class RankProcess(NamedTuple):
    """Where a rank runs: Ray's node id, the process, Ray's ids of its GPUs."""

    node: str
    process: Process
    gpus: tuple[str, ...]


class Known(NamedTuple):
    """What a rank has measured; config: the digest of the config that it holds for."""

    config: str
    memory: MeasuredMemory


class Detached(NamedTuple):
    """A process that may outlive its driver.

    group: names the processes that are taken together. driver, wait_s, keeper: as in `Guard`.
    beside: the rank that it may replace, and `known` that one's measurements.
    """

    group: str
    driver: Process | None
    wait_s: float
    keeper: Process | None = None
    beside: Process | None = None
    known: Known | None = None


class StandbyRanks:
    """The standby processes of one group; `take` gives them away."""

    def __init__(
        self,
        spawn: Callable[[int, RankProcess, Known], ActorHandle],
        quiet_s: float = QUIET_S,
    ) -> None:
        """spawn: starts a process beside that of a rank, with the rank's measurements."""
        self._spawn = spawn
        self._quiet_s = quiet_s
        self._soon: threading.Timer | None = None
        self._lock = threading.Lock()
        self._actors: list[ActorHandle] = []
        self._begun: list[Any] = []  # references to their `RankProcess`es
        self._prepared: list[Any] = []  # references to the ends of their preparations

    def soon(self, prepare: Callable[[], None]) -> None:
        """Call `prepare` after `quiet_s`, unless `take` or `end` comes first."""

        def prepare_if_wanted() -> None:
            with self._lock:
                if self._soon is timer:
                    prepare()

        self._soon = timer = threading.Timer(self._quiet_s, prepare_if_wanted)
        timer.daemon = True
        timer.start()

    def prepare(
        self,
        ranks: Sequence[ActorHandle],
        processes: Sequence[RankProcess],
        known: Sequence[Known],
        config: EngineConfig,
        expected: Sequence[Expected] = (),
    ) -> None:
        """Start a process for each rank, if every GPU has room for one; returns soon.

        config: the engine's. expected: what each does if its driver ends; none do anything if none
        is given.
        """
        try:
            before = ray.get(
                [rank.free_device_bytes.remote() for rank in ranks], timeout=_ANSWER_TIMEOUT_S
            )
        except ray.exceptions.RayError:
            return  # They are gone, and their user says so.
        free = min((bytes for bytes in before if bytes is not None), default=LEAST_FREE_BYTES)
        if free < LEAST_FREE_BYTES:
            logger.warning(
                "no standby processes: a GPU has %.1f GB free, and they are started from %.1f on; "
                "a smaller engine.cache.device_memory_fraction leaves more",
                free / 1e9,
                LEAST_FREE_BYTES / 1e9,
            )
            return
        beside = zip(processes, known, strict=True)
        self._actors = [self._spawn(rank, *each) for rank, each in enumerate(beside)]
        self._begun = [actor.process.remote() for actor in self._actors]
        self._prepared = [actor.prepare.remote(config) for actor in self._actors]
        if expected:
            expect(self._actors, expected)
        state = (ranks, before, self._prepared)
        threading.Thread(target=_report, args=state, name="standby", daemon=True).start()

    def take(self) -> list[ActorHandle]:
        """Return the processes, ready or nearly so; none if one of them has failed."""
        with self._lock:
            try:
                for prepared in self._prepared:
                    if ray.wait([prepared], timeout=0)[0]:
                        ray.get(prepared)
            except ray.exceptions.RayError as error:
                logger.warning("a standby process has ended: %s", str(error).splitlines()[0])
                self._kill()
            return self._forget()

    def end(self) -> list[RankProcess]:
        """Kill them; return those that had begun: they hold memory until they have ended."""
        with self._lock:
            return self._kill()

    def _kill(self) -> list[RankProcess]:
        begun: list[RankProcess] = []
        for actor, process in zip(self._actors, self._begun, strict=True):
            with suppress(ray.exceptions.RayError):
                if ray.wait([process], timeout=0)[0]:
                    begun.append(ray.get(process))
            ray.kill(actor, no_restart=True)
        self._forget()
        return begun

    def _forget(self) -> list[ActorHandle]:
        actors, self._actors, self._begun, self._prepared = self._actors, [], [], []
        self._soon = None
        return actors


def expect(
    ranks: Sequence[ActorHandle], expected: Sequence[Expected]
) -> "list[ray.ObjectRef[None]]":
    """Have the processes of a group start by themselves while they have no driver.

    Returns references that are ready when each knows it.
    """
    timeout_s = expected[0].config.recovery.start_timeout_s
    store = ranks[0].open_store.remote(len(ranks), timeout_s)
    return [rank.expect.remote(each, store) for rank, each in zip(ranks, expected, strict=True)]


def _report(
    ranks: Sequence[ActorHandle],
    free: Sequence[int | None],
    prepared: "Sequence[ray.ObjectRef[None]]",
) -> None:
    """Log that standby processes are ready, and the device memory that they take."""
    try:
        ray.get(list(prepared))
        left = ray.get([rank.free_device_bytes.remote() for rank in ranks])
    except ray.exceptions.RayError:
        return  # They are gone, or the ranks are: the next start says why.
    taken = [a - b for a, b in zip(free, left, strict=True) if a is not None and b is not None]
    memory = f"{max(taken) / 1e6:.0f} MB of device memory each" if taken else "no device memory"
    logger.info("%d standby processes are ready; they take %s", len(prepared), memory)

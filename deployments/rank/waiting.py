"""Ranks' processes of this node that wait for a driver, and how a driver finds them.

Their drivers have ended, or `loray serve` has started them while Serve still starts. They are
actors of Ray that belong to no placement group; `guard.py` ends those that no driver takes.
"""

import hashlib
import logging
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from configs.engine import Device, EngineConfig
from configs.env import RANK_ENVIRONMENT
from configs.observability import LogFormat
from deployments.rank.actor import RankActor
from deployments.rank.processes import this_process
from deployments.rank.standby import Detached, Known

NAMESPACE = "loray-standby"
_ANSWER_TIMEOUT_S = 10.0
_ACQUIRE_TIMEOUT_S = 20.0  # The rank before it may have to end first.
_AHEAD_S, _SPARE_S = 300.0, 600.0
"""How long processes wait for their first driver: started ahead of it, or beside another one."""

logger = logging.getLogger("loray.rank.standby")


class FreeProcess(NamedTuple):
    """A process that belongs to this driver now; known: measured by the rank before it."""

    actor: ActorHandle
    known: Known | None


def start_detached(
    rank: int,
    log_format: LogFormat,
    gpus: tuple[str, ...],
    detached: Detached,
    sees_gpus: bool,
) -> ActorHandle:
    """Start a process on this node; gpus: Ray's ids, empty while the driver has not said them."""
    here = ray.get_runtime_context().get_node_id()
    actor = ray.remote(RankActor).options(
        name=f"{_kind(rank, log_format)}-{secrets.token_hex(8)}",
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        max_concurrency=3,
        runtime_env={"env_vars": RANK_ENVIRONMENT} if sees_gpus else None,
        scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
    )
    return actor.remote(rank, log_format, gpus, detached)


def start_ahead(engine: EngineConfig, log_format: LogFormat) -> None:
    """Start the processes of one driver's ranks before the driver, where they are to have GPUs.

    They load what a start needs, and learn their GPU from the driver.
    """
    wanted = engine.device is not Device.CPU and engine.recovery.wants_standby(on_gpu=True)
    if wanted and num_gpus_here() >= engine.tensor_parallel and this_process().started:
        _start(engine, log_format, Detached(None, _AHEAD_S))


def keep_spares(engine: EngineConfig, log_format: LogFormat) -> None:
    """Have processes wait for a second driver, where this node has GPUs for its ranks, too.

    They take no device memory, and remain for some time after the caller's process.
    """
    size = engine.tensor_parallel
    if num_gpus_here() >= 2 * size and not waiting_ranks(size, log_format):
        _start(engine, log_format, Detached(None, _SPARE_S, keeper=this_process()))


def _start(engine: EngineConfig, log_format: LogFormat, detached: Detached) -> None:
    for rank in range(engine.tensor_parallel):
        actor = start_detached(rank, log_format, (), detached, sees_gpus=True)
        actor.prepare.remote(engine)


def num_gpus_here() -> int:
    """Return how many GPUs this node has for Ray."""
    here = ray.get_runtime_context().get_node_id()
    [resources] = [node["Resources"] for node in ray.nodes() if node["NodeID"] == here]
    return int(resources.get("GPU", 0))


def waiting_ranks(size: int, log_format: LogFormat) -> dict[int, list[ActorHandle]]:
    """Return this node's processes without a driver, by the rank that they can be."""
    kinds = {_kind(rank, log_format): rank for rank in range(size)}
    found: dict[int, list[ActorHandle]] = {}
    for kind, actor in _named(kinds):
        with suppress(ray.exceptions.RayError):  # it has just ended
            if ray.get(actor.waits.remote(), timeout=_ANSWER_TIMEOUT_S):
                found.setdefault(kinds[kind], []).append(actor)
    return found


def acquire(actors: list[ActorHandle], gpus: tuple[str, ...]) -> FreeProcess | None:
    """Have the first of these processes that is for such GPUs belong to the caller."""
    for actor in actors:
        try:
            known = ray.get(actor.known.remote(), timeout=_ANSWER_TIMEOUT_S)
            if ray.get(actor.acquire.remote(this_process(), gpus), timeout=_ACQUIRE_TIMEOUT_S):
                return FreeProcess(actor, known)
        except ray.exceptions.RayError:
            # It has just ended, or may yet belong to the caller, which would never end it.
            ray.kill(actor, no_restart=True)
    return None


def _named(kinds: Mapping[str, int]) -> Iterator[tuple[str, ActorHandle]]:
    for each in ray.util.list_named_actors(all_namespaces=True):
        kind = each["name"].rpartition("-")[0]
        if each["namespace"] == NAMESPACE and kind in kinds:
            with suppress(ValueError):  # it has just ended
                yield kind, ray.get_actor(each["name"], namespace=NAMESPACE)


def _kind(rank: int, log_format: LogFormat) -> str:
    """Processes of one kind replace each other: same rank, node, code and environment."""
    context = ray.get_runtime_context()
    environment = context.get_runtime_env_string()
    code = str(Path(__file__).parent)
    same = (context.get_node_id(), sys.executable, code, environment, log_format.value)
    return f"{hashlib.sha256(repr(same).encode()).hexdigest()[:16]}-rank-{rank}"

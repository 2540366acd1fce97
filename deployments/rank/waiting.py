"""Ranks' processes of this node that wait for a driver, and how a driver finds them.

Their drivers have ended, or `loray serve` has started them while Serve still starts. They are
actors of Ray that belong to no placement group; `guard.py` ends those that no driver takes.
"""

import hashlib
import logging
import secrets
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from configs.engine import EngineConfig
from configs.env import RANK_ENVIRONMENT, visible_gpus
from configs.observability import LogFormat
from deployments.rank.actor import RankActor
from deployments.rank.ahead import Expected, digest_of
from deployments.rank.processes import this_process
from deployments.rank.standby import Detached, Known, expect
from sources.model import local_folder

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
        name=f"{_kind(rank, log_format)}-{detached.group}",
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        max_concurrency=3,
        runtime_env={"env_vars": RANK_ENVIRONMENT} if sees_gpus else None,
        scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
    )
    return actor.remote(rank, log_format, gpus, detached)


def start_ahead(
    engine: EngineConfig, ranks: Sequence[Mapping[str, float]], log_format: LogFormat
) -> None:
    """Start the processes of one driver's ranks before the driver.

    ranks: their bundles. Where they take all GPUs of this node, or need none, and the model is
    here, they load their weights. Elsewhere they load what a start needs, and learn their GPU from
    the driver.
    """
    size, num_gpus = len(ranks), [rank.get("GPU", 0) for rank in ranks]
    on_gpu = any(num_gpus)
    fits = max(num_gpus) <= 1 and sum(num_gpus) <= num_gpus_here()
    if not (fits and engine.recovery.wants_standby(on_gpu) and this_process().started):
        return
    gpus: list[tuple[str, ...]] = [()] * size
    whole = not on_gpu or size == num_gpus_here() == len(gpus_here())
    if whole and on_gpu:
        gpus = [(gpu,) for gpu in gpus_here()]
    detached = Detached(secrets.token_hex(8), None, _AHEAD_S)
    config = engine.model_copy(update={"tensor_parallel": size})
    actors = _start(config, log_format, detached, gpus, on_gpu)
    folder = local_folder(engine.model)
    if whole and folder is not None:
        expected = Expected(config, str(folder), digest_of(config, str(folder)))
        expect(actors, [expected] * size)


def keep_spares(engine: EngineConfig, log_format: LogFormat) -> None:
    """Have processes wait for a second driver, where this node has GPUs for its ranks, too.

    They take no device memory, and remain for some time after the caller's process.
    """
    size = engine.tensor_parallel
    if num_gpus_here() >= 2 * size and not waiting_groups(size, log_format):
        detached = Detached(secrets.token_hex(8), None, _SPARE_S, keeper=this_process())
        _start(engine, log_format, detached, [()] * size, sees_gpus=True)


def _start(
    engine: EngineConfig,
    log_format: LogFormat,
    detached: Detached,
    gpus: Sequence[tuple[str, ...]],
    sees_gpus: bool,
) -> list[ActorHandle]:
    actors = [
        start_detached(rank, log_format, each, detached, sees_gpus)
        for rank, each in enumerate(gpus)
    ]
    for actor in actors:
        actor.prepare.remote(engine)
    return actors


def num_gpus_here() -> int:
    """Return how many GPUs this node has for Ray."""
    here = ray.get_runtime_context().get_node_id()
    [resources] = [node["Resources"] for node in ray.nodes() if node["NodeID"] == here]
    return int(resources.get("GPU", 0))


def gpus_here() -> list[str]:
    """Return Ray's ids of this node's GPUs, where the caller's process sees what Ray sees."""
    visible = visible_gpus()
    return visible.split(",") if visible else [str(gpu) for gpu in range(num_gpus_here())]


def waiting_groups(size: int, log_format: LogFormat) -> list[dict[int, ActorHandle]]:
    """Return this node's processes without a driver: for each group, those of the first ranks."""
    kinds = {_kind(rank, log_format): rank for rank in range(size)}
    found: dict[str, dict[int, ActorHandle]] = {}
    for kind, group, actor in _named(kinds):
        with suppress(ray.exceptions.RayError):  # it has just ended
            if ray.get(actor.waits.remote(), timeout=_ANSWER_TIMEOUT_S):
                found.setdefault(group, {})[kinds[kind]] = actor
    return list(found.values())


def acquire(actor: ActorHandle, gpus: tuple[str, ...], digest: str) -> FreeProcess | None:
    """Have a process belong to the caller; None if it cannot. digest: as in `digest_of`."""
    try:
        known = ray.get(actor.known.remote(), timeout=_ANSWER_TIMEOUT_S)
        acquired = actor.acquire.remote(this_process(), gpus, digest)
        if ray.get(acquired, timeout=_ACQUIRE_TIMEOUT_S):
            return FreeProcess(actor, known)
    except ray.exceptions.RayError:
        # It has just ended, or may yet belong to the caller, which would never end it.
        ray.kill(actor, no_restart=True)
    return None


def _named(kinds: Container[str]) -> Iterator[tuple[str, str, ActorHandle]]:
    for each in ray.util.list_named_actors(all_namespaces=True):
        kind, _, group = each["name"].rpartition("-")
        if each["namespace"] == NAMESPACE and kind in kinds:
            with suppress(ValueError):  # it has just ended
                yield kind, group, ray.get_actor(each["name"], namespace=NAMESPACE)


def _kind(rank: int, log_format: LogFormat) -> str:
    """Processes of one kind replace each other: same rank, node, code and environment."""
    context = ray.get_runtime_context()
    environment = context.get_runtime_env_string()
    code = str(Path(__file__).parent)
    same = (context.get_node_id(), sys.executable, code, environment, log_format.value)
    return f"{hashlib.sha256(repr(same).encode()).hexdigest()[:16]}-rank-{rank}"

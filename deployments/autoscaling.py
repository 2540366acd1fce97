"""How many replicas a driver deployment needs, by what its engines report; Serve calls it.

Serve alone counts requests, and a request may be ten tokens or a hundred thousand. What a client
feels is the wait in the queue; what fills an engine is its KV cache, its batch slots or its
adapters' slots. It does not use Ray.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from scheduler.snapshot import AdapterView, Snapshot

Stats = dict[str, float]
"""What one replica reports to Serve."""

_MOST_AT_ONCE = 2.0
"""A queue says that there are too few replicas, not how many: at most this many times as many."""


class ScalingContext(Protocol):
    """The part of `ray.serve.config.AutoscalingContext` that the policy reads."""

    @property
    def current_num_replicas(self) -> int:
        """Replicas that run."""
        ...

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None:
        """The replicas' reports over the look-back period, by their names."""
        ...

    @property
    def total_num_requests(self) -> float:
        """Requests that run or wait."""
        ...


def scaling_stats(
    snapshot: Snapshot, views: Sequence[AdapterView], max_running: int, now: float
) -> Stats:
    """A replica's report.

    queue_seconds: how long the oldest request has waited. kv_use: share of the cache's blocks that
    requests hold. batch_use: running requests by batch slots. adapter_use: adapters with requests,
    by the device's slots; above 1, adapters wait for each other.
    """
    oldest = snapshot.oldest_arrival
    used = sum(1 for view in views if view.running or view.waiting)
    return {
        "queue_seconds": 0.0 if oldest is None else max(0.0, now - oldest),
        "queued": float(snapshot.queued),
        "kv_use": 1.0 - snapshot.free_blocks / max(1, snapshot.num_blocks),
        "batch_use": snapshot.running / max(1, max_running),
        "adapter_use": used / max(1, snapshot.tiers.device_slots),
    }


class LoadPolicy:
    """An autoscaling policy of Serve: the largest number of replicas that any signal asks for.

    In the yaml: `policy: {policy_function: "deployments.autoscaling:LoadPolicy", policy_kwargs:
    {queue_seconds: 0.25}}`. Serve's own delays, factors and bounds apply to the result.
    """

    def __init__(
        self,
        queue_seconds: float = 0.25,
        kv_use: float = 0.8,
        batch_use: float = 0.8,
        adapter_use: float = 1.0,
        ongoing_requests: float | None = None,
    ) -> None:
        """The targets of each signal for one replica; ValueError for one that is not positive.

        queue_seconds: seconds. The next three: shares, as in `scaling_stats`. ongoing_requests:
        as Serve's target_ongoing_requests; None leaves it out.
        """
        self._uses = {"kv_use": kv_use, "batch_use": batch_use, "adapter_use": adapter_use}
        self._queue_seconds = queue_seconds
        self._ongoing = ongoing_requests
        targets = {**self._uses, "queue_seconds": queue_seconds}
        if ongoing_requests is not None:
            targets["ongoing_requests"] = ongoing_requests
        for name, target in targets.items():
            if not (isinstance(target, int | float) and target > 0):
                raise ValueError(f"policy_kwargs.{name} ({target}) must be a number above 0")

    def __call__(self, context: ScalingContext) -> tuple[float, dict[str, Any]]:
        """The number of replicas to have, before Serve's delays; no state."""
        replicas = context.current_num_replicas
        if replicas == 0:
            return (1.0 if context.total_num_requests > 0 else 0.0), {}
        reports = context.aggregated_metrics or {}
        wanted = [replicas * _mean(reports, name) / most for name, most in self._uses.items()]
        waits = _mean(reports, "queue_seconds") / self._queue_seconds
        if waits > 1:
            wanted.append(replicas * min(waits, _MOST_AT_ONCE))
        if self._ongoing is not None:
            wanted.append(context.total_num_requests / self._ongoing)
        # A replica that was started for a burst stays until one less would do for every signal.
        return float(max(1, math.ceil(max(wanted) - 1e-6))), {}


def _mean(reports: Mapping[str, Mapping[Any, float]], name: str) -> float:
    """Over the replicas that have reported; 0 where none has."""
    found = reports.get(name) or {}
    return sum(found.values()) / len(found) if found else 0.0

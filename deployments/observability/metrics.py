"""A driver's metrics, set from snapshots and exported by Ray's metrics endpoint.

Ray puts "ray_" before each name and adds the tags deployment, replica and application.
"""

from collections.abc import Sequence

from ray.serve.metrics import Counter, Gauge, Histogram

from deployments.observability.steps import StepRecord
from deployments.observability.zero import begin
from scheduler.snapshot import Snapshot

_STEP_SECONDS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0]
_ROWS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0]

GAUGES = {
    "loray_queue_length": "Requests that wait for a batch slot.",
    "loray_running_requests": "Requests that hold a batch slot.",
    "loray_cache_blocks": "Blocks of the KV cache.",
    "loray_free_cache_blocks": "KV cache blocks that no request holds.",
    "loray_prefix_cache_blocks": "KV cache blocks that the prefix cache can find.",
    "loray_healthy": "1 while the ranks serve or sleep, 0 while they are rebuilt.",
    "loray_asleep": "1 while the ranks have ended until POST /wake_up, else 0.",
    "loray_user_config_refused": "1 if the last user_config could not be applied, else 0.",
}

COUNTERS = {
    "loray_steps": "Steps planned.",
    "loray_preemptions": "Requests preempted because no KV block was free.",
    "loray_prompt_tokens": "Prompt tokens of requests that were admitted.",
    "loray_cached_prompt_tokens": "Prompt tokens found in the prefix cache.",
    "loray_generated_tokens": "Tokens generated.",
    "loray_rank_rebuilds": "Rebuilds of the group of ranks.",
    "loray_dropped_frames": "Token frames not sent because an ingress replica read too slowly.",
    "loray_overdue_looks": "Requests served with an adapter's last version because its source did "
    "not answer in time.",
    "loray_head_starts": "Requests submitted early: they ran before Serve's call arrived.",
}


class EngineMetrics:
    """The metrics of one driver replica."""

    def __init__(self) -> None:
        """Register every metric; must run inside a Serve replica."""
        self._gauges = {name: Gauge(name, text) for name, text in GAUGES.items()}
        self._counters = {name: Counter(name, text) for name, text in COUNTERS.items()}
        self._adapters = Gauge(
            "loray_adapters", "Adapters by state: where their bytes are.", tag_keys=("state",)
        )
        self._step_seconds = Histogram(
            "loray_step_seconds", "Seconds of a step on rank 0.", boundaries=_STEP_SECONDS
        )
        self._step_rows = Histogram(
            "loray_step_rows", "Rows in a step, one a request.", boundaries=_ROWS
        )
        self._totals = dict.fromkeys(COUNTERS, 0)
        self._last_step = 0

    def begin(self) -> None:
        """Export every counter at 0."""
        for counter in self._counters.values():
            begin(counter)

    def update(
        self,
        snapshot: Snapshot,
        steps: Sequence[StepRecord],
        *,
        rebuilds: int,
        dropped: int,
        early_submits: int,
        overdue: int,
    ) -> None:
        """Set everything from the scheduler's numbers and the steps since the last call.

        rebuilds, dropped, early_submits, overdue: totals since the start.
        """
        self._gauges["loray_queue_length"].set(snapshot.queued)
        self._gauges["loray_running_requests"].set(snapshot.running)
        self._gauges["loray_cache_blocks"].set(snapshot.num_blocks)
        self._gauges["loray_free_cache_blocks"].set(snapshot.free_blocks)
        self._gauges["loray_prefix_cache_blocks"].set(snapshot.cached_blocks)
        for state, count in snapshot.adapters.items():
            self._adapters.set(count, tags={"state": str(state)})
        self._raise_to("loray_steps", snapshot.num_steps)
        self._raise_to("loray_preemptions", snapshot.num_preemptions)
        self._raise_to("loray_prompt_tokens", snapshot.num_prompt_tokens)
        self._raise_to("loray_cached_prompt_tokens", snapshot.num_cached_tokens)
        self._raise_to("loray_generated_tokens", snapshot.num_generated_tokens)
        self._raise_to("loray_rank_rebuilds", rebuilds)
        self._raise_to("loray_dropped_frames", dropped)
        self._raise_to("loray_head_starts", early_submits)
        self._raise_to("loray_overdue_looks", overdue)
        self._observe(steps)

    def healthy(self, healthy: bool, asleep: bool) -> None:
        """Set whether the ranks serve, or sleep."""
        self._gauges["loray_asleep"].set(1 if asleep else 0)
        self._gauges["loray_healthy"].set(1 if healthy else 0)

    def settings_refused(self, refused: bool) -> None:
        """Set whether the operator's last `user_config` could not be applied."""
        self._gauges["loray_user_config_refused"].set(1 if refused else 0)

    def _observe(self, steps: Sequence[StepRecord]) -> None:
        for record in steps:
            if record.step > self._last_step:
                # Ray's histograms refuse zero.
                self._step_seconds.observe(max(record.seconds, 1e-9))
                self._step_rows.observe(max(record.num_rows, 1))
        if steps:
            self._last_step = steps[-1].step

    def _raise_to(self, name: str, total: int) -> None:
        if total > self._totals[name]:
            self._counters[name].inc(total - self._totals[name])
            self._totals[name] = total

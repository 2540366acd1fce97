"""What a replica reports for autoscaling, and how many replicas the policy makes of it."""

from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from benchmarks.autoscaling import by_requests, measure
from configs.wire.sampling import Sampling, Stopping
from deployments.autoscaling import LoadPolicy, scaling_stats
from scheduler.admission.limits import Limits
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from tests.scheduler.small import capacity

IDLE = {"queue_seconds": 0.0, "kv_use": 0.0, "batch_use": 0.0, "adapter_use": 0.0}


def context(
    replicas: int, ongoing: float = 0.0, silent: bool = False, **reports: Any
) -> AutoscalingContext:
    """Serve's own context, in which every replica has reported the same, or none anything."""
    metrics: Any = {
        name: dict.fromkeys(range(replicas), value) for name, value in {**IDLE, **reports}.items()
    }
    nothing: dict[str, Any] = dict.fromkeys(
        ("deployment_id", "deployment_name", "app_name", "raw_metrics", "last_scale_up_time",
         "last_scale_down_time", "current_time", "total_queued_requests"),
    )  # fmt: skip
    return AutoscalingContext(
        **nothing,
        current_num_replicas=replicas,
        target_num_replicas=replicas,
        running_replicas=[],
        total_num_requests=ongoing,
        aggregated_metrics=None if silent else lambda: metrics,
        capacity_adjusted_min_replicas=0,
        capacity_adjusted_max_replicas=9,
        policy_state={},
        config=AutoscalingConfig(),
    )


@pytest.mark.parametrize(
    ("replicas", "reports", "wanted"),
    [
        (3, {}, 1),
        (3, {"kv_use": 0.8}, 3),
        (3, {"kv_use": 0.9}, 4),
        (3, {"kv_use": 0.5, "batch_use": 0.2}, 2),
        (2, {"batch_use": 1.0}, 3),
        (1, {"adapter_use": 3.0}, 3),
        (2, {"queue_seconds": 0.9}, 1),
        (2, {"queue_seconds": 1.2}, 3),
        (2, {"queue_seconds": 60.0}, 4),
        (0, {"ongoing": 2.0}, 1),
        (0, {}, 0),
        (2, {"ongoing": 100.0}, 10),
    ],
)
def test_the_largest_signal_decides(replicas: int, reports: dict[str, float], wanted: int) -> None:
    policy = LoadPolicy(queue_seconds=1.0, ongoing_requests=10.0)
    found, state = policy(context(replicas, reports.pop("ongoing", 0.0), False, **reports))
    assert (found, state) == (wanted, {})


def test_replicas_that_have_not_reported_ask_for_nothing() -> None:
    assert LoadPolicy()(context(3, silent=True)) == (1.0, {})


def test_serve_makes_the_policy_of_the_yaml() -> None:
    """By Serve's own classes, as it reads `autoscaling_config`."""
    config = AutoscalingConfig(
        policy=AutoscalingPolicy(
            policy_function="deployments.autoscaling:LoadPolicy",
            policy_kwargs={"queue_seconds": 0.5},
        )
    )
    made = config.policy.get_policy()(**config.policy.policy_kwargs)
    assert made(context(2, queue_seconds=0.75)) == (3.0, {})
    with pytest.raises(ValueError, match="kv_use"):
        LoadPolicy(kv_use=0.0)


def test_a_report_of_a_scheduler() -> None:
    scheduler = Scheduler(Limits(max_running=2), capacity())
    assert scaling_stats(scheduler.snapshot(), scheduler.adapters(), 2, 100.0) == {
        **IDLE,
        "queued": 0.0,
    }
    for number in range(3):
        request = Request(("r", number), [1, 2], Sampling(), Stopping(4), arrival=90.0 + number)
        scheduler.add(request, 90.0 + number)
    scheduler.schedule(95.0)
    stats = scaling_stats(scheduler.snapshot(), scheduler.adapters(), 2, 100.0)
    assert stats["queue_seconds"] == 8.0, "the third request waits since 92"
    assert stats["batch_use"] == 1.0
    assert 0 < stats["kv_use"] <= 1


def test_a_bursty_load_misses_less_at_equal_replica_seconds() -> None:
    ours = measure(LoadPolicy(queue_seconds=0.1))
    serves = measure(lambda context: by_requests(context, target=24))
    assert ours["requests"] == serves["requests"]
    assert ours["replica_seconds"] <= 1.05 * serves["replica_seconds"]
    assert ours["missed_percent"] < serves["missed_percent"] / 4

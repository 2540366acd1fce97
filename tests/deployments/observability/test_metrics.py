"""What the metrics of a driver come to."""

import pytest

from deployments.observability import metrics
from deployments.observability.metrics import COUNTERS, EngineMetrics


def test_every_counter_is_there_before_its_first_event(monkeypatch: pytest.MonkeyPatch) -> None:
    replies: dict[str, list[float]] = {}

    class Recorder:
        def __init__(self, name: str, text: str, **_: object) -> None:
            self.name = name

        def inc(self, value: float, tags: dict[str, str] | None = None) -> None:
            replies.setdefault(self.name, []).append(value)

        def set(self, value: float, tags: dict[str, str] | None = None) -> None:
            replies[self.name] = [value]

    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(metrics, kind, Recorder)
    driver = EngineMetrics()
    driver.begin()
    assert {name for name, values in replies.items() if sum(values) < 1e-300} == set(COUNTERS)
    driver.settings_refused(True)
    assert replies["loray_user_config_refused"] == [1]

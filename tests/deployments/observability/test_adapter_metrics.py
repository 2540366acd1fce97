"""What the metrics of adapters come to, read from recorders that refuse what Ray's refuse."""

from collections import defaultdict
from dataclasses import fields

import pytest
from ray.util.metrics import Counter

from configs.wire.adapters import AdapterKey
from deployments.observability import adapter_metrics
from deployments.observability.adapter_metrics import COUNTS, MAX_LABELS, TIERS, AdapterMetrics
from deployments.observability.adapter_records import LoadRecord, LoadStage, SequenceRecord
from deployments.observability.lorax_metrics import OTHER
from deployments.observability.zero import _NOTHING
from scheduler.adapters.resident import AdapterState
from scheduler.snapshot import AdapterCounts, AdapterTiers, AdapterView

begun: set[tuple[str, tuple[str, ...]]] = set()
"""The counters that were shown at 0."""

Series = dict[tuple[str, tuple[str, ...]], list[float]]


@pytest.fixture
def series(monkeypatch: pytest.MonkeyPatch) -> Series:
    """Every value by metric and label values."""
    reply: Series = defaultdict(list)
    begun.clear()

    class Recorder:
        def __init__(
            self,
            name: str,
            text: str,
            tag_keys: tuple[str, ...] = (),
            boundaries: list[float] | None = None,
        ) -> None:
            assert text
            assert boundaries is None or boundaries == sorted(boundaries)
            self.name, self.keys = name, tag_keys

        def inc(self, value: float = 1, tags: dict[str, str] | None = None) -> None:
            assert value > 0, "Ray refuses it"
            if value == _NOTHING:
                assert (self.name, self._values(tags)) not in reply, "it began before"
                begun.add((self.name, self._values(tags)))
                return
            self.set(value, tags)

        observe = inc

        def set(self, value: float, tags: dict[str, str] | None = None) -> None:
            assert set(tags or {}) == set(self.keys)
            reply[self.name, self._values(tags)].append(value)

        def _values(self, tags: dict[str, str] | None) -> tuple[str, ...]:
            return tuple((tags or {})[key] for key in self.keys)

    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(adapter_metrics, kind, Recorder)
    return reply


def record(adapter: str, tokens: int = 4, ok: bool = True) -> SequenceRecord:
    first, each = (0.2, 0.01) if tokens else (None, None)
    return SequenceRecord(adapter, ok, 7, tokens, first, each, tokens * 2, tokens - 1)


def view(key: int, waiting: int) -> AdapterView:
    return AdapterView(AdapterKey(key), AdapterState.HOST, 0, waiting, False, False, 10, 0)


def test_requests_are_counted_by_adapter(series: Series) -> None:
    metrics = AdapterMetrics()
    metrics.requests([record("red"), record("red"), record("base"), record("red", 0, ok=False)])
    assert series["loray_adapter_requests", ("red", "true")] == [1, 1]
    assert series["loray_adapter_requests", ("red", "false")] == [1]
    assert series["loray_adapter_prompt_tokens", ("red",)] == [7, 7, 7]
    assert series["loray_adapter_generated_tokens", ("red",)] == [4, 4]
    assert series["loray_adapter_generated_tokens", ("base",)] == [4]
    assert series["loray_adapter_drafted_tokens", ("red",)] == [8, 8]
    assert series["loray_adapter_accepted_tokens", ("red",)] == [3, 3]
    assert series["loray_adapter_first_token_seconds", ("red",)] == [0.2, 0.2]
    assert series["loray_adapter_per_token_seconds", ("base",)] == [0.01]


def test_counters_begin_at_zero(series: Series) -> None:
    metrics = AdapterMetrics()
    metrics.begin()
    counts = {(f"loray_adapter_{name}", ()) for name, _ in COUNTS.values()}
    assert counts <= begun
    for label in ("base", OTHER):
        for ok in ("true", "false"):
            assert ("loray_adapter_requests", (label, ok)) in begun
        assert ("loray_adapter_generated_tokens", (label,)) in begun
    metrics.requests([record("red")])
    assert ("loray_adapter_requests", ("red", "false")) in begun
    assert not any(values for (_, tags), values in series.items() if "base" in tags)


def test_exporting_a_counter_at_zero_changes_no_count() -> None:
    assert 0 < _NOTHING < 1e-300
    assert _NOTHING + 1 == 1
    with pytest.raises(ValueError, match="value must be"):
        Counter("loray_test_zero", "What Ray refuses.").inc(0)


def test_a_thousand_adapters_make_a_bounded_number_of_series(series: Series) -> None:
    metrics = AdapterMetrics()
    metrics.requests([record(f"a{index}") for index in range(1000)])
    labels = {tags[0] for name, tags in series if name == "loray_adapter_prompt_tokens"}
    assert len(labels) == MAX_LABELS + 1
    assert len(series["loray_adapter_prompt_tokens", (OTHER,)]) == 1000 - MAX_LABELS


def test_queue_lengths_are_by_adapter_and_return_to_zero(series: Series) -> None:
    metrics = AdapterMetrics()
    metrics.requests([record("red")])
    names = {1: "red", 2: "rare"}
    metrics.queues([view(1, 3), view(2, 2), view(3, 4)], 14, lambda key: names.get(key))
    assert series["loray_adapter_queue_length", ("red",)] == [3]
    assert series["loray_adapter_queue_length", (OTHER,)] == [6]
    assert series["loray_adapter_queue_length", ("base",)] == [5]
    metrics.queues([], 0, lambda key: names.get(key))
    assert series["loray_adapter_queue_length", ("red",)] == [3, 0]


def test_tiers_are_gauges_and_events_are_counters(series: Series) -> None:
    metrics = AdapterMetrics()
    tiers = AdapterTiers(80, 100, 4, 16, 2, 8)
    for hits in (3, 3, 10):
        metrics.tiers(tiers, AdapterCounts(hits, 0, 1, 2, 0))
    assert series["loray_adapter_host_bytes", ()] == [80] * 3
    assert series["loray_adapter_device_slots", ()] == [8] * 3
    assert series["loray_adapter_device_hits", ()] == [3, 7]
    assert series["loray_adapter_device_evictions", ()] == [2]
    assert series["loray_adapter_host_hits", ()] == []


def test_every_tier_and_count_has_a_metric() -> None:
    assert {*COUNTS} == {field.name for field in fields(AdapterCounts)}
    assert {*TIERS} == {field.name for field in fields(AdapterTiers)}


def test_load_seconds_have_the_stage_as_a_label(series: Series) -> None:
    metrics = AdapterMetrics()
    fetch, stage = LoadStage.FETCH, LoadStage.STAGE
    metrics.loads([LoadRecord(fetch, 0.0), LoadRecord(stage, 0.5), LoadRecord(stage, 1.5)])
    assert series["loray_adapter_load_seconds", ("stage",)] == [0.5, 1.5]
    assert len(series["loray_adapter_load_seconds", ("fetch",)]) == 1

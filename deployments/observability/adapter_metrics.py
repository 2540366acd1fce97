"""A driver's metrics of its adapters, on Ray's endpoint.

Labels are bounded: the most requested adapters have their own, all others have "other".
"""

from collections import Counter as Tally
from collections.abc import Callable, Sequence

from ray.serve.metrics import Counter, Gauge, Histogram

from configs.wire.adapters import AdapterKey
from deployments.observability.adapter_records import LoadRecord, SequenceRecord, TopLabels
from deployments.observability.lorax_metrics import BASE, OTHER
from deployments.observability.zero import begin
from scheduler.snapshot import AdapterCounts, AdapterTiers, AdapterView

MAX_LABELS = 64

_OK = ("true", "false")

_FIRST_TOKEN_SECONDS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0]
_PER_TOKEN_SECONDS = [0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0]
_LOAD_SECONDS = [0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0, 120.0]

BY_ADAPTER = {
    "loray_adapter_requests": "Sequences that ended, by adapter and by whether without an error.",
    "loray_adapter_prompt_tokens": "Prompt tokens of sequences that ended, by adapter.",
    "loray_adapter_generated_tokens": "Generated tokens of sequences that ended, by adapter.",
    "loray_adapter_drafted_tokens": "Guessed tokens of sequences that ended, by adapter.",
    "loray_adapter_accepted_tokens": "Tokens that were guessed right, by adapter.",
}
QUEUED = "loray_adapter_queue_length"
# By the field of AdapterTiers.
TIERS = {
    "host_bytes": "Bytes of adapters in each rank's host cache.",
    "host_capacity_bytes": "Capacity in bytes of each rank's host cache.",
    "device_pages": "Adapter pages in use on the device, over all projections.",
    "device_capacity_pages": "Adapter pages on the device, over all projections.",
    "device_adapters": "Adapters on the device.",
    "device_slots": "Adapters that fit on the device at once.",
}
# By the field of AdapterCounts: the metric's name and its help.
COUNTS = {
    "device_hits": ("device_hits", "Requests with an adapter on the device at arrival."),
    "host_hits": ("host_hits", "Requests with an adapter in host memory at arrival."),
    "misses": ("misses", "Requests with an adapter that had to be staged from disk."),
    "device_evictions": ("device_evictions", "Adapters evicted from the device to make room."),
    "host_evictions": ("host_evictions", "Adapters evicted from host memory to make room."),
    "staged": ("staged", "Adapters staged: read from disk into host memory."),
    "staged_bytes": ("staged_bytes", "Bytes staged on each rank."),
    "loads": ("fills", "Adapters loaded: copied from host memory to the device."),
    "load_bytes": ("fill_bytes", "Bytes loaded to the device on each rank."),
}


class AdapterMetrics:
    """The metrics of one driver replica's adapters."""

    def __init__(self) -> None:
        """Register every metric; must run inside a Serve replica."""
        by = ("adapter",)
        self._labels = TopLabels(MAX_LABELS, frozenset({BASE}))
        self._sums = {
            name: Counter(name, text, tag_keys=(*by, "ok") if "requests" in name else by)
            for name, text in BY_ADAPTER.items()
        }
        self._first = Histogram(
            "loray_adapter_first_token_seconds", "Seconds to the first token, by adapter.",
            boundaries=_FIRST_TOKEN_SECONDS, tag_keys=by,
        )  # fmt: skip
        self._each = Histogram(
            "loray_adapter_per_token_seconds", "Seconds of each later token, by adapter.",
            boundaries=_PER_TOKEN_SECONDS, tag_keys=by,
        )  # fmt: skip
        self._loads = Histogram(
            "loray_adapter_load_seconds", "Seconds of one stage of a load: fetch, stage or place.",
            boundaries=_LOAD_SECONDS, tag_keys=("stage",),
        )  # fmt: skip
        self._queued = Gauge(
            QUEUED, "Requests that wait for a batch slot, by adapter.", tag_keys=by
        )
        self._shown: set[str] = set()
        self._tiers = {
            field: Gauge(f"loray_adapter_{field}", text) for field, text in TIERS.items()
        }
        self._counts = {
            field: Counter(f"loray_adapter_{name}", text) for field, (name, text) in COUNTS.items()
        }
        self._totals = dict.fromkeys(COUNTS, 0)
        self._begun: set[str] = set()

    def begin(self) -> None:
        """Export every counter at 0."""
        for counter in self._counts.values():
            begin(counter)
        for label in (BASE, OTHER):
            self._begin(label)

    def _begin(self, adapter: str) -> None:
        """Export the counters of this label at 0."""
        self._begun.add(adapter)
        for name, counter in self._sums.items():
            tags = {"adapter": adapter}
            for each in [{**tags, "ok": ok} for ok in _OK] if "requests" in name else [tags]:
                begin(counter, each)

    def requests(self, records: Sequence[SequenceRecord]) -> None:
        """Count the sequences that ended since the last call."""
        for record in records:
            tags = {"adapter": self._labels.count(record.adapter)}
            if tags["adapter"] not in self._begun:
                self._begin(tags["adapter"])
            ok = {**tags, "ok": str(record.ok).lower()}
            self._sums["loray_adapter_requests"].inc(1, tags=ok)
            _add(self._sums["loray_adapter_prompt_tokens"], record.prompt_tokens, tags)
            _add(self._sums["loray_adapter_generated_tokens"], record.generated_tokens, tags)
            _add(self._sums["loray_adapter_drafted_tokens"], record.drafted_tokens, tags)
            _add(self._sums["loray_adapter_accepted_tokens"], record.accepted_tokens, tags)
            _observe(self._first, record.first_token_seconds, tags)
            _observe(self._each, record.per_token_seconds, tags)

    def loads(self, records: Sequence[LoadRecord]) -> None:
        """Observe the stages that ended since the last call."""
        for record in records:
            _observe(self._loads, record.seconds, {"stage": record.stage.value})

    def tiers(self, tiers: AdapterTiers, counts: AdapterCounts) -> None:
        """Set what the tiers hold, and count what happened since the last call."""
        for field, gauge in self._tiers.items():
            gauge.set(getattr(tiers, field))
        for field, counter in self._counts.items():
            total = getattr(counts, field)
            _add(counter, total - self._totals[field], None)
            self._totals[field] = total

    def queues(
        self,
        views: Sequence[AdapterView],
        num_waiting: int,
        name: Callable[[AdapterKey], str | None],
    ) -> None:
        """Set how many requests wait, by adapter.

        num_waiting: over all adapters and the base model. name: the last name of an adapter, None
        where it has none.
        """
        lengths: Tally[str] = Tally({BASE: num_waiting - sum(view.waiting for view in views)})
        for view in views:
            if view.waiting:
                lengths[self._labels.of(name(view.key))] += view.waiting
        for label in {*self._shown, *lengths}:
            self._queued.set(lengths[label], tags={"adapter": label})
        self._shown = set(lengths)


def _add(counter: Counter, amount: int, tags: dict[str, str] | None) -> None:
    """Ray's counters refuse zero."""
    if amount > 0:
        counter.inc(amount, tags=tags)


def _observe(histogram: Histogram, seconds: float | None, tags: dict[str, str]) -> None:
    """Ray's histograms refuse zero."""
    if seconds is not None:
        histogram.observe(max(seconds, 1e-9), tags=tags)

"""LoRAX's Prometheus names for what an ingress replica sees, and what its users asked to add.

Each application has a registry of its own. Counters bear the adapter, which LoRAX's do not;
a request counts when it ends.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

BASE, OTHER = "base", "other"
"""Labels of the base model, and of adapters beyond the first MAX_ADAPTERS that were served."""

MAX_ADAPTERS = 200

# LoRAX's: 35 steps from 0.15 ms to 2.4 minutes.
_SECONDS = [0.00015 * 1.5**step for step in range(35)]
_LENGTHS = [float(2**step) for step in range(18)]

_DURATIONS = {
    "total": ("lorax_request_duration", "Seconds of a request."),
    "validation": ("lorax_request_validation_duration", "Seconds before the engine was asked."),
    "queue": ("lorax_request_queue_duration", "Seconds in the engine's queue."),
    "inference": ("lorax_request_inference_duration", "Seconds after the queue."),
    "per_token": ("lorax_request_mean_time_per_token_duration", "Seconds of inference a token."),
    "first_token": ("lorax_request_first_token_duration", "Seconds to the first token."),
}
_COUNTS = {
    "input_length": ("lorax_request_input_length", "Tokens of a request's prompts."),
    "max_new_tokens": ("lorax_request_max_new_tokens", "Tokens that may be generated."),
    "generated_tokens": ("lorax_request_generated_tokens", "Tokens generated."),
    "skipped_tokens": ("lorax_request_skipped_tokens", "Tokens that speculation brought."),
}


@dataclass(frozen=True)
class RequestRecord:
    """A request that ended well; seconds and tokens."""

    total: float
    validation: float
    queue: float
    inference: float
    per_token: float
    first_token: float
    input_length: int
    max_new_tokens: int
    generated_tokens: int
    skipped_tokens: int = 0


class RequestMetrics:
    """The metrics of one application."""

    def __init__(self) -> None:
        """Make a registry with every metric in it."""
        registry = self._registry = CollectorRegistry()
        self._count = Counter(
            "lorax_request_count", "Requests that ended.", ["adapter"], registry=registry
        )
        self._success = Counter(
            "lorax_request_success", "Requests that ended well.", ["adapter"], registry=registry
        )
        self._failure = Counter(
            "lorax_request_failure", "Requests that failed.", ["err"], registry=registry
        )
        self._histograms = {
            field: Histogram(name, text, buckets=buckets, registry=registry)
            for table, buckets in ((_DURATIONS, _SECONDS), (_COUNTS, _LENGTHS))
            for field, (name, text) in table.items()
        }
        self._adapters: set[str] = set()

    def begin(self, failures: Iterable[str]) -> None:
        """Show what can happen to the base model's requests at 0, with these kinds of failures.

        A scraper takes a counter that appears at 1 for one that never rose.
        """
        self._count.labels(BASE)
        self._success.labels(BASE)
        for err in failures:
            self._failure.labels(err)

    def succeeded(self, adapter: str | None, record: RequestRecord) -> None:
        """Count a request that ended well; None is the base model."""
        if adapter is not None and len(self._adapters) < MAX_ADAPTERS:
            self._adapters.add(adapter)
        self._count.labels(self._label(adapter)).inc()
        self._success.labels(self._label(adapter)).inc()
        for field, histogram in self._histograms.items():
            histogram.observe(getattr(record, field))

    def failed(self, err: str, adapter: str | None) -> None:
        """Count a request that failed; names that never worked are not remembered."""
        self._count.labels(self._label(adapter)).inc()
        self._failure.labels(err).inc()

    def refused(self, err: str) -> None:
        """Count a request that was refused before anybody looked for its adapter."""
        self._count.labels("").inc()
        self._failure.labels(err).inc()

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return "".join(
            line for family in self._registry.collect() for line in _lines(family)
        ).encode()

    def json(self) -> dict[str, object]:
        """Everything as LoRAX writes it for those who accept JSON."""
        return {
            family.name: {
                "type": family.type,
                "data": [
                    {"key": _key(family, sample), "value": sample.value}
                    for sample in _samples(family)
                ],
            }
            for family in self._registry.collect()
        }

    def _label(self, adapter: str | None) -> str:
        if adapter is None:
            return BASE
        return adapter if adapter in self._adapters else OTHER


def _lines(family: Metric) -> Iterator[str]:
    """One family as text. The library's own writer would add _total to LoRAX's names."""
    yield f"# HELP {family.name} {family.documentation}\n# TYPE {family.name} {family.type}\n"
    for sample in _samples(family):
        name = sample.name.removesuffix("_total")
        yield f"{_series(name, sample.labels)} {sample.value!r}\n"


def _samples(family: Metric) -> Iterator[Sample]:
    """A family's values, without the times at which they began."""
    return (sample for sample in family.samples if not sample.name.endswith("_created"))


def _key(family: Metric, sample: Sample) -> str:
    """What tells a value from the family's others."""
    part = sample.name.removesuffix("_total").removeprefix(family.name).removeprefix("_")
    return _series(part, sample.labels)


def _series(name: str, labels: dict[str, str]) -> str:
    if not labels:
        return name
    pairs = ",".join(f'{label}="{_escaped(value)}"' for label, value in labels.items())
    return f"{name}{{{pairs}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")

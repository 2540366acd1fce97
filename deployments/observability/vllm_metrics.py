"""LoRay's metrics by vLLM's names, as gateways read them.

The model server protocol of the Gateway API inference extension, llm-d and AIBrix look for these
names. Gauges and totals are of all driver replicas together, histograms of this ingress replica;
each base model that is served has samples of its own.
"""

import time
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from deployments.contract import AdapterDemand, EngineLoad

MAX_NAMES = 256
"""The most adapters in a label of `vllm:lora_requests_info`, and with residency of their own."""

RESIDENCY = "loray_adapter_resident_replicas"

GAUGES = {
    "vllm:num_requests_running": "Requests that hold a batch slot.",
    "vllm:num_requests_waiting": "Requests that wait for a batch slot.",
    "vllm:kv_cache_usage_perc": "Share of the KV cache that requests hold: 1 is all of it.",
}
COUNTERS = {
    "vllm:prompt_tokens": "Prompt tokens of requests that were admitted.",
    "vllm:generation_tokens": "Tokens generated.",
    "vllm:num_preemptions": "Requests preempted because no KV block was free.",
    "vllm:prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Prompt tokens found in the prefix cache.",
}
# By LoRAX's name.
HISTOGRAMS = {
    "lorax_request_duration": ("vllm:e2e_request_latency_seconds",),
    "lorax_request_queue_duration": ("vllm:request_queue_time_seconds",),
    "lorax_request_inference_duration": ("vllm:request_inference_time_seconds",),
    "lorax_request_first_token_duration": ("vllm:time_to_first_token_seconds",),
    "lorax_request_mean_time_per_token_duration": (
        "vllm:time_per_output_token_seconds",
        "vllm:request_time_per_output_token_seconds",
    ),
    "lorax_request_input_length": ("vllm:request_prompt_tokens",),
    "lorax_request_generated_tokens": ("vllm:request_generation_tokens",),
}


BaseMetrics = tuple[Sequence[EngineLoad], Iterable[Metric]]
"""The loads of a base's driver replicas, and this replica's metrics of it by LoRAX's names."""


def text(bases: Sequence[BaseMetrics]) -> bytes:
    """Everything in Prometheus' text format; nothing of bases without loads."""
    known = [(loads, requests) for loads, requests in bases if loads]
    if not known:
        return b""
    loads = [loads for loads, _ in known]
    every = [*_of_engines(loads), *_of_adapters(loads), *_of_requests(known)]
    return generate_latest(_Families(every))


class _Families(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _of_engines(bases: Sequence[Sequence[EngineLoad]]) -> Iterator[Metric]:
    values = {loads[0].model: _values(loads) for loads in bases}
    for names, kind in ((GAUGES, GaugeMetricFamily), (COUNTERS, CounterMetricFamily)):
        for name, meaning in names.items():
            family = kind(name, meaning, labels=["model_name"])
            for model, found in values.items():
                family.add_metric([model], found[name])
            yield family
    labels = ["model_name", "block_size", "num_gpu_blocks"]
    cache = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=labels)
    for loads in bases:
        num_blocks = sum(load.num_blocks for load in loads)
        cache.add_metric([loads[0].model, str(loads[0].block_size), str(num_blocks)], 1.0)
    yield cache


def _values(loads: Sequence[EngineLoad]) -> dict[str, float]:
    """Gauges and totals of one base."""
    num_blocks = sum(load.num_blocks for load in loads)
    held = num_blocks - sum(load.free_blocks for load in loads)
    return {
        "vllm:num_requests_running": sum(load.running for load in loads),
        "vllm:num_requests_waiting": sum(load.queued for load in loads),
        "vllm:kv_cache_usage_perc": held / num_blocks if num_blocks else 0.0,
        "vllm:prompt_tokens": sum(load.prompt_tokens for load in loads),
        "vllm:generation_tokens": sum(load.generated_tokens for load in loads),
        "vllm:num_preemptions": sum(load.preemptions for load in loads),
        "vllm:prefix_cache_queries": sum(load.prompt_tokens for load in loads),
        "vllm:prefix_cache_hits": sum(load.cached_tokens for load in loads),
    }


def _of_adapters(bases: Sequence[Sequence[EngineLoad]]) -> Iterator[Metric]:
    every = [load for loads in bases for load in loads]
    adapters = [adapter for load in every for adapter in load.adapters]
    waiting = sorted((a for a in adapters if a.waiting), key=lambda a: -a.waiting)
    labels = {
        "max_lora": str(sum(load.device_slots for load in every)),
        "running_lora_adapters": _joined(a for a in adapters if a.tier == "device"),
        "waiting_lora_adapters": _joined(waiting),
    }
    # One series for all bases: readers take the one with the largest value, which is the time.
    meaning = "Adapters on the device, and those that requests wait for."
    info = GaugeMetricFamily("vllm:lora_requests_info", meaning, labels=list(labels))
    info.add_metric(list(labels.values()), time.time())
    yield info
    resident = GaugeMetricFamily(
        RESIDENCY,
        "Driver replicas that hold the adapter there.",
        labels=["adapter", "tier", "model_name"],
    )
    for where, count in _counted(every).items():
        resident.add_metric(where, count)
    yield resident


def _joined(adapters: Iterable[AdapterDemand]) -> str:
    """Names with commas between; a name with a comma would be read as two."""
    names = dict.fromkeys(adapter.name for adapter in adapters if "," not in adapter.name)
    return ",".join(list(names)[:MAX_NAMES])


def _counted(loads: Sequence[EngineLoad]) -> dict[tuple[str, str, str], int]:
    """Replicas by adapter, tier and model."""
    counts: dict[tuple[str, str, str], int] = {}
    for load in loads:
        for adapter in load.adapters:
            where = adapter.name, adapter.tier, load.model
            if where in counts or len(counts) < MAX_NAMES:
                counts[where] = counts.get(where, 0) + 1
    return counts


def _of_requests(bases: Sequence[BaseMetrics]) -> Iterator[Metric]:
    """The histograms of requests under vLLM's names."""
    aliases: dict[str, Metric] = {}
    for loads, requests in bases:
        for family in requests:
            for name in HISTOGRAMS.get(family.name, ()):
                new = Metric(name, family.documentation, family.type)
                aliases.setdefault(name, new).samples += _renamed(family, name, loads[0].model)
    yield from aliases.values()


def _renamed(family: Metric, name: str, model: str) -> list[Sample]:
    """The samples of a family under another name and with the label of a model."""
    return [
        sample._replace(
            name=name + sample.name.removeprefix(family.name),
            labels={"model_name": model, **sample.labels},
        )
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]

"""LoRay's metrics by vLLM's names, as gateways read them.

The model server protocol of the Gateway API inference extension, llm-d and AIBrix look for these
names. Gauges and totals are of all driver replicas together, histograms of this ingress replica.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

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


def text(loads: Sequence[EngineLoad], requests: Iterable[Metric]) -> bytes:
    """Everything in Prometheus' text format; nothing without loads.

    loads: of the driver replicas. requests: this replica's metrics by LoRAX's names.
    """
    if not loads:
        return b""
    return generate_latest(_Families([*_of_engine(loads), *_of_requests(loads[0].model, requests)]))


class _Families(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _of_engine(loads: Sequence[EngineLoad]) -> Iterator[Metric]:
    model = loads[0].model
    num_blocks = sum(load.num_blocks for load in loads)
    held = num_blocks - sum(load.free_blocks for load in loads)
    values = {
        "vllm:num_requests_running": sum(load.running for load in loads),
        "vllm:num_requests_waiting": sum(load.queued for load in loads),
        "vllm:kv_cache_usage_perc": held / num_blocks if num_blocks else 0.0,
        "vllm:prompt_tokens": sum(load.prompt_tokens for load in loads),
        "vllm:generation_tokens": sum(load.generated_tokens for load in loads),
        "vllm:num_preemptions": sum(load.preemptions for load in loads),
        "vllm:prefix_cache_queries": sum(load.prompt_tokens for load in loads),
        "vllm:prefix_cache_hits": sum(load.cached_tokens for load in loads),
    }
    for names, kind in ((GAUGES, GaugeMetricFamily), (COUNTERS, CounterMetricFamily)):
        for name, meaning in names.items():
            family = kind(name, meaning, labels=["model_name"])
            family.add_metric([model], values[name])
            yield family
    labels = {"model_name": model, "block_size": str(loads[0].block_size),
              "num_gpu_blocks": str(num_blocks)}  # fmt: skip
    yield _info("vllm:cache_config_info", "The KV cache.", labels, 1.0)
    yield from _of_adapters(loads)


def _of_adapters(loads: Sequence[EngineLoad]) -> Iterator[Metric]:
    adapters = [adapter for load in loads for adapter in load.adapters]
    waiting = sorted((a for a in adapters if a.waiting), key=lambda a: -a.waiting)
    labels = {
        "max_lora": str(sum(load.device_slots for load in loads)),
        "running_lora_adapters": _joined(a for a in adapters if a.tier == "device"),
        "waiting_lora_adapters": _joined(waiting),
    }
    # Readers take the series with the largest value: it is the time.
    yield _info("vllm:lora_requests_info", "Adapters on the device, and those that requests wait "
                "for.", labels, time.time())  # fmt: skip
    resident = GaugeMetricFamily(
        RESIDENCY, "Driver replicas that hold the adapter there.", labels=["adapter", "tier"]
    )
    for (name, tier), count in _counted(adapters).items():
        resident.add_metric([name, tier], count)
    yield resident


def _info(name: str, meaning: str, labels: Mapping[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(name, meaning, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _joined(adapters: Iterable[AdapterDemand]) -> str:
    """Names with commas between; a name with a comma would be read as two."""
    names = dict.fromkeys(adapter.name for adapter in adapters if "," not in adapter.name)
    return ",".join(list(names)[:MAX_NAMES])


def _counted(adapters: Iterable[AdapterDemand]) -> dict[tuple[str, str], int]:
    counts: dict[tuple[str, str], int] = {}
    for adapter in adapters:
        where = adapter.name, adapter.tier
        if where in counts or len(counts) < MAX_NAMES:
            counts[where] = counts.get(where, 0) + 1
    return counts


def _of_requests(model: str, requests: Iterable[Metric]) -> Iterator[Metric]:
    """The histograms of requests under vLLM's names."""
    for family in requests:
        for name in HISTOGRAMS.get(family.name, ()):
            alias = Metric(name, family.documentation, family.type)
            alias.samples = [
                sample._replace(
                    name=name + sample.name.removeprefix(family.name),
                    labels={"model_name": model, **sample.labels},
                )
                for sample in family.samples
                if not sample.name.endswith("_created")
            ]
            yield alias

"""vLLM's names, read as gateways read them: the first series of a name, the newest of adapters."""

from collections.abc import Iterable

from msgspec.structs import replace
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from deployments.contract import AdapterDemand, EngineLoad
from deployments.observability.lorax_metrics import RequestMetrics, RequestRecord
from deployments.observability.vllm_metrics import HISTOGRAMS, MAX_NAMES, RESIDENCY, text

BUSY = EngineLoad(
    "tiny", queued=3, running=8, num_blocks=100, free_blocks=25, block_size=16, device_slots=4,
    prompt_tokens=70, cached_tokens=32, generated_tokens=11, preemptions=1,
    adapters=[
        AdapterDemand("red", "device", 5, 0), AdapterDemand("team/blue@v2", "device", 0, 0),
        AdapterDemand("cold", "disk", 0, 1), AdapterDemand("warm", "host", 0, 2),
    ],
)  # fmt: skip
IDLE = EngineLoad(
    "tiny", queued=0, running=1, num_blocks=300, free_blocks=300, block_size=16, device_slots=4,
    prompt_tokens=30, cached_tokens=0, generated_tokens=9, preemptions=0,
    adapters=[AdapterDemand("red", "device", 1, 0), AdapterDemand("a,b", "device", 0, 0)],
)  # fmt: skip


def read(loads: list[EngineLoad], requests: Iterable[Metric] = ()) -> dict[str, Metric]:
    families = text_string_to_metric_families(text([(loads, requests)]).decode())
    return {family.name: family for family in families}


def value(families: dict[str, Metric], name: str) -> float:
    sample = families[name].samples[0]
    assert sample.labels["model_name"] == "tiny"
    return sample.value


def residency(family: Metric) -> dict[tuple[str, str, str], float]:
    labels = ("adapter", "tier", "model_name")
    return {tuple(s.labels[each] for each in labels): s.value for s in family.samples}  # type: ignore[misc]


def test_gauges_and_totals_are_of_all_replicas() -> None:
    found = read([BUSY, IDLE])
    assert value(found, "vllm:num_requests_running") == 9
    assert value(found, "vllm:num_requests_waiting") == 3
    assert value(found, "vllm:kv_cache_usage_perc") == 75 / 400
    assert value(found, "vllm:prompt_tokens") == value(found, "vllm:prefix_cache_queries") == 100
    assert value(found, "vllm:prefix_cache_hits") == 32
    assert value(found, "vllm:generation_tokens") == 20
    assert value(found, "vllm:num_preemptions") == 1
    assert found["vllm:prompt_tokens"].samples[0].name == "vllm:prompt_tokens_total"
    cache = found["vllm:cache_config_info"].samples[0].labels
    assert (cache["block_size"], cache["num_gpu_blocks"]) == ("16", "400")


def test_adapters_are_listed_by_where_they_are() -> None:
    found = read([BUSY, IDLE])
    [adapters] = found["vllm:lora_requests_info"].samples
    assert adapters.labels == {
        "max_lora": "8",
        "running_lora_adapters": "red,team/blue@v2",
        "waiting_lora_adapters": "warm,cold",
    }
    assert read([BUSY])["vllm:lora_requests_info"].samples[0].value >= adapters.value > 1.7e9
    resident = residency(found[RESIDENCY])
    assert resident == {
        ("red", "device", "tiny"): 2, ("team/blue@v2", "device", "tiny"): 1,
        ("cold", "disk", "tiny"): 1, ("warm", "host", "tiny"): 1, ("a,b", "device", "tiny"): 1,
    }  # fmt: skip


def test_a_thousand_adapters_make_no_thousand_series() -> None:
    many = [AdapterDemand(f"adapter-{number}", "device", 0, 1) for number in range(1000)]
    found = read([replace(IDLE, adapters=many)])
    labels = found["vllm:lora_requests_info"].samples[0].labels
    assert len(labels["running_lora_adapters"].split(",")) == MAX_NAMES
    assert len(labels["waiting_lora_adapters"].split(",")) == MAX_NAMES
    assert len(found[RESIDENCY].samples) == MAX_NAMES


def test_an_engine_without_blocks_has_a_usage() -> None:
    assert (
        value(read([replace(IDLE, num_blocks=0, free_blocks=0)]), "vllm:kv_cache_usage_perc") == 0
    )


def test_histograms_of_requests_have_both_names() -> None:
    metrics = RequestMetrics()
    metrics.succeeded(None, RequestRecord(1.0, 0.1, 0.2, 0.8, 0.1, 0.3, 3, 10, 8))
    found = read([BUSY], metrics.families())
    by_lorax = {f.name: f for f in text_string_to_metric_families(metrics.text().decode())}
    for lorax, names in HISTOGRAMS.items():
        for name in names:
            ours = {s.name.removeprefix(name): s.value for s in found[name].samples
                    if "le" not in s.labels}  # fmt: skip
            theirs = {s.name.removeprefix(lorax): s.value for s in by_lorax[lorax].samples
                      if "le" not in s.labels}  # fmt: skip
            assert ours == theirs
            assert len(found[name].samples) == len(by_lorax[lorax].samples)
    assert value(found, "vllm:time_to_first_token_seconds") == 0.0  # the lowest bucket
    assert text([([], metrics.families())]) == b""


def test_each_base_has_samples_of_its_own() -> None:
    total = RequestMetrics()
    small, large = RequestMetrics(total), RequestMetrics(total)
    record = RequestRecord(1.0, 0.1, 0.2, 0.8, 0.1, 0.3, 3, 10, 8)
    small.succeeded(None, record)
    for _ in range(2):
        large.succeeded("red", record)
    other = replace(IDLE, model="large", running=5)
    bases = [([BUSY, IDLE], small.families()), ([], []), ([other], large.families())]
    lines = text(bases).decode()
    found = {family.name: family for family in text_string_to_metric_families(lines)}

    def values(name: str, suffix: str = "") -> dict[str, float]:
        samples = [s for s in found[name].samples if s.name == name + suffix]
        return {s.labels["model_name"]: s.value for s in samples}

    assert values("vllm:num_requests_running") == {"tiny": 9, "large": 5}
    assert values("vllm:prompt_tokens", "_total") == {"tiny": 100, "large": 30}
    assert values("vllm:cache_config_info") == {"tiny": 1, "large": 1}
    assert values("vllm:e2e_request_latency_seconds", "_count") == {"tiny": 1, "large": 2}
    assert "lorax_request_duration_count 3.0" in total.text().decode()
    resident = residency(found[RESIDENCY])
    assert (resident["red", "device", "tiny"], resident["red", "device", "large"]) == (2, 1)
    # Readers of this name take one series: it is of all bases.
    [adapters] = found["vllm:lora_requests_info"].samples
    assert adapters.labels["max_lora"] == "12"
    assert lines.count("# TYPE vllm:num_requests_running") == 1

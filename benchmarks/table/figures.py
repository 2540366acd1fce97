"""The figures that count: what the peer was measured at, what the machine allows, what must be met.

The goals are about the standard workload on H200s: Llama's shape in bfloat16, 512 tokens in and 256
out, unless a case says otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.serving import Case
from benchmarks.table.groups import written_for
from benchmarks.workload import adapter_parameters, config_of, projection_sizes

RATE, TPOT, TTFT, ITL = "output_tokens_per_s", "tpot_p50_ms", "ttft_p99_ms", "itl_p99_ms"
IN_TIME, ARRIVALS = "slo_share", "slo_rate_per_s"
UNITS = {
    RATE: "tokens/s",
    TPOT: "ms a token",
    TTFT: "ms, first token, p99",
    ITL: "ms, between tokens, p99",
    IN_TIME: "first token in 0.5 s, others in 25 ms",
    ARRIVALS: "requests/s of which 99 % are in time",
    "ready_s": "s to ready",
    "load_of_reading": "of the page cache's speed",
    "ratio": "of tokens/s without",
}
PEER = "peer"
PEER_NAME = "vLLM 0.25.1"
"""The peer with the quoted figures."""

QUOTED_SHAPE = "llama3-8b"
"""The shape of the quoted figures, in groups that have no shape of their own."""


@dataclass(frozen=True)
class Goal:
    """What must be met: `metric` against factor times something.

    of: PEER, another case of the group, "group/case" of another one, or "" for the number itself.
    plus: a metric of that other case, which is added.
    """

    factor: float
    of: str = ""
    metric: str | None = None
    plus: str | None = None


@dataclass(frozen=True)
class Figure:
    """The figure that stands for a case; quoted: the peer's, measured on other machines."""

    metric: str
    goals: tuple[Goal, ...] = ()
    quoted: tuple[float, ...] = ()


def is_better_low(metric: str) -> bool:
    """Times are, rates and shares are not."""
    return metric.endswith(("_ms", "_s")) and not metric.endswith("_per_s")


FIGURES: Mapping[tuple[str, str], Figure] = {
    ("one-gpu", "base-c1"): Figure(TPOT, (Goal(1.0, PEER),), (4.88,)),
    ("one-gpu", "lora1-c1"): Figure(TPOT, (Goal(1.12, "base-c1"),), (6.59, 6.98)),
    ("one-gpu", "base-c64"): Figure(RATE, (Goal(1.0, PEER),), (6619, 6695)),
    ("one-gpu", "lora1-c64"): Figure(RATE, (Goal(0.90, "base-c64"),), (4768, 5360)),
    ("one-gpu", "lora8-c64"): Figure(RATE, (Goal(0.90, "base-c64"),)),
    ("one-gpu", "lora32-c64"): Figure(RATE, (Goal(0.82, "base-c64"), Goal(2.1, PEER)), (2512,)),
    ("one-gpu", "mixed32-c64"): Figure(RATE, (Goal(0.75, "base-c64"),)),
    ("one-gpu", "base-c256"): Figure(RATE, (Goal(1.0, PEER),), (11464,)),
    ("one-gpu", "lora32-c256"): Figure(RATE, (Goal(0.80, "base-c256"), Goal(1.5, PEER)), (6121,)),
    ("one-gpu", "system32-c64"): Figure(RATE, (Goal(5000.0), Goal(1500.0, metric=TTFT)), (2221,)),
    ("one-gpu", "long32-c16"): Figure(RATE, (Goal(520.0),), (329,)),
    ("two-gpus", "base-c1"): Figure(TPOT, (Goal(1.0, PEER),), (3.51,)),
    ("two-gpus", "lora1-c1"): Figure(TPOT, (Goal(1.15, "base-c1"),), (5.29,)),
    ("two-gpus", "base-c64"): Figure(RATE),
    ("two-gpus", "lora1-c64"): Figure(RATE),
    ("two-gpus", "lora8-c64"): Figure(RATE),
    ("two-gpus", "lora32-c64"): Figure(RATE, (Goal(1.8, PEER),), (3704,)),
    ("two-gpus", "mixed32-c64"): Figure(RATE),
    ("two-gpus", "base-c256"): Figure(RATE),
    ("two-gpus", "lora32-c256"): Figure(RATE, (Goal(1.3, PEER),), (9758,)),
    ("seventy-b", "base-c1"): Figure(TPOT, (Goal(1.0, PEER),), (11.92,)),
    ("seventy-b", "base-c64"): Figure(RATE, quoted=(2702,)),
    ("seventy-b", "lora32-c64"): Figure(RATE, (Goal(1.8, PEER),), (1221,)),
    ("churn", "resident"): Figure(RATE, quoted=(2588,)),
    ("churn", "zipf"): Figure(
        RATE,
        (
            Goal(0.90, "resident"),
            Goal(3.0, "resident", TTFT),
            Goal(1.0, "resident", ITL, plus="itl_p50_ms"),
        ),
        (2246,),
    ),
    ("churn", "turns"): Figure(RATE, (Goal(0.75, "churn-all-resident/all-resident"),), (1417,)),
    ("churn", "small"): Figure(RATE, (Goal(0.80, "resident"),)),
    ("churn-all-resident", "all-resident"): Figure(RATE),
    ("fairness", "open"): Figure(TTFT, (Goal(2000.0),)),
    ("fairness", "calm"): Figure(TTFT),
    ("fairness", "flood"): Figure(TTFT, (Goal(2.0, "calm"),)),
    ("open-loop", "steady"): Figure(IN_TIME, (Goal(0.99),)),
    ("open-loop", "highest"): Figure(ARRIVALS, (Goal(40.0), Goal(2.5, PEER))),
    ("kinds", "lora32-c64"): Figure(RATE),
    ("kinds", "dora32-c64"): Figure(RATE, (Goal(0.90, "lora32-c64"),)),
    ("kinds", "conversation"): Figure(TTFT),
    ("kinds", "checks-base"): Figure(TTFT),
    ("kinds", "checks-alora"): Figure(TTFT, (Goal(1.3, "checks-base"),)),
    ("kinds", "checks-lora"): Figure(TTFT),
    ("experts", "base-c64"): Figure(RATE),
    ("experts", "lora8-c64"): Figure(RATE, (Goal(0.90, "base-c64"),)),
    ("experts", "experts8-c64"): Figure(RATE, (Goal(0.75, "base-c64"),)),
    ("structured", "half-held"): Figure("ratio", (Goal(0.90),)),
    ("start", "first"): Figure("ready_s"),
    ("start", "warm"): Figure("ready_s", (Goal(40.0),)),
    ("start", "weights"): Figure("load_of_reading", (Goal(0.60),)),
}


@dataclass(frozen=True)
class Chip:
    """What one GPU was measured to do: bytes moved and bf16 operations, a second."""

    bytes_per_s: float
    flops_per_s: float


CHIPS = {"NVIDIA H200": Chip(4.3e12, 790e12), "NVIDIA H100 80GB HBM3": Chip(3.0e12, 790e12)}


def limit(case: Case, chip: Chip, shape: str, gpus: int) -> Mapping[str, float]:
    """The least time per token and the most tokens a second that bytes and operations allow.

    A step reads the layers and the head, each row's keys and values (of the prompt and 50 % of the
    answer), and A and B of each adapter in it; each token costs two operations for each parameter
    that it meets, and a prompt meets the head once. Launches, sums between GPUs and scheduling cost
    nothing, prompts and steps follow each other, and GPUs share everything evenly.
    """
    config, rows = config_of(shape), case.concurrency
    layers, kv = config["num_hidden_layers"], config["num_key_value_heads"] * config["head_dim"]
    head = config["vocab_size"] * config["hidden_size"]
    context = case.conversation + case.input_length + case.output_length / 2
    ranks = [recipe.rank for recipe in written_for(case.models)]
    in_a_step = min(1.0, rows / max(1, len(ranks)))
    adapters = in_a_step * sum(adapter_parameters(shape, rank) for rank in ranks)
    matrices = head + layers * _layer_parameters(config, shape, _touched(config, rows))
    moved = 2 * (matrices + rows * context * 2 * layers * kv + adapters)
    met = layers * _layer_parameters(config, shape, config.get("num_experts_per_tok", 1))
    bytes_per_s, flops_per_s = chip.bytes_per_s * gpus, chip.flops_per_s * gpus
    step_s = max(moved / bytes_per_s, rows * 2 * (met + head) / flops_per_s)
    prompt_s = 2 * (case.input_length * met + head) / flops_per_s
    answer_s = prompt_s + case.output_length * step_s / rows
    return {TPOT: step_s * 1e3, RATE: case.output_length / answer_s}


def _layer_parameters(config: Mapping[str, Any], shape: str, experts: float) -> float:
    """Numbers in a layer's linear maps; of routed experts, in so many."""
    sizes = {name: i * o for name, (i, o) in projection_sizes(shape).items()}
    if "num_experts" not in config:
        return sum(sizes.values())
    attention = sum(size for name, size in sizes.items() if name.startswith("self_attn"))
    one: int = 3 * config["hidden_size"] * config["moe_intermediate_size"]
    router: int = config["num_experts"] * config["hidden_size"]
    return attention + router + experts * one


def _touched(config: Mapping[str, Any], rows: int) -> float:
    """Of a layer's experts, those that so many tokens choose if all are as likely."""
    count: int = config.get("num_experts", 1)
    share: float = config.get("num_experts_per_tok", 1) / count
    return float(count * (1 - (1 - share) ** rows))

"""Where a step's time goes, beside the limit of each part: `python -m benchmarks.step_parts`.

    python -m benchmarks.step_parts --rows 1 64 256 --adapters 0 32
    python -m benchmarks.step_parts --gpus 2

Runners are driven directly, with random weights, the first rank's under torch's profiler: steps
that decode, steps with a prompt of 512 tokens beside rows that decode, steps of prompts. Each
moment counts for one part: of kernels that overlap, for the one that began first. A part's limit is
a rank's bytes at `--tb-per-s` or its operations at `--tflops`, whichever takes longer; sums between
ranks have none.
"""

import argparse
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.offline import NEWCOMERS, PROMPT, Benchmark, OfflineCase
from benchmarks.offline_setup import RANK, model_parser, start_ranks
from benchmarks.workload import SHAPES, adapter_parameters
from sharding.group import TensorParallel

PRODUCTS = ("q, k, v", "o", "gate, up", "down")
"""Of a layer, in their order."""

PARTS = (
    (r"nccl|one_shot|two_shot|all_reduce", "norms, sums"),
    (r"shrink|expand|gated", "adapters"),
    (r"product|nvjet|gemm|cutlass|splitKreduce", "product"),
    (r"decode|combine|prefill|attention|flash", "attention"),
    (r"_rotate_and_store", "rotation, cache"),
    (r"norm", "norms, sums"),
    (r"silu_mul", "silu"),
)
"""What a kernel's name says about it; all others are embedding, angles and sampling.

Adapters of gate and up compute silu too, in steps with prompts.
"""

OTHERS = "embedding, sampling"


@dataclass(frozen=True)
class Kernel:
    """One kernel: its name, and when it ran, in microseconds."""

    name: str
    start: float
    end: float


def parts_of(kernels: Sequence[Kernel], num_layers: int) -> dict[str, float]:
    """Return the microseconds of each part of one step; "gaps": without any kernel."""
    found: dict[str, float] = defaultdict(float)
    products = 0
    upto = kernels[0].start
    for kernel in sorted(kernels, key=lambda each: each.start):
        part = next((part for name, part in PARTS if re.search(name, kernel.name)), OTHERS)
        if part == "product":
            products += "splitKreduce" not in kernel.name
            at = products - 1
            part = PRODUCTS[at % 4] if at < 4 * num_layers else "head"
        found["gaps"] += max(kernel.start - upto, 0)
        found[part] += max(kernel.end - max(kernel.start, upto), 0)
        upto = max(upto, kernel.end)
    return found


@dataclass(frozen=True)
class StepWork:
    """What a step computes: rows that decode after `context` tokens, and whole prompts."""

    decoding: int
    context: int
    prompts: int
    adapters: int

    @property
    def rows(self) -> int:
        """Rows of which a token is sampled."""
        return self.decoding + self.prompts

    @property
    def tokens(self) -> int:
        """Tokens that the layers compute."""
        return self.decoding + self.prompts * PROMPT

    @property
    def keys(self) -> int:
        """Tokens whose keys and values attention reads."""
        return self.decoding * self.context + self.prompts * PROMPT

    @property
    def pairs(self) -> float:
        """Pairs of a query's token and a key's."""
        return self.decoding * self.context + self.prompts * PROMPT * PROMPT / 2


def work_of(shape: str, step: StepWork, ranks: int) -> dict[str, tuple[float, float]]:
    """Return the bytes and operations of each part of a step on one of so many ranks."""
    sizes = SHAPES[shape]
    hidden, inner, layers = (
        sizes[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    width = hidden // heads * kv_heads
    # Inputs, outputs, how many: column-parallel maps share outputs, row-parallel ones inputs.
    maps = {
        "q, k, v": (hidden, (hidden + 2 * width) / ranks, layers),
        "o": (hidden / ranks, hidden, layers),
        "gate, up": (hidden, 2 * inner / ranks, layers),
        "down": (inner / ranks, hidden, layers),
        "head": (hidden, sizes["vocab_size"] / ranks, 1),
    }
    rows = {name: step.rows if name == "head" else step.tokens for name in maps}
    work = {
        name: (2.0 * count * (k * n + rows[name] * (k + n)), 2.0 * count * rows[name] * k * n)
        for name, (k, n, count) in maps.items()
    }
    work["attention"] = (
        4.0 * step.keys * layers * width / ranks,
        4.0 * step.pairs * layers * hidden / ranks,
    )
    numbers = adapter_parameters(shape, RANK, ranks)
    adapters = min(step.adapters, step.rows)
    work["adapters"] = 2.0 * adapters * numbers, 2.0 * step.tokens * numbers
    return work


def table(
    title: str,
    parts: dict[str, float],
    work: dict[str, tuple[float, float]],
    options: argparse.Namespace,
) -> str:
    """Return a table: each part's bytes, operations and microseconds beside its limit's."""
    lines = [f"{title}: {sum(parts.values()) / 1000:.2f} ms by the profiler"]
    lines.append(f"{'part':20} {'GB':>7} {'GFLOP':>8} {'us':>8} {'limit':>8}")
    for part, micros in sorted(parts.items(), key=lambda each: -each[1]):
        moved, computed = work.get(part, (0.0, 0.0))
        limit = max(moved / options.tb_per_s, computed / options.tflops) / 1e6
        lines.append(
            f"{part:20} {moved / 1e9:7.2f} {computed / 1e9:8.0f} {micros:8.0f} {limit:8.0f}"
        )
    return "\n".join(lines)


def kernels_of(profile: torch.profiler.profile) -> list[Kernel]:
    """Return what ran on the device."""
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profile.events()  # type: ignore[no-untyped-call]
        if event.device_type.name == "CUDA"
    ]


def measure(options: argparse.Namespace, group: TensorParallel) -> None:
    """Print tables of steps that decode, with a prompt and of prompts; rank 0 prints."""
    with tempfile.TemporaryDirectory() as folder:
        benchmark = Benchmark(options, Path(folder), group)
        for adapters in options.adapters:
            for title, step, profile in _steps(benchmark, options, adapters):
                if group.rank == 0:
                    parts = parts_of(
                        kernels_of(profile), SHAPES[options.shape]["num_hidden_layers"]
                    )
                    work = work_of(options.shape, step, group.size)
                    print(table(title, parts, work, options), flush=True)


def _steps(
    benchmark: Benchmark, options: argparse.Namespace, adapters: int
) -> Iterator[tuple[str, StepWork, torch.profiler.profile]]:
    """Each step's title, what it computes, and its profile."""
    context, over = options.context, f"{adapters} adapters"
    for rows in options.batches:
        case = OfflineCase(rows, context, adapters)
        taken = benchmark.decode(case)["ms_per_step"]
        title = f"decode, {rows} rows, {over}, {taken} ms by the clock"
        yield title, StepWork(rows, context, 0, adapters), benchmark.profile_of_decode(case)
        if rows > NEWCOMERS:
            decoding = rows - NEWCOMERS
            taken = benchmark.mixed(case)
            title = f"{decoding} rows and a prompt, {over}, {taken:.3f} ms by the clock"
            step = StepWork(decoding, context, 1, adapters)
            yield title, step, benchmark.profile_of_mixed(case)
    count = options.max_step_tokens // PROMPT
    taken = benchmark.prefill(adapters)["ms_per_step"]
    title = f"prompts, {count * PROMPT} tokens, {over}, {taken} ms by the clock"
    case = OfflineCase(count, PROMPT, adapters)
    yield title, StepWork(0, 0, count, adapters), benchmark.profile_of_prefill(case)


def _parser() -> argparse.ArgumentParser:
    parser = model_parser(__doc__)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--rows", dest="batches", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 32])
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tb-per-s", type=float, default=4.3)
    parser.add_argument("--tflops", type=float, default=790)
    parser.set_defaults(block_size=16, num_blocks=None, max_step_tokens=2048, repeats=6)
    parser.set_defaults(max_total_tokens=2048)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure on one device, or on several GPUs together."""
    start_ranks(_parser().parse_args(arguments), measure)


if __name__ == "__main__":
    main()

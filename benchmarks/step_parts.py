"""Where a step's time goes, beside the limit of each part: `python -m benchmarks.step_parts`.

    python -m benchmarks.step_parts --rows 1 64 256 --adapters 0 32

One rank's runner is driven directly, with random weights, under torch's profiler. Each moment of a
step counts for one part: of kernels that overlap, for the one that began first. A part's limit is
its bytes at `--tb-per-s` or its operations at `--tflops`, whichever takes longer.
"""

import argparse
import re
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.offline import PROMPT, Benchmark, OfflineCase
from benchmarks.offline_setup import RANK, model_parser
from benchmarks.workload import SHAPES

PRODUCTS = ("q, k, v", "o", "gate, up", "down")
"""Of a layer, in their order."""

PARTS = (
    (r"shrink|expand", "adapters"),
    (r"product|nvjet|gemm|cutlass|splitKreduce", "product"),
    (r"decode|combine|prefill|attention|flash", "attention"),
    (r"_rotate_and_store", "rotation, cache"),
    (r"norm", "norms, sums"),
    (r"silu_mul", "silu"),
)
"""What a kernel's name says about it; all others are embedding, angles and sampling."""

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


def work_of(shape: str, case: OfflineCase, tokens: int) -> dict[str, tuple[float, float]]:
    """Return the bytes and operations of each part of a step of so many tokens."""
    sizes = SHAPES[shape]
    hidden, inner, layers = (
        sizes[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    width = hidden // heads * kv_heads
    maps = dict(
        zip(
            (*PRODUCTS, "head"),
            (
                (hidden, hidden + 2 * width, layers),
                (hidden, hidden, layers),
                (hidden, 2 * inner, layers),
                (inner, hidden, layers),
                (hidden, sizes["vocab_size"], 1),
            ),
            strict=True,
        )
    )
    rows = {name: case.batch if name == "head" else tokens for name in maps}
    work = {
        name: (2.0 * count * (k * n + rows[name] * (k + n)), 2.0 * count * rows[name] * k * n)
        for name, (k, n, count) in maps.items()
    }
    keys = case.batch * case.context * layers
    pairs = keys if tokens == case.batch else keys * case.context / 2
    work["attention"] = 4.0 * keys * width, 4.0 * pairs * hidden
    ends = 2 * hidden + 2 * hidden + width * 2 + hidden + 3 * inner + hidden
    adapters = min(case.adapters, case.batch)
    work["adapters"] = 2.0 * adapters * layers * RANK * ends, 2.0 * tokens * layers * RANK * ends
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


def measure(benchmark: Benchmark, options: argparse.Namespace) -> None:
    """Print a table for each number of rows and adapters, and for prefill steps."""
    layers = SHAPES[options.shape]["num_hidden_layers"]
    tokens = options.max_step_tokens
    for adapters in options.adapters:
        for rows in options.batches:
            case = OfflineCase(rows, options.context, adapters)
            taken = benchmark.decode(case)["ms_per_step"]
            parts = parts_of(kernels_of(benchmark.profile_of_decode(case)), layers)
            title = f"decode, {rows} rows, {adapters} adapters, {taken} ms by the clock"
            print(table(title, parts, work_of(options.shape, case, rows), options), flush=True)
        case = OfflineCase(tokens // PROMPT, PROMPT, adapters)
        taken = benchmark.prefill(adapters)["ms_per_step"]
        parts = parts_of(kernels_of(benchmark.profile_of_prefill(case)), layers)
        title = f"prefill, {tokens} tokens, {adapters} adapters, {taken} ms by the clock"
        print(table(title, parts, work_of(options.shape, case, tokens), options), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = model_parser(__doc__)
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
    """Measure on the device that is here."""
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        measure(Benchmark(options, Path(folder)), options)


if __name__ == "__main__":
    main()

"""Step times of a runner: no Ray, no HTTP, no scheduler, random weights.

    python -m benchmarks.offline --batches 1 64 256 --adapters 0 1 32 --profile out/

With `--gpus 2` ranks share the model, one process for each GPU. One JSON line for each case, on
standard output. Decode: milliseconds a step, launched one step ahead as a server does, after
`context` random tokens of prefill for each row. Prefill: one step of `limits.max_step_tokens`
tokens, in prompts of 512.
"""

import argparse
import itertools
import json
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from benchmarks.offline_setup import (
    ALONE,
    RANK,
    add_quantised,
    engine_config,
    model_parser,
    start_ranks,
    write_named_model,
)
from benchmarks.spelled_json import PEOPLE
from benchmarks.workload import SHAPES, write_adapter
from configs.engine import Device
from configs.wire.adapters import AdapterKey, FetchedAdapter
from configs.wire.plan import RequestJoin, StepRow
from configs.wire.sampling import Sampling
from modeling.batch import ForwardBatch, StepOutput
from modeling.runner.load_paged import load_paged
from modeling.runner.loading import pick_device
from modeling.runner.paged import ModelRunner
from sharding.group import TensorParallel

PROMPT = 512
NEWCOMERS = 2
"""Rows of a mixed step that take turns in having their prompts computed."""
GREEDY = Sampling()
TOP_KERNELS = 25


@dataclass(frozen=True)
class OfflineCase:
    """One measurement.

    batch: rows of a step.
    context: tokens of each row before it.
    adapters: used in rotation; 0 for the base model.
    sampling: of all rows; the seed is 1 more than the row's number.
    held: how many of the rows must fit a JSON schema.
    """

    batch: int
    context: int
    adapters: int
    sampling: Sampling = GREEDY
    held: int = 0


class OfflineDriver:
    """Keeps the length and the blocks of each batch slot, as a scheduler does."""

    def __init__(self, runner: ModelRunner, vocab_size: int) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._lengths: dict[int, int] = {}
        self._free: list[int] = []
        self._random = random.Random(0)
        self._prepared = False

    def reset(self, num_blocks: int) -> None:
        """Free all blocks, in a random order."""
        self._lengths.clear()
        self._free = list(range(num_blocks))
        self._random.shuffle(self._free)

    def joins(self, slots: range, length: int, case: OfflineCase) -> list[RequestJoin]:
        """New requests of random tokens, each with its adapter's slot."""
        fitting = replace(case.sampling, json_schema=json.dumps(PEOPLE))
        if case.held and not self._prepared:
            assert not (fault := self._runner.prepare(0, fitting.constraint, [])), fault
            self._prepared = True
        found = []
        for slot in slots:
            self._lengths[slot] = 0
            tokens = [self._random.randrange(self._vocab_size) for _ in range(length)]
            adapter = slot % case.adapters if case.adapters else -1
            own, matcher = (fitting, 0) if slot < case.held else (case.sampling, -1)
            own = replace(own, seed=slot + 1)
            found.append(RequestJoin(slot, tokens, length, adapter, own, matcher))
        return found

    def rows(self, slots: range, length: int) -> list[StepRow]:
        """Rows for the next `length` tokens of each batch slot."""
        return [self._row(slot, length) for slot in slots]

    def decode(self, slots: range) -> StepOutput:
        """Launch one token for each batch slot."""
        return self._runner.step(ForwardBatch([], self.rows(slots, 1)))

    def prefill(self, slots: range, length: int, case: OfflineCase, budget: int) -> None:
        """Compute prompts of `length` tokens for all slots, in steps of up to `budget` tokens."""
        group = max(1, budget // length)
        for first in range(slots.start, slots.stop, group):
            some = range(first, min(first + group, slots.stop))
            joins = self.joins(some, length, case)
            self._runner.step(ForwardBatch(joins, self.rows(some, length))).wait()

    def _row(self, slot: int, length: int) -> StepRow:
        start = self._lengths[slot]
        self._lengths[slot] = start + length
        groups = self._runner.report.kv_groups
        lacking = sum(each.blocks(start + length) - each.blocks(start) for each in groups)
        return StepRow(slot, start, length, [self._free.pop() for _ in range(lacking)], True)


class Benchmark:
    """One loaded runner and the cases to run on it."""

    def __init__(
        self, options: argparse.Namespace, folder: Path, group: TensorParallel = ALONE
    ) -> None:
        """Write the model's folder and load this rank; adapters too if a case needs them."""
        self._options = options
        write_named_model(options, folder / "model")
        self._config = engine_config(options, folder / "model")
        device = pick_device(Device(options.device))
        started = time.perf_counter()
        loaded = load_paged(self._config, group, device)
        # As many blocks on every rank: the cases are drawn from one random sequence.
        blocks = group.all_gather(torch.tensor([loaded.measure()], device=device))
        self.runner = loaded.allocate(int(blocks.min()))
        self.report = self.runner.report
        self.load_seconds = time.perf_counter() - started
        self._device = device
        vocab_size = SHAPES[options.shape]["vocab_size"]
        self._driver = OfflineDriver(self.runner, vocab_size)
        if max(options.adapters) > 0:
            write_adapter(folder / "adapter", options.shape, RANK, seed=0)
            self._load(folder / "adapter", max(options.adapters))

    def decode(self, case: OfflineCase) -> dict[str, Any]:
        """Milliseconds of a decode step, and how many of the steps were captured."""
        slots = range(case.batch)
        self._start_requests(case, slots)
        steps, captured = self.runner.num_steps, self.runner.num_captured
        times = self._one_ahead(lambda: self._driver.decode(slots), self._options.steps)
        share = (self.runner.num_captured - captured) / (self.runner.num_steps - steps)
        middle = statistics.median(times)
        return {
            "case": "decode",
            "batch": case.batch,
            "context": case.context,
            "adapters": case.adapters,
            "temperature": case.sampling.temperature,
            "held": case.held,
            "ms_per_step": round(middle, 3),
            "ms_mean": round(statistics.fmean(times), 3),
            "ms_p99": round(sorted(times)[int(0.99 * (len(times) - 1))], 3),
            "tokens_per_s": round(1000 * case.batch / middle),
            "captured_share": round(share, 3),
            "launch_ms": round(self._launch_time(slots), 3),
        }

    def prefill(self, adapters: int) -> dict[str, Any]:
        """Milliseconds of a step with as many prompt tokens as its budget."""
        budget = self._config.limits.max_step_tokens
        length = min(PROMPT, budget)
        case = OfflineCase(budget // length, length, adapters)
        times = []
        for _ in range(self._options.repeats + 2):
            self._driver.reset(self.report.num_blocks)
            batch = self._prompts(case, length)
            self._synchronize()
            started = time.perf_counter()
            self.runner.step(batch).wait()
            times.append(1000 * (time.perf_counter() - started))
        middle = statistics.median(times[2:])
        tokens = case.batch * length
        return {
            "case": "prefill",
            "tokens": tokens,
            "adapters": adapters,
            "ms_per_step": round(middle, 3),
            "tokens_per_s": round(1000 * tokens / middle),
        }

    def mixed(self, case: OfflineCase) -> float:
        """Milliseconds of a step with a new prompt beside all rows but those that take turns."""
        self._start_requests(case, range(case.batch))
        newcomers = itertools.cycle(range(case.batch - NEWCOMERS, case.batch))
        step = lambda: self.runner.step(self._mixed(case, next(newcomers)))  # noqa: E731
        return statistics.median(self._one_ahead(step, self._options.repeats))

    def profile(self, case: OfflineCase, folder: Path) -> None:
        """Write the costliest kernels of a decode step and of a mixed step, as text."""
        slots = range(case.batch)
        self._start_requests(case, slots)
        self._driver.decode(slots).wait()
        name = f"b{case.batch}_a{case.adapters}.txt"
        folder.mkdir(parents=True, exist_ok=True)
        decode = ForwardBatch([], self._driver.rows(slots, 1))
        (folder / f"decode_{name}").write_text(self._kernels(decode))
        mixed = self._mixed(case, case.batch - 1)
        (folder / f"mixed_{name}").write_text(self._kernels(mixed))

    def kernels_of_decode(self, case: OfflineCase, most: int) -> str:
        """The costliest kernels of a decode step, as text."""
        slots = range(case.batch)
        self._start_requests(case, slots)
        batch = ForwardBatch([], self._driver.rows(slots, 1))
        return "\n".join(self._kernels(batch).splitlines()[: most + 1])

    def _one_ahead(self, launch: Callable[[], StepOutput], count: int) -> list[float]:
        """Milliseconds of each of so many steps, launched one ahead as a server does."""
        times = []
        flying = [launch()]
        for _ in range(count):
            started = time.perf_counter()
            flying.append(launch())
            flying.pop(0).wait()
            times.append(1000 * (time.perf_counter() - started))
        flying.pop().wait()
        return times

    def _mixed(self, case: OfflineCase, newcomer: int) -> ForwardBatch:
        """A prompt in one batch slot, beside all that decode."""
        decoding = min(newcomer, case.batch - NEWCOMERS)
        slots = range(newcomer, newcomer + 1)
        joins = self._driver.joins(slots, PROMPT, case)
        rows = self._driver.rows(range(decoding), 1) + self._driver.rows(slots, PROMPT)
        return ForwardBatch(joins, rows)

    def _start_requests(self, case: OfflineCase, slots: range) -> None:
        self._driver.reset(self.report.num_blocks)
        self._driver.prefill(slots, case.context, case, self._config.limits.max_step_tokens)
        for _ in range(3):
            self._driver.decode(slots).wait()

    def _prompts(self, case: OfflineCase, length: int) -> ForwardBatch:
        slots = range(case.batch)
        return ForwardBatch(
            self._driver.joins(slots, length, case), self._driver.rows(slots, length)
        )

    def _launch_time(self, slots: range) -> float:
        """Milliseconds of Python for one step: what must stay below the step's own time."""
        self._synchronize()
        started = time.perf_counter()
        output = self._driver.decode(slots)
        taken = 1000 * (time.perf_counter() - started)
        output.wait()
        return taken

    def profile_of_decode(self, case: OfflineCase) -> torch.profiler.profile:
        """What the profiler saw of one more decode step of the case that `decode` ran last."""
        return self._profiled(ForwardBatch([], self._driver.rows(range(case.batch), 1)))[0]

    def profile_of_mixed(self, case: OfflineCase) -> torch.profiler.profile:
        """What the profiler saw of one more step of the case that `mixed` ran last."""
        return self._profiled(self._mixed(case, case.batch - 1))[0]

    def profile_of_prefill(self, case: OfflineCase) -> torch.profiler.profile:
        """What the profiler saw of a step with prompts of the case's length."""
        self._driver.reset(self.report.num_blocks)
        return self._profiled(self._prompts(case, case.context))[0]

    def _profiled(self, batch: ForwardBatch) -> tuple[torch.profiler.profile, float]:
        """A step's profile, and its milliseconds."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profiler:
            started = time.perf_counter()
            self.runner.step(batch).wait()
            taken = 1000 * (time.perf_counter() - started)
            self._synchronize()
        return profiler, taken

    def _kernels(self, batch: ForwardBatch) -> str:
        profiler, taken = self._profiled(batch)
        # Kernels only: the operations that launched them have the same times again.
        events = [e for e in profiler.key_averages() if e.device_type.name == "CUDA"]
        events.sort(key=lambda event: -event.self_device_time_total)
        total = sum(event.self_device_time_total for event in events)
        count = sum(event.count for event in events)
        lines = [f"{taken:.3f} ms with the profiler, {total / 1000:.3f} ms of {count} kernels"]
        for event in events[:TOP_KERNELS]:
            micros = event.self_device_time_total
            share = 100 * micros / max(total, 1e-9)
            lines.append(f"{micros:10.1f} us {share:5.1f} % {event.count:5d} x  {event.key[:150]}")
        return "\n".join(lines) + "\n"

    def _load(self, folder: Path, count: int) -> None:
        """Stage one adapter and load it `count` times, each time into other pages."""
        key = AdapterKey(1)
        shape = self.runner.stage(FetchedAdapter(key, "bench", str(folder), "bench"))
        for slot in range(count):
            pages = [list(range(slot * n, (slot + 1) * n)) for n in shape.num_pages]
            self.runner.load_adapter(key, slot, pages)
        self._synchronize()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _versions(benchmark: Benchmark) -> dict[str, Any]:
    report = benchmark.report
    found = {
        "case": "setup",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": report.device,
        "attention": report.attention_reason,
        "adapter_kernel": f"{report.adapter_kernel}: {report.adapter_kernel_reason}",
        "captured_rows": report.captured_rows,
        "num_blocks": report.num_blocks,
        "weight_gb": round(report.weight_bytes_resident / 1e9, 2),
        "start_seconds": round(benchmark.load_seconds, 1),
    }
    if report.device != "cpu":
        free, total = torch.cuda.mem_get_info()
        found["gpu"] = torch.cuda.get_device_name()
        found["memory_gb_taken"] = round((total - free) / 1e9, 2)
    return found


def _results(benchmark: Benchmark, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    yield _versions(benchmark)
    for adapters in options.adapters:
        for batch in options.batches:
            yield benchmark.decode(OfflineCase(batch, options.context, adapters))
        yield benchmark.prefill(adapters)
    most = max(options.batches)
    yield benchmark.decode(OfflineCase(most, options.context, 0, Sampling(temperature=0.8)))
    yield benchmark.decode(OfflineCase(most, options.context, 0, held=most // 2))
    if options.profile is not None:
        for adapters in sorted({0, max(options.adapters)}):
            for batch in options.batches:
                benchmark.profile(OfflineCase(batch, options.context, adapters), options.profile)


def _parser() -> argparse.ArgumentParser:
    parser = model_parser(__doc__)
    parser.add_argument("--gpus", type=int, default=1)
    add_quantised(parser)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--adapters", type=int, nargs="+", default=[0])
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-blocks", type=int, default=None)
    parser.add_argument("--max-step-tokens", type=int, default=2048)
    parser.add_argument("--max-total-tokens", type=int, default=4096)
    parser.add_argument("--profile", type=Path, default=None)
    return parser


def measure(options: argparse.Namespace, group: TensorParallel) -> None:
    """Run all cases; rank 0 prints a JSON line for each."""
    if options.profile is not None and group.size > 1:
        options.profile /= str(group.rank)
    with tempfile.TemporaryDirectory() as folder:
        benchmark = Benchmark(options, Path(folder), group)
        for result in _results(benchmark, options):
            if group.rank == 0:
                print(json.dumps(result), flush=True)


def main() -> None:
    """Measure on one device, or on several GPUs together."""
    start_ranks(_parser().parse_args(), measure)


if __name__ == "__main__":
    main()

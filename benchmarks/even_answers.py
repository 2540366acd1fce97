"""Gaps between tokens while prompts arrive: `python -m benchmarks.even_answers`.

    python -m benchmarks.even_answers --in-flight 64 256 --gap-ms 0 20 28 40
    python -m benchmarks.even_answers --simulate 6.4 18

One scheduler drives one rank's runner, two plans ahead, as a driver does, without Ray and HTTP. As
many requests as there are streams arrive at once; whenever one ends, the next one arrives. The
first answers have random lengths, so prompts come all the time. A bound of 0 is none.

`--simulate DECODE_MS TOKEN_US`: no device; a step takes so long, and so much longer for each token
of prompts beyond 128.
"""

import argparse
import random
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from benchmarks.offline import Benchmark
from benchmarks.offline_setup import add_quantised, model_parser
from benchmarks.workload import SHAPES
from configs.kv_groups import KvGroup
from configs.wire.plan import Capacity, StepPlan, StepResult
from configs.wire.sampling import Sampling, Stopping
from modeling.batch import ForwardBatch
from modeling.runner.paged import ModelRunner
from scheduler.admission.limits import Limits
from scheduler.events import Ended, NewTokens
from scheduler.request import Request
from scheduler.scheduler import Scheduler

FREE_TOKENS = 128
"""Tokens of prompts that take no time in a simulated step: it reads all weights anyway."""

Wait = Callable[[], list[int]]
"""Wait for a step; returns its tokens."""


class Ranks(Protocol):
    """What executes plans."""

    capacity: Capacity

    def now(self) -> float:
        """Seconds."""

    def launch(self, plan: StepPlan) -> Wait:
        """Begin a plan after those before it."""


class RealRanks:
    """A runner on a device."""

    def __init__(self, runner: ModelRunner, longest: int) -> None:
        self._runner = runner
        report = runner.report
        self.capacity = _capacity(report.num_blocks, report.block_size, longest, report.kv_groups)

    def now(self) -> float:
        """Seconds."""
        return time.perf_counter()

    def launch(self, plan: StepPlan) -> Wait:
        """Launch a step."""
        output = self._runner.step(ForwardBatch(plan.joins, plan.rows))
        return lambda: output.wait().tokens


class SimulatedRanks:
    """Steps that take `decode_s`, and `token_s` more for each token of prompts."""

    def __init__(self, decode_s: float, token_s: float, capacity: Capacity) -> None:
        self.capacity = capacity
        self._decode_s = decode_s
        self._token_s = token_s
        self._now = self._free_at = 0.0

    def now(self) -> float:
        """Seconds."""
        return self._now

    def launch(self, plan: StepPlan) -> Wait:
        """Compute when the step ends; waiting for it moves the clock there."""
        prompts = sum(row.length for row in plan.rows if row.length > 1)
        taken = self._decode_s + max(prompts - FREE_TOKENS, 0) * self._token_s
        self._free_at = max(self._free_at, self._now) + taken
        ends = self._free_at

        def wait() -> list[int]:
            self._now = max(self._now, ends)
            return [7] * sum(row.samples for row in plan.rows)

        return wait


def _capacity(
    num_blocks: int, block_size: int, longest: int, kv_groups: tuple[KvGroup, ...] = ()
) -> Capacity:
    return Capacity(
        num_blocks=num_blocks,
        block_size=block_size,
        projections=(),
        adapter_pages=0,
        adapter_slots=0,
        host_bytes=0,
        max_total_tokens=longest,
        kv_groups=kv_groups,
    )


@dataclass
class Played:
    """Seconds of a closed loop: first tokens since arrival, gaps between tokens, of everything."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0


class ClosedLoop:
    """So many streams; each sends its next request when one ends."""

    def __init__(self, ranks: Ranks, limits: Limits, options: argparse.Namespace) -> None:
        self._ranks = ranks
        self._scheduler = Scheduler(limits, ranks.capacity)
        self._options = options
        self._random = random.Random(0)
        self._arrived: dict[int, float] = {}
        self._latest: dict[int, float] = {}
        self._played = Played()

    def play(self, streams: int) -> Played:
        """Serve `streams` times `options.requests` requests."""
        total, vocab = streams * self._options.requests, SHAPES[self._options.shape]["vocab_size"]
        for _ in range(streams):
            answer = self._random.randint(self._options.answer // 16, self._options.answer)
            self._add(answer, vocab)
        flying: deque[tuple[StepPlan, Wait]] = deque()
        started = self._ranks.now()
        while self._latest or self._arrived or flying:
            while len(flying) < 2:
                plan = self._scheduler.schedule(self._ranks.now())
                if plan.empty:
                    break
                flying.append((plan, self._ranks.launch(plan)))
            plan, wait = flying.popleft()
            ended = self._apply(StepResult(plan.epoch, plan.step, wait()), plan)
            for _ in range(min(ended, total - len(self._played.first) - len(self._arrived))):
                self._add(self._options.answer, vocab)
        self._played.seconds = self._ranks.now() - started
        return self._played

    def _add(self, answer: int, vocab: int) -> None:
        number, now = len(self._played.first) + len(self._arrived), self._ranks.now()
        prompt = [self._random.randrange(vocab) for _ in range(self._options.prompt)]
        request = Request(("even", number), prompt, Sampling(), Stopping(answer), None, now)
        self._scheduler.add(request, now)
        self._arrived[number] = now

    def _apply(self, result: StepResult, plan: StepPlan) -> int:
        """Account for a step; returns how many requests it ended."""
        ended = 0
        for event in self._scheduler.apply(plan, result, now := self._ranks.now()):
            if isinstance(event, NewTokens):
                number = int(event.request_id[1])
                self._played.tokens += 1
                if number in self._latest:
                    self._played.gaps.append(now - self._latest[number])
                else:
                    self._played.first.append(now - self._arrived.pop(number))
                self._latest[number] = now
            elif isinstance(event, Ended):
                ended += 1
                del self._latest[int(event.request_id[1])]
        return ended


def _share(values: list[float], share: float) -> float:
    """A quantile, in milliseconds."""
    return 1e3 * sorted(values)[int(share * (len(values) - 1))]


def measure(ranks: Ranks, options: argparse.Namespace) -> None:
    """Print a line for each number of streams and each bound."""
    for streams in options.batches:
        for gap_ms in options.gap_ms:
            limits = Limits(
                max_step_tokens=options.max_step_tokens,
                token_gap_s=gap_ms / 1e3 or None,
                max_running=streams,
                prefix_caching=False,
            )
            found = ClosedLoop(ranks, limits, options).play(streams)
            gaps = [f"{_share(found.gaps, share):.1f}" for share in (0.5, 0.99, 0.999)]
            first = [f"{_share(found.first, share):.0f}" for share in (0.5, 0.99)]
            rate = found.tokens / found.seconds
            print(
                f"{streams} in flight, bound {gap_ms:g} ms: {rate:.0f} tokens/s; gaps p50, p99, "
                f"p99.9 {', '.join(gaps)} ms; first tokens p50, p99 {', '.join(first)} ms",
                flush=True,
            )


def _parser() -> argparse.ArgumentParser:
    parser = model_parser(__doc__)
    parser.add_argument("--in-flight", dest="batches", type=int, nargs="+", default=[64])
    add_quantised(parser)
    parser.add_argument("--requests", type=int, default=3, help="of each stream")
    parser.add_argument("--gap-ms", type=float, nargs="+", default=[0, 28])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--answer", type=int, default=256)
    parser.add_argument("--max-step-tokens", type=int, default=2048)
    parser.add_argument("--simulate", type=float, nargs=2, metavar=("DECODE_MS", "TOKEN_US"))
    parser.set_defaults(block_size=16, num_blocks=None, adapters=[0])
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure on the device that is here, or compute."""
    options = _parser().parse_args(arguments)
    longest = options.max_total_tokens = options.prompt + options.answer
    if options.simulate:
        decode_ms, token_us = options.simulate
        blocks = max(options.batches) * (longest // 16 + 2)
        capacity = _capacity(blocks, 16, longest)
        measure(SimulatedRanks(decode_ms / 1e3, token_us / 1e6, capacity), options)
        return
    with tempfile.TemporaryDirectory() as folder:
        benchmark = Benchmark(options, Path(folder))
        measure(RealRanks(benchmark.runner, longest), options)


if __name__ == "__main__":
    main()

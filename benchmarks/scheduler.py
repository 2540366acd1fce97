"""What a step costs the driver: `schedule` and `apply` over rows that decode, two plans in flight.

    python -m benchmarks.scheduler --rows 64 256 --adapters 0 32

No ranks, no sockets: results are made up. One JSON line a case, microseconds.
"""

import argparse
import json
import platform
import statistics
import time
from collections import deque
from collections.abc import Sequence

from configs.adapters import AdapterKey, AdapterShape
from configs.sampling import Sampling, Stopping
from scheduler.events import AdapterStaged
from scheduler.plan import Capacity, StepPlan, StepResult
from scheduler.policy import Limits
from scheduler.request import Request
from scheduler.scheduler import Scheduler

PROMPT, BLOCK_SIZE, MICROSECONDS = 512, 16, 1e6


def loaded(rows: int, adapters: int, steps: int) -> Scheduler:
    """A scheduler with `rows` requests, over `adapters` by turns (0: the base model)."""
    longest = PROMPT + 2 * steps + 64
    capacity = Capacity(
        num_blocks=rows * (longest // BLOCK_SIZE + 2),
        block_size=BLOCK_SIZE,
        projections=("q_proj",),
        adapter_pages=2 * max(adapters, 1),
        adapter_slots=max(adapters, 1),
        host_bytes=2**40,
        max_total_tokens=longest,
    )
    scheduler = Scheduler(Limits(max_step_tokens=4096, max_running=rows), capacity)
    for i in range(rows):
        key = AdapterKey(1 + i % adapters) if adapters else None
        prompt = [(i * 7919 + j) % 50_000 for j in range(PROMPT)]
        request = Request(
            ("r", i), prompt, Sampling(), Stopping(longest - PROMPT), key, arrival=0.0
        )
        scheduler.add(request, 0.0)
    while keys := scheduler.to_stage():
        for key in keys:
            scheduler.adapter(AdapterStaged(key, AdapterShape((2,), 1)), 0.0)
    return scheduler


def measure(rows: int, adapters: int, steps: int) -> dict[str, object]:
    """Prefill everything, then time `steps` steps in which every row decodes."""
    scheduler = loaded(rows, adapters, steps)
    flying: deque[StepPlan] = deque()
    schedule: list[float] = []
    apply: list[float] = []
    while len(apply) < steps:
        began = time.perf_counter()
        plan = scheduler.schedule(0.0)
        scheduled = time.perf_counter() - began
        if not plan.empty:
            flying.append(plan)
        if len(flying) < 2 and not plan.empty:
            continue
        done = flying.popleft()
        result = StepResult(done.epoch, done.step, [3] * sum(row.samples for row in done.rows))
        began = time.perf_counter()
        scheduler.apply(done, result, 0.0)
        if len(done.rows) == rows and all(row.length == 1 for row in done.rows):
            schedule.append(scheduled)
            apply.append(time.perf_counter() - began)
    return {
        "rows": rows,
        "adapters": adapters,
        "schedule_p50_us": round(statistics.median(schedule) * MICROSECONDS),
        "apply_p50_us": round(statistics.median(apply) * MICROSECONDS),
        "python": platform.python_version(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each number of rows and of adapters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 32])
    parser.add_argument("--steps", type=int, default=400)
    parsed = parser.parse_args(arguments)
    for rows in parsed.rows:
        for adapters in parsed.adapters:
            print(json.dumps(measure(rows, adapters, parsed.steps)), flush=True)


if __name__ == "__main__":
    main()

"""Adapter churn without a GPU: the real scheduler, a closed loop, and step times once measured.

    python -m benchmarks.churn_steps --requests 384

The loop of a driver with two plans in flight over one simulated device. A step takes what one
with as many rows took on an H200 (Llama-3-8B's shape, rank 16), and more for each further token
and each adapter beyond 32; adapter loads take their time beside the steps, one after the other. All
adapters are in the host tier. A client sends its next request after each answer, and the ingress
brings one request in every few milliseconds. `--cached` says how many of the first prompts are
in the prefix cache, as when a benchmark was played before with the same prompts. `open`, `calm`
and `flood` are those of benchmarks.fairness; the tokens of a flood are reported apart.

One JSON line a case, with the most that 32 adapters at a time allow. Deterministic.
"""

import argparse
import heapq
import json
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from math import inf
from statistics import mean
from typing import Any

from benchmarks.serving import percentile
from configs.wire.adapters import AdapterKey, AdapterShape
from configs.wire.plan import Capacity, StepPlan, StepResult
from configs.wire.sampling import Sampling, Stopping
from scheduler.admission.limits import Limits
from scheduler.events import AdapterLoaded, AdapterStaged, NewTokens, RequestEvent
from scheduler.request import Request
from scheduler.scheduler import Scheduler

DECODE_S = ((1, 4.5e-3), (16, 5.2e-3), (32, 6.0e-3), (48, 6.7e-3), (64, 7.6e-3))
"""(rows, seconds) of a step that decodes, with an adapter of its own for each row up to 32."""

PROMPT_TOKEN_S = 6.0e-3 / 256
FURTHER_ADAPTER_S = 1.08e-3 / 32
LOAD_S, REPORT_S = 2.5e-3, 0.3e-3
"""The copies of an adapter load; the way of a report from the ranks into the loop."""

SEND_S = 0.2e-3
NEXT_REQUEST_S, ARRIVAL_S = 20.0e-3, 1.0e-3
"""From a client's last token to its next request; between two that the ingress brings in."""

FULL_PRICE = 32
BLOCK_SIZE, PAGES = 16, 2
FLOOD_LEAD_S = 10.0
WARM, OWN, FLOOD = "warm", "r", "flood"


@dataclass(frozen=True)
class ChurnCase:
    """A closed loop over so many adapters, of which `slots` are on the device at once.

    Lengths in tokens.

    zipf: > 0: adapters are drawn by Zipf's law; 0: they are used in rotation.
    rate: > 0: an open loop instead, with so many requests a second over random adapters.
    cached: how many of the first prompts are in the prefix cache.
    flood: requests that one more adapter keeps in flight beside all these.
    """

    name: str
    adapters: int
    slots: int
    zipf: float = 0.0
    concurrency: int = 64
    requests: int = 384
    input_length: int = 256
    output_length: int = 128
    cached: int = 0
    seed: int = 1
    rate: float = 0.0
    flood: int = 0

    def choices(self) -> list[int]:
        """The adapter of each request."""
        if not self.zipf and not self.rate:
            return [i % self.adapters for i in range(self.requests)]
        weights = [1 / (i + 1) ** self.zipf for i in range(self.adapters)]
        chooser = random.Random(self.seed)
        return chooser.choices(range(self.adapters), weights, k=self.requests)

    def prompt(self, index: int) -> list[int]:
        """Tokens that no other request begins with."""
        return list(range(index * self.input_length, (index + 1) * self.input_length))


@dataclass
class ChurnResult:
    """What the clients saw, in seconds, and how full the steps were."""

    tokens: int = 0
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    adapters: list[int] = field(default_factory=list)
    loads: int = 0
    flood_tokens: int = 0


def decode_s(rows: float, adapters: float) -> float:
    """Seconds of a step with so many rows, straight between those that were measured."""
    at = min(max(bisect_left(DECODE_S, (rows, 0.0)), 1), len(DECODE_S) - 1)
    (low, below), (high, above) = DECODE_S[at - 1 : at + 1]
    base = below + (above - below) * (rows - low) / (high - low)
    return base + max(0.0, adapters - FULL_PRICE) * FURTHER_ADAPTER_S


def bound(case: ChurnCase) -> dict[str, float]:
    """Rows a step and tokens a second if every step were packed as well as it can be.

    Of the `concurrency` requests that follow each other, those of `slots` adapters can run;
    the most can if all the others are alone with theirs. No prompt ever waits, nothing is idle.
    """
    names, window = case.choices(), case.concurrency
    spans = [names[i : i + window] for i in range(max(1, len(names) - window + 1))]
    distinct = [len(set(span)) for span in spans]
    rows = mean(window - max(0, each - case.slots) for each in distinct)
    step_s = decode_s(rows, min(mean(distinct), case.slots))
    request_s = case.output_length * step_s / rows + case.input_length * PROMPT_TOKEN_S
    return {"rows": round(rows, 1), "tokens_per_s": round(case.output_length / request_s, 1)}


class SimulatedDevice:
    """Computes when plans, one after the other, and loads beside them are done."""

    def __init__(self) -> None:
        """Start idle at second 0."""
        self._step_end = 0.0
        self._load_end = 0.0
        self._slots: dict[int, int] = {}

    def send(self, plan: StepPlan, now: float) -> tuple[float, int]:
        """When the plan's tokens are in the loop, and how many adapters it uses."""
        self._slots.update((join.batch_slot, join.adapter_slot) for join in plan.joins)
        used = {self._slots[row.batch_slot] for row in plan.rows} - {-1}
        rows, tokens = len(plan.rows), sum(row.length for row in plan.rows)
        took = decode_s(rows, len(used)) + (tokens - rows) * PROMPT_TOKEN_S if rows else 0.0
        self._step_end = max(self._step_end, now + SEND_S) + took
        return self._step_end + REPORT_S, len(used)

    def load(self, now: float) -> float:
        """When the loop gets the report of a load that begins now."""
        self._load_end = max(self._load_end, now + SEND_S) + LOAD_S
        return self._load_end + REPORT_S


class ClosedLoop:
    """A driver's loop over the device, and the clients that keep it busy."""

    def __init__(self, case: ChurnCase, limits: Limits) -> None:
        """Bring every adapter to the host tier, and the cached prompts into the cache."""
        self._case = case
        self._scheduler = Scheduler(limits, capacity(case))
        self._device = SimulatedDevice()
        self._now = 0.0
        self._clock: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = count()
        self._in_flight: deque[StepPlan] = deque()
        self._names = case.choices()
        self._waiting: Iterator[int] = iter(())
        self._sent: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._next_arrival = 0.0
        self._left = case.requests
        self._ended = 0.0
        self._floods: set[int] = set()
        self._num_floods = 0
        self.seen = ChurnResult()
        for adapter in range(case.adapters + bool(case.flood)):
            self._add((WARM, adapter), [adapter], adapter, 2)
        self._run()
        for index in range(min(case.cached, case.requests)):
            known = (WARM, case.adapters + index)
            self._add(known, case.prompt(index), self._names[index], 1)
        self._run()

    @property
    def num_preemptions(self) -> int:
        """How often a request was preempted for another adapter."""
        return self._scheduler.snapshot().num_preemptions

    def play(self) -> float:
        """Run all requests; returns the seconds that they took."""
        began = self._now + (FLOOD_LEAD_S if self._case.flood else 0.0)
        for _ in range(self._case.flood):
            self._send_flood()
        if self._case.flood:
            self._run(began)
        self.seen = ChurnResult()
        if self._case.rate:
            self._arrive_at_random(began)
        else:
            self._waiting = iter(range(self._case.requests))
            for _ in range(self._case.concurrency):
                self._send_next()
        self._run()
        return self._ended - began

    def _run(self, until: float = inf) -> None:
        self._launch()
        while self._clock and self._clock[0][0] <= until:
            self._now, _, action = heapq.heappop(self._clock)
            action()
            self._launch()

    def _at(self, due: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._clock, (due, next(self._serial), action))

    def _launch(self) -> None:
        while len(self._in_flight) < 2:
            for key in self._scheduler.to_stage():
                shape = AdapterShape((PAGES,), 1)
                self._scheduler.handle_adapter_event(AdapterStaged(key, shape))
            plan = self._scheduler.schedule(self._now)
            if plan.empty:
                return
            self._send(plan)

    def _send(self, plan: StepPlan) -> None:
        self._in_flight.append(plan)
        due, adapters = self._device.send(plan, self._now)
        self._at(due, self._apply)
        for load in plan.loads:
            self._at(self._device.load(self._now), partial(self._loaded, load.key))
        self.seen.loads += len(plan.loads)
        if plan.rows:
            self.seen.rows.append(len(plan.rows))
            self.seen.adapters.append(adapters)

    def _loaded(self, key: AdapterKey) -> None:
        self._scheduler.handle_adapter_event(AdapterLoaded(key))

    def _apply(self) -> None:
        plan = self._in_flight.popleft()
        tokens = [0 for row in plan.rows if row.samples]
        result = StepResult(plan.epoch, plan.step, tokens)
        for event in self._scheduler.apply(plan, result, self._now):
            if event.request_id[0] != WARM:
                self._handle(event)

    def _handle(self, event: RequestEvent) -> None:
        name, index = event.request_id
        if name == FLOOD:
            self._handle_flood(event)
            return
        if not isinstance(event, NewTokens):
            self._left -= 1
            self._ended = self._now
            if not self._left:
                self._stop_flood()
            self._send_next()
            return
        if index in self._last:
            self.seen.gaps.append(self._now - self._last[index])
        else:
            self.seen.first.append(self._now - self._sent[index])
        self._last[index] = self._now
        self.seen.tokens += 1

    def _handle_flood(self, event: RequestEvent) -> None:
        if isinstance(event, NewTokens):
            self.seen.flood_tokens += 1
            return
        self._floods.remove(event.request_id[1])
        self._send_flood()

    def _send_flood(self) -> None:
        """Send one more request of the flood, until all others have ended."""
        if self._left:
            index = self._case.requests + self._num_floods
            self._num_floods += 1
            self._floods.add(index)
            self._next_arrival = max(self._next_arrival, self._now + NEXT_REQUEST_S) + ARRIVAL_S
            self._arrive((FLOOD, index), self._case.adapters, self._next_arrival)

    def _stop_flood(self) -> None:
        for index in sorted(self._floods):
            self._scheduler.cancel((FLOOD, index))

    def _send_next(self) -> None:
        """A client sends the next request, if there is one."""
        index = next(self._waiting, None)
        if index is None:
            return
        self._sent[index] = self._now
        self._next_arrival = max(self._next_arrival, self._now + NEXT_REQUEST_S) + ARRIVAL_S
        self._arrive((OWN, index), self._names[index], self._next_arrival)

    def _arrive_at_random(self, due: float) -> None:
        """Send all requests at random times, independent of the answers."""
        chooser = random.Random(self._case.seed)
        for index in range(self._case.requests):
            due += chooser.expovariate(self._case.rate)
            self._sent[index] = due
            self._arrive((OWN, index), self._names[index], due)

    def _arrive(self, name: tuple[str, int], adapter: int, due: float) -> None:
        prompt, length = self._case.prompt(name[1]), self._case.output_length
        self._at(due, partial(self._add, name, prompt, adapter, length))

    def _add(self, name: tuple[str, int], prompt: list[int], adapter: int, length: int) -> None:
        key = AdapterKey(adapter + 1)
        self._scheduler.add(Request(name, prompt, Sampling(), Stopping(length), key), self._now)


def capacity(case: ChurnCase) -> Capacity:
    """One H200's: blocks for 760,000 tokens, pages for the case's slots at rank 16."""
    return Capacity(
        num_blocks=760_000 // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        projections=("all",),
        adapter_pages=PAGES * case.slots,
        adapter_slots=case.slots,
        host_bytes=case.adapters,
        max_total_tokens=8192,
    )


def simulate(case: ChurnCase, limits: Limits) -> dict[str, Any]:
    """Play one case; returns its row, in the words of benchmarks.serving."""
    loop = ClosedLoop(case, limits)
    seconds = loop.play()
    seen = loop.seen
    return {
        "case": case.name,
        "requests": case.requests,
        "cached_prompts": case.cached,
        "output_tokens_per_s": round(seen.tokens / seconds, 1),
        "flood_tokens_per_s": round(seen.flood_tokens / seconds, 1),
        "itl_p50_ms": percentile(seen.gaps, 0.5),
        "itl_p99_ms": percentile(seen.gaps, 0.99),
        "itl_max_ms": percentile(seen.gaps, 1.0),
        "ttft_p50_ms": percentile(seen.first, 0.5),
        "ttft_p99_ms": percentile(seen.first, 0.99),
        "steps": len(seen.rows),
        "rows_a_step": round(mean(seen.rows), 1),
        "adapters_a_step": round(mean(seen.adapters), 1),
        "loads": seen.loads,
        "pauses": loop.num_preemptions,
        "bound": None if case.rate else bound(case),
    }


def cases(options: argparse.Namespace) -> list[ChurnCase]:
    """Those of benchmarks.churn, and the resident one."""
    few, many, sizes = options.resident, options.adapters, {"requests": options.requests}
    sizes |= {"concurrency": options.concurrency, "seed": options.seed}
    sizes |= {"input_length": options.input_length, "output_length": options.output_length}
    lengths = {"input_length": 512, "output_length": 512}
    few_slots = ChurnCase("", 5, 3, requests=120, rate=2.0, seed=options.seed, **lengths)
    return [
        ChurnCase("resident", few, few, cached=options.cached, **sizes),
        ChurnCase("zipf", many, few, zipf=1.0, **sizes),
        ChurnCase("turns", many, few, **sizes),
        ChurnCase("all-resident", many, many, **sizes),
        replace(few_slots, name="open", adapters=6, requests=240, rate=4.0),
        replace(few_slots, name="calm"),
        replace(few_slots, name="flood", flood=64),
    ]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    made.add_argument("--resident", type=int, default=32, help="adapters on the device at once")
    made.add_argument("--adapters", type=int, default=128)
    made.add_argument("--concurrency", type=int, default=64)
    made.add_argument("--requests", type=int, default=384)
    made.add_argument("--input-length", type=int, default=256)
    made.add_argument("--output-length", type=int, default=128)
    made.add_argument("--cached", type=int, default=0, help="prompts of `resident` in the cache")
    made.add_argument("--seed", type=int, default=1, help="of the choice by Zipf's law")
    made.add_argument("--patience-steps", type=int, default=Limits.patience_steps)
    made.add_argument("--slice-steps", type=int, default=Limits.slice_steps)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Play and print every case."""
    options = parser().parse_args(arguments)
    limits = Limits(
        max_queued=options.requests + options.adapters,
        patience_steps=options.patience_steps,
        slice_steps=options.slice_steps,
    )
    for case in cases(options):
        print(json.dumps(simulate(case, limits)), flush=True)


if __name__ == "__main__":
    main()

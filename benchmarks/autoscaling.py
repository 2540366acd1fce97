"""Autoscaling by what matters against autoscaling by requests, under one bursty load.

    python -m benchmarks.autoscaling

A simulation on one CPU: each replica is LoRay's own scheduler, whose steps take the time of a
model of an engine (8 ms, 0.1 ms a running request, 0.05 ms a token of a prompt); replicas start in
20 s. Serve's rules are copied: a mean over 10 s, its delays, and 1 to 6 replicas. The load repeats
three bursts: many short chats, few long prompts, and many adapters at once. One JSON line for each
setting of a policy: replica seconds, and the share of requests whose first token took over 2 s.
Compare lines of about equal replica seconds.
"""

import argparse
import heapq
import json
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from configs.wire.adapters import AdapterKey, AdapterShape
from configs.wire.plan import Capacity, StepPlan, StepResult
from configs.wire.sampling import Sampling, Stopping
from deployments.autoscaling import LoadPolicy, Stats, scaling_stats
from scheduler.admission.limits import Limits
from scheduler.events import AdapterLoaded, AdapterStaged, Ended
from scheduler.request import Request
from scheduler.scheduler import Scheduler

SLO_S, START_S, LOOK_BACK_S = 2.0, 20.0, 10
UPSCALE_DELAY_S, DOWNSCALE_DELAY_S = 5.0, 45.0
MOST_REPLICAS, BATCH_SLOTS, DEVICE_SLOTS, BLOCKS, BLOCK_SIZE = 6, 48, 12, 1536, 16
STEP_S, ROW_S, TOKEN_S = 0.008, 0.0001, 0.00005

Policy = Callable[["Context"], tuple[float, dict[str, Any]]]


@dataclass(frozen=True)
class Burst:
    """A part of the load: requests a second, tokens of prompt and answer, how many adapters."""

    seconds: float
    rate: float
    prompt: int
    answer: int
    adapters: int


QUIET = Burst(60, 1.5, 200, 80, 4)
LOAD = (
    QUIET,
    Burst(60, 14, 120, 60, 4),
    QUIET,
    Burst(60, 5, 2200, 120, 4),
    QUIET,
    Burst(60, 8, 200, 80, 80),
    QUIET,
)


@dataclass(frozen=True)
class Context:
    """What a policy reads of Serve's context."""

    current_num_replicas: int
    total_num_requests: float
    aggregated_metrics: dict[str, dict[int, float]]


@dataclass
class Replica:
    """One engine: the scheduler, and the time at which its step ends.

    ready: when it can serve. leaving: it takes no new requests. ended: when it is gone.
    """

    number: int
    born: float
    ready: float
    leaving: bool = False
    ended: float | None = None
    plan: StepPlan | None = None
    done_at: float = math.inf
    open: int = 0
    reports: deque[Stats] = field(default_factory=lambda: deque(maxlen=LOOK_BACK_S))

    def __post_init__(self) -> None:
        """Make the scheduler."""
        capacity = Capacity(
            num_blocks=BLOCKS,
            block_size=BLOCK_SIZE,
            projections=("qkv",),
            adapter_pages=2 * DEVICE_SLOTS,
            adapter_slots=DEVICE_SLOTS,
            host_bytes=2**40,
            max_total_tokens=8192,
        )
        limits = Limits(
            max_step_tokens=1024, max_running=BATCH_SLOTS, max_queued=10_000, steps_ahead=1
        )
        self.scheduler = Scheduler(limits, capacity)

    def launch(self, now: float) -> None:
        """Begin a step, if there is any work and none runs."""
        if self.plan is not None:
            return
        for key in self.scheduler.to_stage():
            self.scheduler.handle_adapter_event(AdapterStaged(key, AdapterShape((2,), 1)))
        plan = self.scheduler.schedule(now)
        if plan.empty:
            return
        prompts = sum(row.length for row in plan.rows if row.length > 1)
        self.plan = plan
        self.done_at = now + STEP_S + ROW_S * len(plan.rows) + TOKEN_S * prompts

    def finish(self, now: float) -> list[float]:
        """End the step; the seconds to the first token of each request that ended."""
        plan, self.plan, self.done_at = self.plan, None, math.inf
        assert plan is not None
        tokens = [3] * sum(row.samples for row in plan.rows)
        events = self.scheduler.apply(plan, StepResult(plan.epoch, plan.step, tokens), now)
        for load in plan.loads:
            self.scheduler.handle_adapter_event(AdapterLoaded(load.key))
        ended = [event for event in events if isinstance(event, Ended)]
        self.open -= len(ended)
        return [event.first_token - event.arrival for event in ended if event.first_token]

    def report(self, now: float) -> None:
        """Take the sample of a second."""
        snapshot, views = self.scheduler.snapshot(), self.scheduler.adapters()
        stats = scaling_stats(snapshot, views, BATCH_SLOTS, now)
        self.reports.append({**stats, "ongoing": float(self.open)})

    def mean(self, name: str) -> float:
        """A signal over the look-back period."""
        return sum(each[name] for each in self.reports) / max(1, len(self.reports))


def arrivals(load: Sequence[Burst], seed: int) -> Iterator[tuple[float, Request]]:
    """Requests in the order of their times."""
    rng, now, numbers = random.Random(seed), 0.0, count()
    for part in load:
        end = now + part.seconds
        while (now := now + rng.expovariate(part.rate)) < end:
            number = next(numbers)
            prompt = [rng.randrange(50_000) for _ in range(part.prompt)]
            adapter = AdapterKey(1 + rng.randrange(part.adapters))
            stopping = Stopping(part.answer)
            yield now, Request(("r", number), prompt, Sampling(), stopping, adapter, arrival=now)
        now = end


class Cluster:
    """Replicas, a router that keeps adapters together, and Serve's rules of scaling."""

    def __init__(self, policy: Policy) -> None:
        """Start with one replica that is ready."""
        self._policy = policy
        self._numbers = count()
        self.replicas = [Replica(next(self._numbers), 0.0, 0.0)]
        self.first_tokens: list[float] = []
        self._wish_since: float | None = None
        self._wish = 0

    def run(self, load: Sequence[Burst], seed: int) -> None:
        """Play the load to its last request."""
        coming = arrivals(load, seed)
        following = next(coming, None)
        tick, now = 1.0, 0.0
        while following is not None or any(each.open for each in self.replicas):
            steps = min((each.done_at, each.number) for each in self.replicas)
            arrival = following[0] if following is not None else math.inf
            now = min(steps[0], arrival, tick)
            if now == arrival and following is not None:
                self._route(following[1], now)
                following = next(coming, None)
            elif now == steps[0]:
                self._step(steps[1], now)
            else:
                self._scale(now)
                tick += 1.0
        self.end = now

    @property
    def replica_seconds(self) -> float:
        """From each replica's start to its end."""
        ends = [self.end if each.ended is None else each.ended for each in self.replicas]
        return sum(end - each.born for end, each in zip(ends, self.replicas, strict=True))

    def _route(self, request: Request, now: float) -> None:
        """To the adapter's home, or to the least busy replica if its home is much busier."""
        ready = [each for each in self._present if each.ready <= now and not each.leaving]
        assert request.adapter is not None
        home = ready[hash((request.adapter * 2654435761) & 0xFFFF) % len(ready)]
        least = min(ready, key=lambda each: each.open)
        chosen = least if home.open > 2 * least.open + 8 else home
        chosen.open += 1
        chosen.scheduler.add(request, now)
        chosen.launch(now)

    def _step(self, number: int, now: float) -> None:
        replica = next(each for each in self.replicas if each.number == number)
        self.first_tokens += replica.finish(now)
        replica.launch(now)
        self._end_drained(replica, now)

    def _end_drained(self, replica: Replica, now: float) -> None:
        if replica.leaving and not replica.open and replica.ended is None:
            replica.ended = now

    @property
    def _present(self) -> list[Replica]:
        return [each for each in self.replicas if each.ended is None]

    def _scale(self, now: float) -> None:
        """Ask the policy, and follow it when it has wished the same for the delay."""
        staying = [each for each in self._present if not each.leaving]
        ready = [each for each in staying if each.ready <= now]
        for each in ready:
            each.report(now)
        names = ready[0].reports[-1]
        reports = {name: {each.number: each.mean(name) for each in ready} for name in names}
        ongoing = sum(reports.pop("ongoing").values())
        wanted, _ = self._policy(Context(len(ready), ongoing, reports))
        target = min(MOST_REPLICAS, max(1, math.ceil(wanted)))
        direction = (target > len(staying)) - (target < len(staying))
        if direction != self._wish or self._wish_since is None:
            self._wish, self._wish_since = direction, now
        delay = UPSCALE_DELAY_S if direction > 0 else DOWNSCALE_DELAY_S
        if direction and now - self._wish_since >= delay:
            self._wish_since = None
            self._resize(staying, target, now)

    def _resize(self, staying: list[Replica], target: int, now: float) -> None:
        for _ in range(target - len(staying)):
            self.replicas.append(Replica(next(self._numbers), now, now + START_S))
        for each in heapq.nlargest(len(staying) - target, staying, key=lambda each: each.born):
            each.leaving = True
            self._end_drained(each, now)


def by_requests(context: Context, target: float) -> tuple[float, dict[str, Any]]:
    """Serve's own policy: ongoing requests by their target."""
    return context.total_num_requests / target, {}


def measure(policy: Policy, load: Sequence[Burst] = LOAD, seed: int = 1) -> dict[str, float]:
    """Replica seconds and misses of one policy."""
    cluster = Cluster(policy)
    cluster.run(load, seed)
    times = sorted(cluster.first_tokens)
    missed = sum(1 for seconds in times if seconds > SLO_S)
    return {
        "replica_seconds": round(cluster.replica_seconds),
        "requests": len(times),
        "missed_percent": round(100 * missed / len(times), 1),
        "p99_s": round(times[int(0.99 * (len(times) - 1))], 2),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each setting."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--targets", type=float, nargs="*", default=[4, 6, 8, 12, 16, 24, 32])
    parser.add_argument("--queues", type=float, nargs="*", default=[0.1, 0.3, 1.0, 2.0])
    parser.add_argument("--seed", type=int, default=1)
    parsed = parser.parse_args(arguments)
    policies: dict[str, Policy] = {
        f"ongoing requests {target:g}": partial(by_requests, target=target)
        for target in parsed.targets
    }
    for wait in parsed.queues:
        policies[f"load, queue {wait:g} s"] = LoadPolicy(queue_seconds=wait)
    for name, policy in policies.items():
        print(json.dumps({"policy": name, **measure(policy, seed=parsed.seed)}), flush=True)


if __name__ == "__main__":
    main()

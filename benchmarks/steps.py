"""A driver's own record of a benchmark's case, read through Ray.

    python -m benchmarks.steps --address 127.0.0.1:6379

It prints {} when it has joined. Then it replies to each line of its standard input with one line of
JSON about the time since the last. It is a process of its own because a process can join only one
cluster, and one program may measure several servers, one after the other.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import psutil

from deployments.driver.usage import LoadSum
from deployments.observability.steps import StepRecord

PARTS = {
    "driver_cores": "ServeReplica:{application}:Driver",
    "ingress_cores": "ServeReplica:{application}:Ingress",
    "rank_cores": "RankActor",
}
"""How processes of each kind are called in their titles."""


class StepTimes:
    """The driver's steps, what its adapters did, and what the processes here took."""

    def __init__(self, application: str, address: str = "auto") -> None:
        """Join the cluster; `application` is the server's name in its yaml."""
        import ray
        from ray import serve

        ray.init(address=address, log_to_driver=False, logging_level="warning")
        self._driver = serve.get_deployment_handle("Driver", application)
        self._parts = {n: title.format(application=application) for n, title in PARTS.items()}
        self._cpu = cpu_seconds(self._parts)
        self._last = -1
        self._counts: dict[str, int] = {}
        self._loads: dict[str, LoadSum] = {}
        self._since = time.perf_counter()

    async def since_last(self) -> dict[str, Any]:
        """Count the steps since the last call, and those among them that only decode.

        captured_share: of the steps that were replays. device_idle_share: of the time since then,
        that between steps with nothing on the device; absent where the device does not measure it.
        adapters: how the counts of hits, misses, evictions, loads and their bytes grew. loads:
        mean milliseconds of each stage of an adapter's way. driver_cores, ingress_cores,
        rank_cores: CPU seconds a second of this machine's processes, all of a kind together.
        """
        seconds = time.perf_counter() - self._since
        steps = [s for s in await self._driver.steps.remote() if s.step > self._last]
        counts = asdict((await self._driver.snapshot.remote()).adapter_counts)
        loads = await self._driver.load_sums.remote()
        self._since = time.perf_counter()
        cpu = cpu_seconds(self._parts)
        busy, self._cpu = cores(self._cpu, cpu, seconds), cpu
        before, self._counts, self._loads = (self._counts, self._loads), counts, loads
        if not steps:
            return {}
        self._last = steps[-1].step
        grown = {name: count - before[0].get(name, 0) for name, count in counts.items()}
        means = mean_loads(before[1], loads)
        adapters = {name: count for name, count in grown.items() if count}
        return shares_of(steps, seconds) | {"adapters": adapters, "loads": means} | busy


def cpu_seconds(parts: Mapping[str, str]) -> dict[str, float]:
    """CPU seconds so far of the processes here with a part's mark in their titles."""
    spent: dict[str, float] = {}
    for process in psutil.process_iter(["cmdline", "cpu_times"]):
        title, times = " ".join(process.info["cmdline"] or ()), process.info["cpu_times"]
        for part, word in parts.items():
            if word in title and times is not None:
                spent[part] = spent.get(part, 0.0) + times.user + times.system
    return spent


def cores(
    before: Mapping[str, float], after: Mapping[str, float], seconds: float
) -> dict[str, float]:
    """CPU seconds a second of each part that is here."""
    return {part: round((cpu - before.get(part, 0.0)) / seconds, 2) for part, cpu in after.items()}


def mean_loads(before: Mapping[str, LoadSum], after: Mapping[str, LoadSum]) -> dict[str, float]:
    """Milliseconds of a load's stages, of those that came between."""
    means = {}
    for stage, sums in after.items():
        known = before.get(stage, LoadSum())
        if count := sums.count - known.count:
            means[stage] = round((sums.seconds - known.seconds) / count * 1e3, 2)
    return means


def shares_of(steps: Sequence[StepRecord], seconds: float) -> dict[str, Any]:
    """What these steps of `seconds` come to; at least one step."""
    found = {
        "steps": len(steps),
        "decode_steps": sum(s.num_tokens == s.num_rows for s in steps),
        "captured_share": round(sum(s.captured for s in steps) / len(steps), 4),
    }
    gaps = [s.idle_seconds for s in steps[1:] if s.idle_seconds is not None]
    return {**found, "device_idle_share": round(sum(gaps) / seconds, 4)} if gaps else found


async def answer(address: str, application: str) -> None:
    """Answer line by line until the input ends."""
    steps = StepTimes(application, address)
    await steps.since_last()
    print("{}", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await steps.since_last()), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Answer for one server."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--address", default="auto", help="of the cluster; default: the one here")
    parser.add_argument("--application", default="loray", help="its name in the server's yaml")
    parsed = parser.parse_args(arguments)
    asyncio.run(answer(parsed.address, parsed.application))


if __name__ == "__main__":
    main()

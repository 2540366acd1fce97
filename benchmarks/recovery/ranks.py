"""Recoveries and cold adapters of one engine under Ray, without HTTP and without Serve.

    python -m benchmarks.recovery.ranks /dev/shm/m8b --shape llama3-8b --adapters 32

Writes a model without weights and adapters of rank 16, starts Ray and the ranks, and prints JSON
lines. `cold`: first tokens of all adapters at once, never seen, then unloaded before; then of
single ones beside 60 streams. `kill`, before and after: SIGKILL of a rank under 16 streams:
`back_s` is from the blow to the first token of a request sent after it, `load_s` the new ranks' own
time.
"""

import argparse
import asyncio
import itertools
import json
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group

from benchmarks.serving import percentile
from benchmarks.workload import SHAPES, write_adapter, write_model
from configs.engine import EngineConfig
from configs.wire.adapters import AdapterReference, AdapterSource
from configs.wire.sampling import Sampling, Stopping
from deployments.contract import GenerateRequest, ReplyAddress, SequenceRequest, UnloadAdapter
from deployments.driver.engine import DriverEngine
from deployments.rank.group import RayRanks

NOWHERE = ReplyAddress("127.0.0.1", 1, "no listener")
RANK, STREAMS, BESIDE, SINGLE = 16, 16, 60, 6
LONG, QUIET_S, POLL_S = 800, 2.0, 0.02

Row = dict[str, Any]


class Stories:
    """Requests of one engine, by themselves and beside others."""

    def __init__(self, engine: DriverEngine) -> None:
        self._engine = engine
        self._numbers = itertools.count()

    async def tokens(self, count: int, adapter: str | None = None) -> float:
        """Seconds until a request has so many tokens."""
        sequence = SequenceRequest(
            [5, 6, 7, next(self._numbers) % 1000], Sampling(), Stopping(count)
        )
        reference = AdapterReference(AdapterSource.LOCAL, adapter) if adapter else None
        began = time.monotonic()
        name = f"r{next(self._numbers)}"
        await self._engine.generate(GenerateRequest(name, [sequence], reference), NOWHERE)
        return time.monotonic() - began

    async def at_once(self, names: Sequence[str]) -> list[float]:
        """First tokens of all these adapters."""
        return await asyncio.gather(*(self.tokens(1, name) for name in names))

    async def unload(self, names: Sequence[str]) -> None:
        """Have host and device forget them; their files' digests stay known."""
        for name in names:
            reference = AdapterReference(AdapterSource.LOCAL, name)
            report = await self._engine.adapters(UnloadAdapter(reference))
            assert report.failure is None, report.failure


async def cold(stories: Stories, names: Sequence[str]) -> AsyncIterator[Row]:
    """All adapters at once, then single ones beside streams."""
    yield {"case": "cold", "never_seen": True, **quantiles(await stories.at_once(names))}
    for _ in range(3):
        await stories.unload(names)
        yield {"case": "cold", "never_seen": False, **quantiles(await stories.at_once(names))}
    await stories.unload(names)
    streams = [asyncio.create_task(stories.tokens(LONG)) for _ in range(BESIDE)]
    await asyncio.sleep(QUIET_S)
    firsts = [await stories.tokens(1, name) for name in names[:SINGLE]]
    alive = sum(not stream.done() for stream in streams)
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    yield {"case": "cold", "beside": alive, **quantiles(firsts)}


async def kill(engine: DriverEngine, stories: Stories) -> Row:
    """SIGKILL of a rank under streams."""
    streams = [asyncio.create_task(stories.tokens(LONG)) for _ in range(STREAMS)]
    await asyncio.sleep(QUIET_S)
    rebuilds, began = engine.num_rebuilds, time.monotonic()
    os.kill(engine.ranks[0].pid, signal.SIGKILL)
    await asyncio.to_thread(until_lost, engine)
    await stories.tokens(1)
    back = time.monotonic() - began
    assert engine.num_rebuilds > rebuilds, "the ranks were not lost"
    report = engine.ranks[0]
    await asyncio.gather(*streams)
    return {
        "case": "kill",
        "back_s": round(back, 2),
        "load_s": round(report.load_seconds, 2),
        "graphs_left": report.graphs_left,
        "streams_end_s": round(time.monotonic() - began, 2),
    }


def until_lost(engine: DriverEngine) -> None:
    """Wait until the engine knows that its ranks are gone."""
    while engine.healthy:
        time.sleep(POLL_S)


def quantiles(seconds: Sequence[float]) -> Row:
    """Of first tokens, in milliseconds."""
    found = {f"p{q}_ms": percentile(seconds, q / 100) for q in (50, 99)}
    return {"adapters": len(seconds), **found}


async def measure(config: EngineConfig, folder: Path, names: Sequence[str], gpus: int) -> None:
    """Start the engine, and print a line for each case."""
    rank = {"CPU": 1.0, "GPU": 1.0} if gpus else {"CPU": 0.5}
    bundles = placement_group([{"CPU": 0.001}, *[rank] * config.tensor_parallel])
    ray.get(bundles.ready())
    group = RayRanks(config, str(folder), bundles)
    began = time.monotonic()
    engine = DriverEngine(config, folder, group)
    await engine.start()
    try:
        row = {"case": "start", "seconds": round(time.monotonic() - began, 2)}
        print(json.dumps({**row, "load_s": round(engine.ranks[0].load_seconds, 2)}), flush=True)
        stories = Stories(engine)
        print(json.dumps(await kill(engine, stories)), flush=True)
        async for row in cold(stories, names):
            print(json.dumps(row), flush=True)
        print(json.dumps(await kill(engine, stories)), flush=True)
    finally:
        await engine.stop()


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the files, start Ray, measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--engine", type=json.loads, default={}, help="settings, as JSON")
    parsed = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    names = [f"a{i}" for i in range(parsed.adapters)]
    write_model(parsed.folder, parsed.shape, layers=parsed.layers)
    with ThreadPoolExecutor() as pool:
        for number, name in enumerate(names):
            pool.submit(write_adapter, parsed.folder / name, parsed.shape, RANK, number)
    config = EngineConfig.model_validate(
        {
            "model": {"id": str(parsed.folder), "load_format": "dummy"},
            "tensor_parallel": parsed.tensor_parallel,
            "limits": {"max_running": 64, "max_total_tokens": 4096},
            "adapters": {
                "default_source": "local",
                "local_roots": [str(parsed.folder)],
                "max_rank": RANK,
                "device_pages": 64,
                "host_bytes": 2**32,
            },
            "recovery": {"standby": True},
            **parsed.engine,
        }
    )
    ray.init(logging_level="warning", include_dashboard=False)
    try:
        gpus = int(ray.cluster_resources().get("GPU", 0))
        asyncio.run(measure(config, parsed.folder, names, gpus))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()

"""Recoveries and cold adapters of one engine under Ray, without HTTP and without Serve.

    python -m benchmarks.recovery.ranks /dev/shm/m8b --shape llama3-8b --adapters 32

Writes a model (`--weights`: with random weights) and adapters of rank 16, starts Ray and the ranks,
and prints JSON lines. `cold`: first tokens of all adapters at once, never seen, then unloaded
before; then of single ones beside 60 streams, with the streams' gaps before and meanwhile. `kill`,
twice: SIGKILL of a rank under 16 streams: `back_s` is from the blow to the first token of a request
sent after it, `load_s` the new ranks' own time. Each phase is announced; one that takes too long is
given up, with the ends of the logs.
"""

import argparse
import asyncio
import itertools
import json
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group

from benchmarks.loading import write_weights
from benchmarks.serving import percentile
from benchmarks.workload import SHAPES, WRITERS, write_adapter, write_model
from configs.engine import EngineConfig
from configs.wire.adapters import AdapterReference, AdapterSource
from configs.wire.sampling import Sampling, Stopping
from deployments.contract import (
    GenerateRequest,
    ReplyAddress,
    SequenceRequest,
    TokenFrame,
    UnloadAdapter,
)
from deployments.driver.engine import DriverEngine
from deployments.frames import FrameReceiver
from deployments.rank.group import RayRanks

RANK, STREAMS, BESIDE, SINGLE = 16, 16, 60, 6
LONG, QUIET_S, POLL_S = 1500, 2.0, 0.02
STANDBY_S = 8.0
"""How long standby processes are given to be ready."""
LOGS = Path("/tmp/ray/session_latest/logs")

logger = logging.getLogger("loray.recovery")

Row = dict[str, Any]


class Stories:
    """Requests of one engine, by themselves and beside others."""

    def __init__(self, engine: DriverEngine) -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self._receiver = FrameReceiver(self._deliver)
        self._address: ReplyAddress | None = None
        # When the last frame of many streams came, and the times between such frames.
        self._last: float | None = None
        self._gaps: list[float] = []

    def gaps(self) -> list[float]:
        """Seconds between the tokens of many streams since the last call."""
        gaps, self._gaps = self._gaps, []
        return gaps

    async def close(self) -> None:
        """Listen no longer."""
        await self._receiver.close()

    def _deliver(self, frame: TokenFrame) -> None:
        if len(frame.runs) > BESIDE // 2:
            now = time.monotonic()
            if self._last is not None:
                self._gaps.append(now - self._last)
            self._last = now

    async def tokens(self, count: int, adapter: str | None = None) -> float:
        """Seconds until a request has so many tokens."""
        sequence = SequenceRequest(
            [5, 6, 7, next(self._numbers) % 1000], Sampling(), Stopping(count)
        )
        reference = AdapterReference(AdapterSource.LOCAL, adapter) if adapter else None
        if self._address is None:
            self._address = await self._receiver.start("127.0.0.1")
        began = time.monotonic()
        name = f"r{next(self._numbers)}"
        await self._engine.generate(GenerateRequest(name, [sequence], reference), self._address)
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
    await stories.unload(names)
    yield {"case": "cold", "never_seen": False, **quantiles(await stories.at_once(names))}
    await stories.unload(names)
    streams = [asyncio.create_task(stories.tokens(LONG)) for _ in range(BESIDE)]
    await asyncio.sleep(QUIET_S)
    stories.gaps()  # those of the prompts
    await asyncio.sleep(QUIET_S)
    quiet = stories.gaps()
    firsts = [await stories.tokens(1, name) for name in names[:SINGLE]]
    meanwhile = stories.gaps()
    alive = sum(not stream.done() for stream in streams)
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    found = {"before": quiet, "meanwhile": meanwhile}
    gaps = {
        f"gap_p{q}_{when}_ms": percentile(seconds, q / 100)
        for when, seconds in found.items()
        for q in (50, 99, 100)
    }
    yield {"case": "cold", "beside": alive, **quantiles(firsts), **gaps}


async def kill(engine: DriverEngine, stories: Stories) -> Row:
    """SIGKILL of a rank under streams."""
    streams = [asyncio.create_task(stories.tokens(LONG // 4)) for _ in range(STREAMS)]
    await asyncio.sleep(QUIET_S)
    rebuilds, began = engine.num_rebuilds, time.monotonic()
    os.kill(engine.ranks[0].pid, signal.SIGKILL)
    await asyncio.to_thread(until_lost, engine)
    await stories.tokens(1)
    back = time.monotonic() - began
    assert engine.num_rebuilds > rebuilds, "the ranks were not lost"
    times = times_of(engine)
    await asyncio.gather(*streams)
    return {
        "case": "kill",
        "back_s": round(back, 2),
        **times,
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


async def measure(
    config: EngineConfig, folder: Path, written: Sequence[Future[None]], gpus: int
) -> None:
    """Start the engine, and print a line for each case; written: when an adapter is there."""
    rank = {"CPU": 1.0, "GPU": 1.0} if gpus else {"CPU": 0.5}
    bundles = placement_group([{"CPU": 0.001}, *[rank] * config.tensor_parallel])
    ray.get(bundles.ready(), timeout=60)
    engine = DriverEngine(config, folder, RayRanks(config, str(folder), bundles))
    began = time.monotonic()
    try:
        with announced("start"):
            await engine.start()
        seconds, began = round(time.monotonic() - began, 2), time.monotonic()
        show({"case": "start", "seconds": seconds, **times_of(engine)})
        stories = Stories(engine)
        with announced("one request"):
            show({"case": "first token", "seconds": await stories.tokens(1)})
        with announced("adapters' files"):
            await asyncio.gather(*map(asyncio.wrap_future, written))
        with announced("kill"):
            await asyncio.sleep(max(0.0, began + STANDBY_S - time.monotonic()))
            show(await kill(engine, stories))
        with announced("cold"):
            async for row in cold(stories, [f"a{number}" for number in range(len(written))]):
                show(row)
        with announced("kill"):
            show(await kill(engine, stories))
        await stories.close()
    finally:
        with announced("end"):
            await engine.stop()


def show(row: Row) -> None:
    """Print a row, at once."""
    print(json.dumps(row), flush=True)


def times_of(engine: DriverEngine) -> Row:
    """What the ranks say of their start."""
    report = engine.ranks[0]
    return {"load_s": round(report.load_seconds, 2), "graphs_left": report.graphs_left}


@contextmanager
def announced(phase: str) -> Iterator[None]:
    """Say when a phase begins and ends; a fault comes with the ends of the ranks' logs."""
    began = time.monotonic()
    logger.info("%s begins", phase)
    try:
        yield
    except BaseException as error:
        spent = time.monotonic() - began
        logger.error("%s: %r after %.1f s", phase, error, spent)
        show_logs()
        raise
    logger.info("%s: %.1f s", phase, time.monotonic() - began)


def show_logs(lines: int = 6) -> None:
    """Print the last lines of the processes that Ray has started."""
    for path in sorted(LOGS.glob("worker-*.err")):
        if last := path.read_text(errors="replace").splitlines()[-lines:]:
            print(path.name, *last, sep="\n  ", flush=True)


def settings(parsed: argparse.Namespace) -> EngineConfig:
    """The engine's: a bank of rank 16, standby processes."""
    return EngineConfig.model_validate(
        {
            "model": {
                "id": str(parsed.folder),
                **({} if parsed.weights else {"load_format": "dummy"}),
            },
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


def write(parsed: argparse.Namespace) -> None:
    """Write the model."""
    if parsed.weights:
        write_weights(parsed.folder, parsed.shape, parsed.layers, "bfloat16")
    else:
        write_model(parsed.folder, parsed.shape, layers=parsed.layers)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the files, start Ray, measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--weights", action="store_true", help="write and load random weights")
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--engine", type=json.loads, default={}, help="settings, as JSON")
    parsed = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    config = settings(parsed)
    with ThreadPoolExecutor(1) as beside:
        made = beside.submit(write, parsed)
        with announced("Ray's start"):
            ray.init(logging_level="warning", include_dashboard=False)
        with announced("the model's files"):
            made.result()
    # Beside the ranks' start, which compiles kernels.
    with ThreadPoolExecutor(WRITERS) as pool:
        written = [
            pool.submit(write_adapter, parsed.folder / f"a{number}", parsed.shape, RANK, number)
            for number in range(parsed.adapters)
        ]
        try:
            gpus = int(ray.cluster_resources().get("GPU", 0))
            asyncio.run(measure(config, parsed.folder, written, gpus))
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()

"""A long run on a CPU: requests over hundreds of adapters, some of which are cancelled midway.

    python -m benchmarks.soak --requests 10000 --adapters 500

One process: an engine over ranks as threads, without HTTP. Requests over random adapters, and
over merges of two, come and a part of them is cancelled after a random time; the device holds few
adapters, the host tier a part of the others, so everything is staged, filled, evicted and dropped
again and again. At the end nothing may be left: no request, block, adapter in use, pin, held file,
task, thread, open file, or temporary file; and all pages, slots and chunks must be counted once
each. Exits with 1 otherwise.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.workload import write_adapter, write_model
from configs.adapters import AdaptersConfig
from configs.engine import CacheConfig, Device, EngineConfig, LimitsConfig
from configs.model import LoadFormat, ModelConfig
from configs.wire.adapters import AdapterReference, AdapterSource
from configs.wire.merging import MergeRule
from configs.wire.sampling import Sampling, Stopping
from deployments.contract import GenerateRequest, ReplyAddress, SequenceRequest
from deployments.driver.engine import DriverEngine
from deployments.rank.local import LocalRanks
from scheduler.events import AdapterUnloaded, Event
from scheduler.scheduler import Scheduler
from scheduler.snapshot import Snapshot

SHAPE, RANKS = "tiny", (4, 16, 8, 3)
NOWHERE = ReplyAddress("", 0, "")


@dataclass
class AnswerTexts:
    """How requests ended: by the name of the ending, or "cancelled"; what looked wrong."""

    endings: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def engine_config(options: argparse.Namespace, folder: Path) -> EngineConfig:
    """An engine in which adapters push each other out of every tier."""
    return EngineConfig(
        model=ModelConfig(id=str(folder), load_format=LoadFormat.DUMMY),
        tensor_parallel=options.tensor_parallel,
        device=Device.CPU,
        cache=CacheConfig(num_blocks=256),
        limits=LimitsConfig(max_step_tokens=256, max_running=16, max_queued=10**6),
        adapters=AdaptersConfig(
            default_source=AdapterSource.LOCAL,
            local_roots=(str(folder / "adapters"),),
            device_pages=16,
            max_device_adapters=8,
            max_rank=16,
            host_bytes=options.host_bytes,
        ),
    )


def write(options: argparse.Namespace, folder: Path) -> None:
    """A model and its adapters, of mixed ranks and targets."""
    write_model(folder, SHAPE)
    for i in range(options.adapters):
        targets = ("q_proj", "v_proj") if i % 3 else ()
        write_adapter(folder / "adapters" / f"a{i}", SHAPE, RANKS[i % len(RANKS)], i, targets)


async def one(
    engine: DriverEngine, options: argparse.Namespace, index: int, texts: AnswerTexts
) -> None:
    """A request over a random adapter, or none; perhaps its client leaves."""
    chooser = random.Random(index)
    reference = None if chooser.random() < 0.05 else _reference(options, chooser)
    prompt = [chooser.randrange(2, 2000) for _ in range(chooser.randrange(1, 24))]
    sequences = [SequenceRequest(prompt, Sampling(), Stopping(chooser.randrange(1, 16)))]
    request = GenerateRequest(f"r{index}", sequences, reference)
    task = asyncio.create_task(engine.generate(request, NOWHERE))
    if chooser.random() < options.cancelled:
        await asyncio.sleep(chooser.random() * 0.2)
        task.cancel()
    with suppress(asyncio.CancelledError):
        (outcome,) = (await task).sequences
        texts.endings[type(outcome.ending).__name__] += 1
        if type(outcome.ending).__name__ != "Finished":
            texts.wrong.append(f"{request.id}: {outcome.ending}")
    if task.cancelled():
        texts.endings["cancelled"] += 1


def _reference(options: argparse.Namespace, chooser: random.Random) -> AdapterReference:
    """Some adapters more often than others, alone or two of them merged."""
    merged = chooser.random() < options.merged
    parts = tuple(
        AdapterReference(AdapterSource.LOCAL, f"a{int(options.adapters * chooser.random() ** 2)}")
        for _ in range(2 if merged else 1)
    )
    if not merged:
        return parts[0]
    rule = MergeRule((0.5, chooser.choice((0.5, 1.0))))
    name = ",".join(part.id for part in parts)
    return AdapterReference(AdapterSource.LOCAL, name, parts=parts, rule=rule)


async def run(engine: DriverEngine, options: argparse.Namespace, texts: AnswerTexts) -> None:
    """All requests, so many at once."""
    waiting = iter(range(options.requests))

    async def client() -> None:
        for index in waiting:
            await one(engine, options, index, texts)
            if index % 1000 == 999:
                print(json.dumps({"requests": index + 1, **handles()}), flush=True)

    await asyncio.gather(*(client() for _ in range(options.concurrency)))


def handles() -> dict[str, int]:
    """What this process holds of the system."""
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "temporary": len(os.listdir(tempfile.gettempdir())),
    }


async def quiet(engine: DriverEngine) -> None:
    """Wait until the last plan was applied and the last load was reported."""
    for _ in range(600):
        snapshot = await engine.snapshot()
        busy = snapshot.queued + snapshot.running + snapshot.draining + snapshot.plans_in_flight
        if not busy:
            return
        await asyncio.sleep(0.1)


async def left_behind(engine: DriverEngine, group: LocalRanks) -> list[str]:
    """What is left in the engine while it has no requests, and should not be."""
    await quiet(engine)
    snapshot, views = await engine.snapshot(), await engine.adapter_views()
    found = [f"{count} {what}" for what, count in _held(snapshot).items() if count]
    found += [f"adapter {v.key} in use" for v in views if v.running or v.waiting or v.pinned]
    held = [known.adapter.name for known in engine._directory._known.values() if known.holders]
    found += [f"the files of {name} are held" for name in held]
    found += await broken(engine, group)
    for view in views:
        engine._handle.post(partial(_unload, AdapterUnloaded(view.key)))
    for _ in range(100):  # until the plan with the drops is applied
        tiers = (await engine.snapshot()).tiers
        if not tiers.host_bytes and not tiers.device_adapters:
            break
        await asyncio.sleep(0.1)
    else:
        found.append(f"after everything was unloaded: {tiers}")
    return found + await broken(engine, group)


def _unload(event: AdapterUnloaded, scheduler: Scheduler, now: float) -> Sequence[Event]:
    return scheduler.handle_adapter_event(event)


async def broken(engine: DriverEngine, group: LocalRanks) -> list[str]:
    """Invariants of the scheduler and of every rank that do not hold."""
    problems: list[str] = []

    def check(scheduler: Scheduler, now: float) -> Sequence[Event]:
        try:
            scheduler.check()
            group.check()
        except AssertionError as error:
            problems.append(f"an invariant is broken: {error}")
        return []

    engine._handle.post(check)
    await engine.snapshot()
    return problems


def lingering(patience_s: float = 10.0) -> list[str]:
    """Threads that do not end by themselves."""
    deadline = time.monotonic() + patience_s
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    alive = [thread.name for thread in threading.enumerate() if thread.name != "MainThread"]
    return [f"threads: {alive}"] if alive else []


def _held(snapshot: Snapshot) -> dict[str, int]:
    return {
        "queued requests": snapshot.queued,
        "running requests": snapshot.running,
        "draining requests": snapshot.draining,
        "blocks": snapshot.num_blocks - snapshot.free_blocks,
    }


async def play(options: argparse.Namespace, folder: Path) -> list[str]:
    """Play it all; returns what is wrong."""
    texts, before = AnswerTexts(), handles()
    config = engine_config(options, folder)
    group = LocalRanks(config)
    engine = DriverEngine(config, folder, group)
    await engine.start()
    began = time.monotonic()
    await run(engine, options, texts)
    seconds = time.monotonic() - began
    wrong = texts.wrong + await left_behind(engine, group)
    counts = asdict((await engine.snapshot()).adapter_counts)
    tasks = len(asyncio.all_tasks()) - 1
    await engine.stop()
    after = handles()
    row = {"seconds": round(seconds, 1), "endings": texts.endings, "adapters": counts}
    print(json.dumps({**row, "before": before, "after": after}), flush=True)
    wrong += [f"{tasks} tasks"] if tasks else []
    for what in ("files", "temporary"):
        if after[what] > before[what]:
            wrong.append(f"{after[what] - before[what]} {what} more than before")
    return wrong


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the story in a folder of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--adapters", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=48)
    parser.add_argument("--cancelled", type=float, default=0.3, help="share of the requests")
    parser.add_argument("--merged", type=float, default=0.05, help="share of the requests")
    parser.add_argument("--host-bytes", type=int, default=2**23)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parsed = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder) / "temporary"
        temporary.mkdir()
        tempfile.tempdir = str(temporary)
        write(parsed, Path(folder))
        wrong = asyncio.run(play(parsed, Path(folder))) + lingering()
    for line in wrong[:20]:
        print(line, file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

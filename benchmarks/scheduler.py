"""What a step costs the driver: schedule, encode, send, apply, over rows that decode.

    python -m benchmarks.scheduler --rows 1 64 256 1000 --adapters 0 32 10000 --chart growth.png

CPU microseconds of the driver's thread, medians, two plans in flight, results made up. `known`
adapters lie in the host tier; requests go to as many of them as the device holds. Plans are sent
to two sockets that another process reads. One JSON line a case.
"""

import argparse
import json
import multiprocessing
import platform
import socket
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from configs.wire.adapters import AdapterKey, AdapterShape
from configs.wire.plan import Capacity, StepPlan, StepResult
from configs.wire.sampling import Sampling, Stopping
from deployments.rank.messages import RunStep, StepDone
from deployments.rank.transport import Channel
from scheduler.admission.limits import Limits
from scheduler.events import AdapterLoaded, AdapterStaged
from scheduler.request import Request
from scheduler.scheduler import Scheduler

PROMPT, BLOCK_SIZE, RANKS, MICROSECONDS = 512, 16, 2, 1e6
DEVICE_SLOTS = 64
"""Adapters on the device: the default of adapters.max_device_adapters."""

PARTS = ("schedule", "encode", "send", "apply")


@dataclass
class Costs:
    """Seconds of CPU of each part, one entry a step."""

    schedule: list[float] = field(default_factory=list)
    encode: list[float] = field(default_factory=list)
    send: list[float] = field(default_factory=list)
    apply: list[float] = field(default_factory=list)

    def medians(self) -> dict[str, int]:
        """Microseconds of each part, and of a step."""
        found = {f"{part}_us": statistics.median(getattr(self, part)) for part in PARTS}
        found["step_us"] = sum(found.values())
        return {name: round(seconds * MICROSECONDS) for name, seconds in found.items()}


class Readers:
    """Another process that takes what is sent, as ranks do."""

    def __init__(self) -> None:
        """Start it; every channel is read to its end."""
        pairs = [socket.socketpair() for _ in range(RANKS)]
        self.channels = [Channel(ours) for ours, _ in pairs]
        theirs = [end for _, end in pairs]
        self._process = multiprocessing.get_context("fork").Process(
            target=_drain, args=(theirs, [ours for ours, _ in pairs]), daemon=True
        )
        self._process.start()
        for end in theirs:
            end.close()

    def close(self) -> None:
        """Hang up and wait for its end."""
        for channel in self.channels:
            channel.close()
        self._process.join()


def _drain(ends: list[socket.socket], foreign: list[socket.socket]) -> None:
    for sock in foreign:
        sock.close()
    channels = [Channel(end) for end in ends]
    while all(channel.receive() is not None for channel in channels):
        pass


def loaded(rows: int, known: int, steps: int) -> Scheduler:
    """A scheduler that knows so many adapters, with `rows` requests over those on the device."""
    longest = PROMPT + 2 * steps + 64
    capacity = Capacity(
        num_blocks=rows * (longest // BLOCK_SIZE + 2),
        block_size=BLOCK_SIZE,
        projections=("qkv", "o", "gate_up", "down"),
        adapter_pages=2 * DEVICE_SLOTS,
        adapter_slots=DEVICE_SLOTS,
        host_bytes=2**40,
        max_total_tokens=longest,
    )
    most = max(rows, known)
    limits = Limits(max_step_tokens=4096, max_running=rows, max_queued=most)
    scheduler = Scheduler(limits, capacity)
    for i in range(known):
        scheduler.add(_request(("known", i), AdapterKey(1 + i), 1), 0.0)
    while keys := scheduler.to_stage():
        for key in keys:
            scheduler.handle_adapter_event(AdapterStaged(key, AdapterShape((2,) * 4, 1)))
    for i in range(known):
        scheduler.cancel(("known", i))
    used = min(known, DEVICE_SLOTS)
    for i in range(rows):
        adapter = AdapterKey(1 + i % used) if used else None
        scheduler.add(_request(("r", i), adapter, longest - PROMPT), 0.0)
    return scheduler


def _request(request_id: tuple[str, int], adapter: AdapterKey | None, length: int) -> Request:
    prompt = [(request_id[1] * 7919 + j) % 50_000 for j in range(PROMPT)]
    return Request(request_id, prompt, Sampling(), Stopping(length), adapter, arrival=0.0)


def measure(rows: int, known: int, steps: int) -> dict[str, object]:
    """Prefill everything, then time `steps` steps in which every row decodes."""
    scheduler = loaded(rows, known, steps)
    readers = Readers()
    encoder, costs = msgspec.msgpack.Encoder(), Costs()
    flying: deque[StepPlan] = deque()
    size = 0
    while len(costs.apply) < steps:
        began = time.thread_time()
        plan = scheduler.schedule(0.0)
        scheduled = time.thread_time()
        payload = encoder.encode(RunStep(plan))
        encoded = time.thread_time()
        for channel in readers.channels:
            channel.send(payload)
        sent = time.thread_time()
        if not plan.empty:
            flying.append(plan)
            if len(flying) < 2:
                continue
        done = flying.popleft()
        tokens = [3] * sum(row.samples for row in done.rows)
        reply = encoder.encode(StepDone(StepResult(done.epoch, done.step, tokens)))
        applying = time.thread_time()
        result = msgspec.msgpack.decode(reply, type=StepDone).result
        scheduler.apply(done, result, 0.0)
        applied = time.thread_time()
        for load in done.loads:
            scheduler.handle_adapter_event(AdapterLoaded(load.key))
        if len(done.rows) == rows and all(row.length == 1 for row in done.rows):
            size = len(payload)
            costs.schedule.append(scheduled - began)
            costs.encode.append(encoded - scheduled)
            costs.send.append(sent - encoded)
            costs.apply.append(applied - applying)
    readers.close()
    return {
        "rows": rows,
        "known_adapters": known,
        **costs.medians(),
        "plan_bytes": size,
        "python": platform.python_version(),
    }


def draw(cases: Sequence[dict[str, object]], file: Path) -> None:
    """Chart a step's cost over rows and over known adapters; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for index, (axis, other) in enumerate(
        (("rows", "known_adapters"), ("known_adapters", "rows")), start=1
    ):
        axes = figure.add_subplot(1, 2, index)
        for value in sorted({int(str(case[other])) for case in cases}):
            line = [case for case in cases if case[other] == value]
            label = f"{value} {other.replace('_', ' ')}"
            xs, ys = [int(str(c[axis])) for c in line], [int(str(c["step_us"])) for c in line]
            axes.plot(xs, ys, marker="o", label=label)
        axes.axhline(1000, color="grey", linestyle=":")
        axes.set_xscale("symlog", base=10)  # there may be no adapter at all
        axes.set_xlim(left=0)
        axes.set_yscale("log")
        axes.set_xlabel(axis.replace("_", " "))
        axes.set_ylabel("driver's CPU a step, µs")
        axes.legend(fontsize="x-small")
    figure.savefig(file, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each number of rows and of known adapters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256, 1000])
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 32, 1000, 10_000])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--chart", type=Path, help="write a PNG of the growth here")
    parsed = parser.parse_args(arguments)
    cases = []
    for rows in parsed.rows:
        for known in parsed.adapters:
            cases.append(measure(rows, known, parsed.steps))
            print(json.dumps(cases[-1]), flush=True)
    if parsed.chart is not None:
        draw(cases, parsed.chart)


if __name__ == "__main__":
    main()

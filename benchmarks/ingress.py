"""The output path alone: driver with a timed rank, Serve, HTTP, client; no model computes.

    python -m benchmarks.ingress --streams 8 64 256 --step-ms 5 --ingress 2

Starts Ray here, as `loray serve` does, with the demo's tokenizer. One JSON line a case: tokens a
second, what HTTP and Serve add to the time to the first token (the client's median less the
driver's own), and CPU microseconds a token by process. With --step-ms 0 ranks reply at once.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from configs.engine import Device, EngineConfig, LimitsConfig
from configs.env import export_throughput_mode, proxy_mode
from configs.model import ModelConfig
from configs.serve import ServeConfig
from configs.wire.plan import Capacity

MODEL = Path(__file__).parent.parent / "configs/demo/model"
HOST, PORT = "127.0.0.1", 8011
TOKENS = range(270, 510)
"""Ids of words and parts of words in the vocabulary of the demo."""

MICROSECONDS, MILLISECONDS, GOLDEN_RATIO = 1e6, 1e3, 0.6180339887
PROCESSES = {"ServeReplica:default:Ingress": "ingress", "ServeReplica:default:Driver": "driver"}


@dataclass(frozen=True)
class IngressCase:
    """One closed loop: streams at once, requests in all, tokens of an answer.

    spread: answers are longer or shorter by up to this share, so that they do not end, and the
    next requests come, all at once.
    """

    streams: int
    requests: int
    length: int
    spread: float = 0.0

    def lengths(self) -> list[int]:
        """Tokens of each answer: evenly over the spread, in a scattered order."""
        shares = [(i * GOLDEN_RATIO) % 1.0 * 2.0 - 1.0 for i in range(self.requests)]
        return [round(self.length * (1.0 + self.spread * share)) for share in shares]


@dataclass
class IngressResult:
    """What clients saw; seconds."""

    tokens: int = 0
    chunks: int = 0
    first: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


async def ask(length: int, seen: IngressResult) -> None:
    """One request on a connection of its own; chunks are counted, not parsed."""
    body = request_of(length)
    reader, writer = await asyncio.open_connection(HOST, PORT)
    began = time.perf_counter()
    writer.write(body)
    status = await reader.readuntil(b"\r\n\r\n")
    chunks, tail, last = 0, b"", b""
    if b" 200 " not in status.split(b"\r\n", 1)[0]:
        seen.failed.append(status.decode())
        writer.close()
        return
    while not tail.endswith(b"[DONE]\n\n\r\n0\r\n\r\n"):
        data = await reader.read(1 << 16)
        if not data:
            break
        if not chunks:
            seen.first.append(time.perf_counter() - began)
        chunks += data.count(b'"text"')
        last, tail = last[-600:] + data, (tail + data)[-32:]
    writer.close()
    usage = last.rpartition(b'"completion_tokens":')[2]
    count = int(usage.partition(b",")[0] or 0)
    seen.tokens += count
    seen.chunks += chunks
    if count != length:
        seen.failed.append(f"{count} tokens instead of {length}")


def request_of(length: int) -> bytes:
    """A streamed completion of so many tokens, as it goes over the wire."""
    payload = {
        "model": "base",
        "prompt": "What is the capital of France?",
        "max_tokens": length,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    text = json.dumps(payload).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(text)}\r\nConnection: close\r\n\r\n".encode() + text


async def play(case: IngressCase) -> tuple[IngressResult, float]:
    """Run a case; returns what was seen and its seconds."""
    seen = IngressResult()
    waiting = iter(case.lengths())

    async def client() -> None:
        for length in waiting:
            await ask(length, seen)

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(case.streams)))
    return seen, time.perf_counter() - began


def cpu_seconds() -> dict[str, float]:
    """CPU time so far of everything that Ray runs here, by kind; `client` is this process."""
    found: dict[str, float] = defaultdict(float)
    this = psutil.Process()
    for process in [this, *this.children(recursive=True), *_haproxies()]:
        try:
            times, name = process.cpu_times(), _kind(process, this)
        except psutil.NoSuchProcess:
            continue
        found[name] += times.user + times.system
    return found


def _haproxies() -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["name"]) if p.info["name"] == "haproxy"]


def _kind(process: psutil.Process, this: psutil.Process) -> str:
    if process.pid == this.pid:
        return "client"
    command = " ".join(process.cmdline()) or process.name()
    for mark, kind in PROCESSES.items():
        if mark in command:
            return kind
    if "haproxy" in process.name():
        return "haproxy"
    return "rank" if "benchmarks.timed_ranks" in command else "the rest of Ray"


async def measure(case: IngressCase, driver: Any) -> dict[str, object]:
    """Play a case; returns its row. driver: a handle of the deployment."""
    await driver.take_firsts.remote()
    num_before, lead_before = await driver.leads.remote()
    before = cpu_seconds()
    seen, seconds = await play(case)
    after = cpu_seconds()
    own = await driver.take_firsts.remote()
    num_leads, lead_s = await driver.leads.remote()
    num_leads, lead_s = num_leads - num_before, lead_s - lead_before
    tokens = max(seen.tokens, 1)
    spent = {name: (after[name] - before.get(name, 0.0)) for name in sorted(after)}
    first, inside = statistics.median(seen.first), statistics.median(own)
    return {
        "streams": case.streams,
        "requests_per_s": round(case.requests / seconds, 1),
        "tokens_per_s": round(seen.tokens / seconds),
        "tokens_per_chunk": round(tokens / max(seen.chunks, 1), 2),
        "ttft_p50_ms": round(first * MILLISECONDS, 2),
        "ttft_added_p50_ms": round((first - inside) * MILLISECONDS, 2),
        "early_submits": num_leads,
        "early_submit_mean_ms": round(lead_s / max(num_leads, 1) * MILLISECONDS, 2),
        "cpu_us_per_token": {n: round(s / tokens * MICROSECONDS, 1) for n, s in spent.items()},
        "cores_busy": {n: round(s / seconds, 2) for n, s in spent.items()},
        "failed": len(seen.failed),
        "first_failure": seen.failed[:1],
    }


def config_of(max_running: int) -> ServeConfig:
    """The application's config; it reserves no CPUs, so that it fits any machine."""
    engine = EngineConfig(
        model=ModelConfig(id=str(MODEL), name="base"),
        device=Device.CPU,
        limits=LimitsConfig(max_running=max_running, max_step_tokens=8192),
    )
    return ServeConfig(engine=engine, driver_cpus=0, rank_cpus=0, ingress_cpus=0)


def deploy(parsed: argparse.Namespace) -> None:
    """Start the application."""
    from ray import serve

    from benchmarks.ingress_driver import TimedDriver
    from deployments.app import routing
    from deployments.ingress.deployment import IngressDeployment

    config = config_of(max(parsed.streams))
    capacity = Capacity(
        num_blocks=max(parsed.streams) * 300,
        block_size=16,
        projections=("q_proj",),
        adapter_pages=1,
        adapter_slots=1,
        host_bytes=1,
        max_total_tokens=4096,
    )
    timed = (capacity, parsed.step_ms / MILLISECONDS, TOKENS)
    options = {"ray_actor_options": {"num_cpus": 0}, "max_ongoing_requests": 4096}
    driver = serve.deployment(TimedDriver, name="Driver").options(
        request_router_config=routing(), **options
    )
    ingress = serve.deployment(IngressDeployment, name="Ingress").options(
        num_replicas=parsed.ingress, **options
    )
    serve.start(http_options={"host": HOST, "port": PORT})
    serve.run(ingress.bind(config, driver.bind(config, *timed)), name="default")


async def play_all(parsed: argparse.Namespace) -> None:
    """Warm up, then print a line for each number of streams."""
    from ray import serve

    # In throughput mode a handle lives on the event loop that it was made on.
    driver = serve.get_deployment_handle("Driver", "default")
    await measure(IngressCase(8, 32, 50), driver)
    for streams in parsed.streams:
        case = IngressCase(streams, streams * parsed.rounds, parsed.length, parsed.spread)
        print(json.dumps(await measure(case, driver)), flush=True)
    await serve.shutdown_async()


def main(arguments: Sequence[str] | None = None) -> None:
    """Deploy once, then play all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--step-ms", type=float, default=5.0, help="what every step takes")
    parser.add_argument("--ingress", type=int, default=1, help="ingress replicas")
    parser.add_argument("--length", type=int, default=200, help="tokens of an answer")
    parser.add_argument("--spread", type=float, default=0.5, help="share by which lengths vary")
    parser.add_argument("--rounds", type=int, default=4, help="requests of each stream")
    parsed = parser.parse_args(arguments)
    export_throughput_mode()
    import ray  # It reads the environment when it is imported.
    from ray import serve

    ray.init(namespace="serve", include_dashboard=False, logging_level="warning")
    try:
        deploy(parsed)
        print(json.dumps({"front": proxy_mode(), "cpus": psutil.cpu_count(), **vars(parsed)}))
        asyncio.run(play_all(parsed))
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()

"""A whole server in one process, without Ray: ingress, driver, and ranks as threads.

    python -m benchmarks.workload /tmp/tiny --shape tiny --adapters 128 --ranks 16
    python -m benchmarks.local /tmp/tiny --device-adapters 32 --port 8014
    python -m benchmarks.churn --url http://127.0.0.1:8014 \
        --metrics http://127.0.0.1:8014/adapters/metrics --metrics-lag-s 0

For ratios on a CPU, where Ray's own processes would take the cores that are measured. The
route /adapters/metrics has the adapter metrics that a driver under Ray gives to Ray's endpoint.
"""

import argparse
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Response

from configs.adapters import AdaptersConfig
from configs.engine import CacheConfig, Device, EngineConfig, LimitsConfig
from configs.model import LoadFormat, ModelConfig
from configs.wire.adapters import AdapterSource
from deployments.contract import ReplyAddress
from deployments.driver.engine import DriverEngine
from deployments.frames import FrameReceiver
from deployments.ingress.app import build_app
from deployments.ingress.generation.engine import IngressSettings
from deployments.ingress.generation.frames import RequestInboxes
from deployments.offline.driver import EngineDriver
from deployments.rank.local import LocalRanks

HOST = "127.0.0.1"
_POLL_S = 0.02


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """The engine of the command line."""
    return EngineConfig(
        model=ModelConfig(id=str(options.folder), load_format=LoadFormat.DUMMY, name="base"),
        tensor_parallel=options.tensor_parallel,
        device=Device.CPU,
        cache=CacheConfig(num_blocks=options.blocks),
        limits=LimitsConfig(
            max_step_tokens=512, max_running=options.max_running, max_queued=100_000
        ),
        adapters=AdaptersConfig(
            default_source=AdapterSource.LOCAL,
            local_roots=(str(options.folder / "adapters"),),
            device_pages=2 * options.device_adapters,
            max_device_adapters=options.device_adapters,
            max_rank=16,
            host_bytes=options.host_bytes,
        ),
    )


async def adapter_sums(engine: DriverEngine) -> str:
    """Adapter metrics since the start as text, by the names that a driver under Ray uses."""
    counts = asdict((await engine.snapshot()).adapter_counts)
    lines = [f"loray_adapter_{name} {value}" for name, value in counts.items()]
    engine.usage.drain_loads()
    lines += [
        f'loray_adapter_load_seconds_sum{{stage="{stage}"}} {total.seconds}'
        for stage, total in engine.usage.load_sums().items()
    ]
    return "\n".join(lines) + "\n"


def build(config: EngineConfig) -> FastAPI:
    """An application that starts and stops its engine."""
    engine = DriverEngine(config, Path(config.model.id), LocalRanks(config))
    inboxes = RequestInboxes()
    receiver = FrameReceiver(inboxes.deliver)
    bound: list[ReplyAddress] = []

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await engine.start()
        bound.append(await receiver.start(HOST))
        yield
        await receiver.close()
        await engine.stop()

    adapters = config.adapters
    settings = IngressSettings(
        default_source=adapters.default_source,
        loopback=True,
        push=adapters.push,
        max_file_bytes=adapters.max_file_bytes,
    )
    app = build_app(EngineDriver(engine), inboxes, lambda: bound[-1], settings, lifespan)

    @app.get("/adapters/metrics", include_in_schema=False)
    async def adapter_metrics() -> Response:
        return Response(await adapter_sums(engine), media_type="text/plain")

    return app


@contextmanager
def served(config: EngineConfig) -> Iterator[str]:
    """Serve in a thread; yields the URL when the engine is started."""
    settings = uvicorn.Config(build(config), host=HOST, port=0, log_level="warning", ws="none")
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, name="server", daemon=True)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the server did not start: its log says why")
            time.sleep(_POLL_S)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://{HOST}:{port}"
    finally:
        server.should_exit = True
        thread.join()


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve a folder of benchmarks.workload until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=8014)
    parser.add_argument("--device-adapters", type=int, default=32, help="of rank 16")
    parser.add_argument("--host-bytes", type=int, default=2**30)
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=4096)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parsed = parser.parse_args(arguments)
    app = build(engine_config(parsed))
    uvicorn.run(app, host=HOST, port=parsed.port, log_level="warning", ws="none")


if __name__ == "__main__":
    main()

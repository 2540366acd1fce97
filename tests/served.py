"""The demo served in this process: real HTTP, the real ingress, driver and one rank; no Ray."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
import yaml
from fastapi import FastAPI

from configs.engine import EngineConfig
from configs.serve import ServeConfig
from deployments.ingress.generation.engine import IngressSettings
from deployments.offline.application import engine_app
from deployments.rank.local import LocalRanks

_PATIENCE_S = 600.0


def demo_config(**changes: object) -> EngineConfig:
    """The demo of serve_config.yaml on one rank."""
    with open("serve_config.yaml", encoding="utf-8") as file:
        [app] = yaml.safe_load(file)["applications"]
    engine = {**app["args"]["engine"], "tensor_parallel": 1, **changes}
    return ServeConfig.model_validate({**app["args"], "engine": engine}).engine


def demo_app(config: EngineConfig, settings: IngressSettings) -> FastAPI:
    """The application; its lifespan starts and ends the engine."""
    return engine_app(config, LocalRanks(config), settings)


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """The application's address while it is served from a thread."""
    server = uvicorn.Server(
        uvicorn.Config(
            app, port=0, log_level="critical", ws="none", lifespan="on",
            timeout_keep_alive=round(_PATIENCE_S),
        )
    )  # fmt: skip
    thread = threading.Thread(target=server.run, daemon=True)
    started = threading.Event()
    announce = server.startup

    async def startup(sockets: object = None) -> None:
        await announce(sockets)  # type: ignore[arg-type]
        started.set()

    server.startup = startup  # type: ignore[method-assign]
    thread.start()
    try:
        assert started.wait(timeout=_PATIENCE_S), "the server did not start"
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=_PATIENCE_S)

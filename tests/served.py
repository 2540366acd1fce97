"""The demo served in this process: real HTTP, the real ingress, driver and one rank; no Ray."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn
import yaml
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

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
    """The application's address while it is served from a thread.

    AssertionError, by the application's own error, if it does not start.
    """
    faults: list[Exception] = []

    async def watched(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except Exception as error:
            if scope["type"] == "lifespan":
                faults.append(error)
            raise

    server = uvicorn.Server(
        uvicorn.Config(
            watched, port=0, log_level="critical", ws="none", lifespan="on",
            timeout_keep_alive=round(_PATIENCE_S),
        )
    )  # fmt: skip
    settled = threading.Event()
    announce = server.startup

    async def startup(sockets: object = None) -> None:
        await announce(sockets)  # type: ignore[arg-type]
        settled.set()

    def run() -> None:
        with suppress(SystemExit):  # As uvicorn leaves a start that failed.
            server.run()
        settled.set()

    thread = threading.Thread(target=run, daemon=True)
    server.startup = startup  # type: ignore[method-assign]
    thread.start()
    try:
        settled.wait(timeout=_PATIENCE_S)
        if not server.started:
            raise AssertionError("the server did not start") from next(iter(faults), None)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=_PATIENCE_S)

"""The demo served in this process: real HTTP, the real ingress, driver and one rank; no Ray."""

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
import yaml
from fastapi import FastAPI

from configs.engine import EngineConfig
from configs.serve import ServeConfig
from configs.wire.adapters import AdapterReference
from configs.wire.templates import TemplateSource
from deployments.contract import (
    AdapterCommand,
    AdapterReport,
    Completion,
    EngineInfo,
    EngineLoad,
    Failed,
    GenerateRequest,
    ReplyAddress,
)
from deployments.driver.engine import DriverEngine
from deployments.frames import FrameReceiver
from deployments.ingress.app import build_app
from deployments.ingress.generation.engine import IngressSettings
from deployments.ingress.generation.frames import RequestInboxes
from deployments.rank.local import LocalRanks
from sources.model import fetch_model

_PATIENCE_S = 600.0


class OneReplica:
    """`contract.Driver` over an engine on the same event loop."""

    def __init__(self, engine: DriverEngine) -> None:
        self._engine = engine

    async def generate(self, request: GenerateRequest, reply_to: ReplyAddress) -> Completion:
        return await self._engine.generate(request, reply_to)

    async def finish(self, request_id: str, index: int, at: int) -> None:
        await self._engine.finish(request_id, index, at)

    async def chat_template(
        self,
        adapter: AdapterReference,
        api_token: str | None,
        allowed: tuple[str, ...] | None = None,
        payer: str = "",
    ) -> TemplateSource | Failed:
        return await self._engine.chat_template(adapter, api_token, allowed, payer)

    async def loads(self) -> list[EngineLoad]:
        return [await self._engine.load()]

    async def describe(self) -> EngineInfo:
        return await self._engine.describe()

    async def adapters(self, command: AdapterCommand) -> list[AdapterReport]:
        return [await self._engine.adapters(command)]


def demo_config(**changes: object) -> EngineConfig:
    """The demo of serve_config.yaml on one rank."""
    with open("serve_config.yaml", encoding="utf-8") as file:
        [app] = yaml.safe_load(file)["applications"]
    engine = {**app["args"]["engine"], "tensor_parallel": 1, **changes}
    return ServeConfig.model_validate({**app["args"], "engine": engine}).engine


def demo_app(config: EngineConfig, settings: IngressSettings) -> FastAPI:
    """The application; its lifespan starts and ends the engine."""
    inboxes = RequestInboxes()
    receiver = FrameReceiver(inboxes.deliver)
    engine = DriverEngine(config, fetch_model(config.model), LocalRanks(config))
    bound: list[ReplyAddress] = []

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        bound.append(await receiver.start("127.0.0.1"))
        await engine.start()
        yield
        await engine.stop()
        await receiver.close()

    return build_app(OneReplica(engine), inboxes, lambda: bound[-1], settings, lifespan)


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

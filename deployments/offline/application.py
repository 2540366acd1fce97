"""The HTTP application over an engine in the same process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from configs.engine import EngineConfig
from deployments.contract import ReplyAddress
from deployments.driver.engine import DriverEngine
from deployments.driver.rank_start import RankGroup
from deployments.frames import FrameReceiver
from deployments.ingress.app import build_app
from deployments.ingress.generation.engine import IngressSettings
from deployments.ingress.generation.frames import RequestInboxes
from deployments.offline.driver import EngineDriver
from sources.model import fetch_model


def engine_app(config: EngineConfig, group: RankGroup, settings: IngressSettings) -> FastAPI:
    """The application; its lifespan starts and ends the engine over these ranks."""
    inboxes = RequestInboxes()
    receiver = FrameReceiver(inboxes.deliver)
    engine = DriverEngine(config, fetch_model(config.model), group)
    bound: list[ReplyAddress] = []

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        bound.append(await receiver.start("127.0.0.1"))
        await engine.start()
        yield
        await engine.stop()
        await receiver.close()

    return build_app(EngineDriver(engine), inboxes, lambda: bound[-1], settings, lifespan)

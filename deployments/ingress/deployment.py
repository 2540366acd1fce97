"""The Serve shell of the ingress: an API over the driver's handle, frames by socket."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle

from configs.env import proxy_mode
from configs.serve import ServeConfig
from deployments.contract import (
    Completion,
    EngineInfo,
    ErrorKind,
    GenerateRequest,
    ReplyAddress,
)
from deployments.frames import FrameReceiver
from deployments.ingress.api import build_app
from deployments.ingress.engine import IngressSettings
from deployments.ingress.errors import RequestError
from deployments.ingress.frames import Mailbox
from deployments.observability.logs import configure_logs

_LOST = "the engine that ran this request is gone: send it again"

logger = logging.getLogger("loray.ingress")


class HandleDriver:
    """`contract.Driver` over a Serve handle: Serve routes, counts, limits and cancels."""

    def __init__(self, handle: DeploymentHandle, receiver: FrameReceiver) -> None:
        """Calls go to any driver replica that Serve picks; finishes go back by socket."""
        self._handle = handle
        self._receiver = receiver

    async def generate(self, request: GenerateRequest, reply_to: ReplyAddress) -> Completion:
        """One unary call a request; when the client leaves, the driver's call is cancelled."""
        response = self._handle.generate.remote(request, reply_to)
        try:
            completion: Completion = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except BackPressureError as error:
            raise RequestError(
                ErrorKind.OVERLOADED, "the server is busy: try again", retry_after_s=1.0
            ) from error
        except RayError as error:
            logger.warning("request %s was lost: %s", request.id, type(error).__name__)
            raise RequestError(ErrorKind.UNAVAILABLE, _LOST, retry_after_s=1.0) from error
        return completion

    async def finish(self, request_id: str, index: int, at: int) -> None:
        """Tell the driver where a stop string ended a sequence."""
        self._receiver.finish(request_id, index, at)

    async def describe(self) -> EngineInfo:
        """What is served."""
        info: EngineInfo = await self._handle.describe.remote()
        return info


@serve.ingress(None)
class IngressDeployment:
    """HTTP in, text out; any number of replicas."""

    def __init__(self, config: ServeConfig, driver: DeploymentHandle) -> None:
        """Remember; Serve asks for the app when this is done."""
        configure_logs("ingress")
        logger.info("http front: %s", proxy_mode())
        self._config = config
        self._driver = driver

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Build the API; its lifespan binds the address that frames come to."""
        limits = self._config.engine.limits
        settings = IngressSettings(
            default_source=self._config.engine.adapters.default_source,
            max_stop_sequences=limits.max_stop_sequences,
            max_best_of=limits.max_best_of,
        )
        mailbox = Mailbox()
        receiver = FrameReceiver(mailbox.deliver)
        bound: list[ReplyAddress] = []

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            bound.append(await receiver.start(ray.util.get_node_ip_address()))
            yield
            await receiver.close()

        driver = HandleDriver(self._driver, receiver)
        return build_app(driver, mailbox, lambda: bound[-1], settings, lifespan)

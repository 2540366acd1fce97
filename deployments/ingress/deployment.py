"""The ingress as a Serve deployment: calls go over the driver's handle, frames by socket."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from functools import cached_property, partial

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from configs.env import proxy_mode
from configs.interpreter import freeze_objects, shorten_switch_interval
from configs.serve import BasesConfig, ServeConfig
from configs.wire.adapters import AdapterReference
from configs.wire.templates import TemplateSource
from deployments.admin_commands import AdminStore, AdminStoreError, save
from deployments.admin_store import RayAdminStore, store_name
from deployments.contract import (
    AdapterReport,
    Completion,
    EngineInfo,
    EngineLoad,
    ErrorKind,
    Failed,
    GenerateRequest,
    ReplyAddress,
)
from deployments.early_submit import replica_listener
from deployments.engine_commands import EngineCommand
from deployments.frames import FrameReceiver
from deployments.ingress.access.keys import is_loopback
from deployments.ingress.access.peers import ReplicaCount
from deployments.ingress.app import Lifespan, build_app
from deployments.ingress.bases import build_front
from deployments.ingress.generation.early_submit import EarlySubmitter
from deployments.ingress.generation.engine import IngressSettings
from deployments.ingress.generation.frames import RequestInboxes
from deployments.ingress.http.errors import EngineLost, RequestError
from deployments.ingress.text.tokenizer import ModelTokenizer
from deployments.observability.logs import hand_logs_to_serve
from deployments.observability.lorax_metrics import RequestMetrics
from sources.model import local_folder

_NO_DRIVER = "no driver is reachable now: try again"
_FAILED = "the engine failed to run this request: send it again"
_NOT_SAVED = "all replicas have done it, but those that start later will not know: send it again"

logger = logging.getLogger("loray.ingress")


class HandleDriver:
    """`contract.Driver` over a Serve handle: Serve routes, counts, limits and cancels."""

    def __init__(
        self, handle: DeploymentHandle, receiver: FrameReceiver, store: AdminStore
    ) -> None:
        """receiver: also sends `finish` to drivers. store: for admin commands that last."""
        self._handle = handle
        self._receiver = receiver
        self._admin_store = store

    async def generate(self, request: GenerateRequest, reply_to: ReplyAddress) -> Completion:
        """Make one unary call; cancelling it cancels the driver's call."""
        with EarlySubmitter(self._receiver, request) as early:
            with replica_listener(early.replica_selected):
                response = self._generating.remote(request, reply_to)
            try:
                completion: Completion = await response
            except asyncio.CancelledError:
                # Cancelling the await does not cancel the call; the driver would generate on.
                response.cancel()
                raise
            except BackPressureError as error:
                raise RequestError(
                    ErrorKind.OVERLOADED, "the server is busy: try again", retry_after_s=1.0
                ) from error
            except RayActorError as error:
                logger.warning("request %s was lost: %s", request.id, type(error).__name__)
                raise EngineLost from error
            except RayError as error:
                logger.exception("request %s failed", request.id)
                raise RequestError(ErrorKind.UNAVAILABLE, _FAILED, retry_after_s=1.0) from error
            return completion

    @cached_property
    def _generating(self) -> DeploymentHandle:
        """The handle of `generate`; cached, as Serve makes a new one at each access."""
        return self._handle.generate

    async def finish(self, request_id: str, index: int, at: int) -> None:
        """Report to the driver where a stop string ended a sequence."""
        self._receiver.finish(request_id, index, at)

    async def adapters(self, command: EngineCommand) -> list[AdapterReport]:
        """Execute a command on every replica and save it; replicas that die have no report."""
        try:
            response = self._handle.broadcast("adapters", command)
            replies = await response.results_async(return_exceptions=True)
        except (RayError, DeploymentUnavailableError) as error:
            raise RequestError(ErrorKind.UNAVAILABLE, _NO_DRIVER, retry_after_s=1.0) from error
        reports = [reply for reply in replies if isinstance(reply, AdapterReport)]
        for reply in replies:
            if isinstance(reply, RayTaskError):
                raise RequestError(ErrorKind.GENERATION, "a driver failed: see its log") from reply
        if not reports:
            raise RequestError(ErrorKind.UNAVAILABLE, _NO_DRIVER, retry_after_s=1.0)
        try:
            await asyncio.to_thread(save, self._admin_store, command, reports)
        except AdminStoreError as fault:
            raise RequestError(ErrorKind.UNAVAILABLE, f"{_NOT_SAVED}: {fault}") from fault
        return reports

    async def chat_template(
        self,
        adapter: AdapterReference,
        api_token: str | None,
        allowed: tuple[str, ...] | None = None,
        payer: str = "",
    ) -> TemplateSource | Failed:
        """Fetch the templates from any replica, which fetches the adapter's files if needed."""
        try:
            reply: TemplateSource | Failed = await self._handle.chat_template.remote(
                adapter, api_token, allowed, payer
            )
        except RayActorError as error:
            raise EngineLost from error
        except (RayError, BackPressureError, DeploymentUnavailableError) as error:
            raise RequestError(ErrorKind.UNAVAILABLE, _FAILED, retry_after_s=1.0) from error
        return reply

    async def loads(self) -> list[EngineLoad]:
        """What every replica has to do now; none of replicas that do not answer."""
        response = self._handle.broadcast("load")
        replies = await response.results_async(return_exceptions=True)
        return [reply for reply in replies if isinstance(reply, EngineLoad)]

    async def describe(self) -> EngineInfo:
        """Fetch the description from any replica."""
        info: EngineInfo = await self._handle.describe.remote()
        return info


def _running_replicas() -> int:
    """The number of running replicas of this deployment, by Serve's controller."""
    context = serve.get_replica_context()
    status = serve.status().applications[context.app_name].deployments[context.deployment]
    running: int = status.replica_states.get("RUNNING", 0)
    return running


def _front_is_loopback() -> bool:
    """Whether Serve's HTTP front listens on loopback only, by Serve's configuration.

    No public function returns it. A request's peer address is always the front's.
    """
    return is_loopback(serve.context._get_global_client().http_config.host)


class IngressFront:
    """What the applications of one replica share: a socket for frames, and the peers' number."""

    def __init__(self, *, watches: bool) -> None:
        """watches: whether any key has a quota, of which each replica grants a part."""
        self.inboxes = RequestInboxes()
        self._receiver = FrameReceiver(self.inboxes.deliver)
        self._bound: list[ReplyAddress] = []
        self._peers = ReplicaCount(_running_replicas)
        self._watches = watches

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Bind the socket, and freeze what the start has made."""
        self._bound.append(await self._receiver.start(ray.util.get_node_ip_address()))
        shorten_switch_interval()
        freeze_objects()
        async with self._peers.watched() if self._watches else nullcontext():
            yield
        await self._receiver.close()

    def app(
        self,
        config: ServeConfig,
        driver: DeploymentHandle,
        application: str,
        lifespan: Lifespan | None = None,
        metrics: RequestMetrics | None = None,
        wake: Callable[[], None] = lambda: None,
        bases: frozenset[str] = frozenset(),
    ) -> FastAPI:
        """The API of one base model; application: the name of its saved commands.

        wake: called when the runner of batches is to look at them. bases: as in `IngressSettings`.
        """
        store = RayAdminStore(application)
        # Serve's default, cloudpickle, checks each object of a call for code of the caller's own
        # script. Calls of the driver have only classes of the contract, which both sides import.
        handle = driver.options(request_serialization="pickle")
        return build_app(
            HandleDriver(handle, self._receiver, store),
            self.inboxes,
            lambda: self._bound[-1],
            _settings(config, self._peers, bases),
            lifespan,
            metrics,
            wake,
        )

    def bases(
        self,
        config: BasesConfig,
        drivers: Mapping[str, DeploymentHandle],
        application: str,
        wake: Callable[[], None] = lambda: None,
    ) -> FastAPI:
        """The API of several base models, by their names: one that chooses among theirs."""
        metrics = RequestMetrics()
        apps = {
            name: self.app(
                base,
                drivers[name],
                store_name(application, name),
                metrics=metrics,
                wake=wake,
                bases=frozenset(config.models),
            )
            for name, base in config.named().items()
        }
        return build_front(apps, self.lifespan)


def _settings(config: ServeConfig, peers: ReplicaCount, bases: frozenset[str]) -> IngressSettings:
    engine = config.engine
    trusts, folder = engine.model.trust_remote_code, local_folder(engine.model)
    return IngressSettings(
        default_source=engine.adapters.default_source,
        max_stop_sequences=engine.limits.max_stop_sequences,
        max_best_of=engine.limits.max_best_of,
        embeddings=config.embeddings,
        tool_parser=engine.model.tool_parser,
        reasoning_parser=engine.model.reasoning_parser,
        api=config.api,
        batches=config.batches,
        push=engine.adapters.push,
        max_file_bytes=engine.adapters.max_file_bytes,
        replicas=peers.count,
        loopback=_front_is_loopback(),
        read_text=partial(ModelTokenizer.load, trust_remote_code=trusts),
        model_folder=None if folder is None else str(folder),
        bases=bases,
    )


def _waker(batches: DeploymentHandle | None) -> Callable[[], None]:
    """What has the runner look at the batches; it also looks from time to time."""

    def wake() -> None:
        if batches is not None:
            batches.wake.remote()

    return wake


@serve.ingress(None)
class IngressDeployment:
    """The Serve deployment; any number of replicas."""

    def __init__(
        self,
        config: ServeConfig,
        driver: DeploymentHandle,
        batches: DeploymentHandle | None = None,
    ) -> None:
        """batches: the runner of batches; None if there are none."""
        hand_logs_to_serve()
        logger.info("http front: %s", proxy_mode())
        self._config = config
        self._driver = driver
        self._wake = _waker(batches)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Build the API; its lifespan binds the address for frames."""
        front = IngressFront(watches=self._config.api.has_quotas)
        application = serve.get_replica_context().app_name
        self._app = front.app(
            self._config, self._driver, application, front.lifespan, wake=self._wake
        )
        return self._app

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, and end the running ones within so many seconds."""
        await self._app.state.drain.run(seconds)


@serve.ingress(None)
class BasesIngressDeployment:
    """The Serve deployment in front of several base models; any number of replicas."""

    def __init__(
        self,
        config: BasesConfig,
        drivers: dict[str, DeploymentHandle],
        batches: DeploymentHandle | None = None,
    ) -> None:
        """drivers: by the names of the bases. batches: as in `IngressDeployment`."""
        hand_logs_to_serve()
        logger.info("http front: %s", proxy_mode())
        self._config = config
        self._drivers = drivers
        self._wake = _waker(batches)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Build the API of each base, and the one that chooses among them."""
        front = IngressFront(watches=self._config.has_quotas)
        application = serve.get_replica_context().app_name
        self._app = front.bases(self._config, self._drivers, application, self._wake)
        return self._app

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, and end the running ones within so many seconds."""
        apps = self._app.state.bases.values()
        await asyncio.gather(*(app.state.drain.run(seconds) for app in apps))

"""The driver as a Serve deployment: start, health, drain."""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.util import get_current_placement_group

from configs.engine import EngineConfig
from configs.interpreter import freeze_objects, shorten_switch_interval
from configs.serve import ServeConfig
from configs.wire.adapters import AdapterReference
from configs.wire.templates import TemplateSource
from deployments.admin_commands import AdminCommands
from deployments.admin_store import RayAdminStore, store_name
from deployments.autoscaling import Stats, scaling_stats
from deployments.contract import (
    AdapterReport,
    Completion,
    EngineInfo,
    EngineLoad,
    Failed,
    GenerateRequest,
    PushAdapter,
    PushedContent,
    ReplyAddress,
)
from deployments.driver.engine import DriverEngine
from deployments.driver.rank_start import RankGroup
from deployments.driver.settings import OperatorSettings
from deployments.driver.usage import LoadSum
from deployments.engine_commands import EngineCommand
from deployments.observability.adapter_metrics import AdapterMetrics
from deployments.observability.logs import hand_logs_to_serve
from deployments.observability.metrics import EngineMetrics
from deployments.observability.steps import StepRecord
from deployments.rank.group import RayRanks
from deployments.rank.messages import LoadReport
from scheduler.snapshot import AdapterView, Snapshot
from sources.model import fetch_model

_METRICS_SECONDS = 1.0
_FOLLOW_SECONDS = 10.0

logger = logging.getLogger("loray.driver")


class DriverDeployment:
    """One driver replica and the ranks in its placement group."""

    _engine: DriverEngine | None = None
    _tasks: Sequence[asyncio.Task[None]] = ()
    _views: Sequence[AdapterView] = ()
    _num_open = 0
    _stats: Stats | None = None

    async def __init__(self, config: ServeConfig, base: str = "") -> None:  # type: ignore[misc]
        """Start the ranks, load the preloaded adapters, and apply persisted names.

        base: its name, if it is one of several of the application.
        """
        self._log_format = config.observability.log_format
        hand_logs_to_serve()
        shorten_switch_interval()
        folder = fetch_model(config.engine.model)
        logger.info("loading %s over %d ranks", folder.name, config.engine.tensor_parallel)
        context = serve.get_replica_context()
        group = self._group(config.engine, folder)
        self._engine = DriverEngine(config.engine, folder, group, context.replica_id.unique_id)
        await self._engine.start()
        for title, selected in (await self._engine.describe()).startup_info.items():
            logger.info("%s: %s", title, selected)
        application = store_name(context.app_name, base)
        store = RayAdminStore(application)
        commands = AdminCommands(store, self._execute_saved)
        await commands.follow(pins=False)
        settings_store = RayAdminStore(application, "settings")
        self._settings = OperatorSettings(self._engine.reconfigure, settings_store)
        follow = _follow(commands, self._settings)
        self._tasks = [
            asyncio.create_task(each)
            for each in (self._report(), follow, self._engine.watch_catalogue())
        ]
        freeze_objects()

    def _group(self, engine: EngineConfig, folder: Path) -> RankGroup:
        """The ranks in this replica's placement group."""
        return RayRanks(engine, str(folder), get_current_placement_group(), self._log_format)

    async def _report(self) -> None:
        """Update the metrics every second until the replica ends."""
        metrics, adapters = EngineMetrics(), AdapterMetrics()
        metrics.begin()
        adapters.begin()
        while True:
            await asyncio.sleep(_METRICS_SECONDS)
            metrics.healthy(self._running.healthy, self._running.asleep)
            metrics.settings_refused(self._settings.refused is not None)
            snapshot, views = await self._running.snapshot(), await self._running.adapter_views()
            self._views = views
            most = self._running.max_running
            self._stats = scaling_stats(snapshot, views, most, time.monotonic())
            adapters.requests(self._running.usage.drain_requests())
            adapters.loads(self._running.usage.drain_loads())
            adapters.tiers(snapshot.tiers, snapshot.adapter_counts)
            adapters.queues(views, snapshot.queued, self._running.usage.name)
            metrics.update(
                snapshot,
                self._running.steps.last(),
                rebuilds=self._running.num_rebuilds,
                dropped=self._running.dropped_frames,
                early_submits=self._running.early_submits.num_attached,
                overdue=self._running.num_overdue,
            )

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve calls this with a changed `user_config`; nothing restarts, even after a fault."""
        await self._settings.take(user_config)

    async def generate(self, request: GenerateRequest, reply_to: ReplyAddress) -> Completion:
        """Run one HTTP request to its end."""
        self._num_open += 1
        try:
            return await self._running.generate(request, reply_to)
        finally:
            self._num_open -= 1

    async def chat_template(
        self,
        adapter: AdapterReference,
        api_token: str | None,
        allowed: tuple[str, ...] | None = None,
        payer: str = "",
    ) -> TemplateSource | Failed:
        """An adapter's own chat template."""
        return await self._running.chat_template(adapter, api_token, allowed, payer)

    async def describe(self) -> EngineInfo:
        """What is served."""
        info = await self._running.describe()
        if self._settings.refused is not None:
            state = f"not applied, the settings before it stay: {self._settings.refused}"
        elif self._settings.is_pending:
            state = "not applied yet, the settings before it stay: a pin is being fetched"
        else:
            return info
        selected = {**info.startup_info, "user_config": state}
        return msgspec.structs.replace(info, startup_info=selected)

    async def load(self) -> EngineLoad:
        """What this replica has to do now."""
        return await self._running.load()

    async def adapters(self, command: EngineCommand) -> AdapterReport:
        """Execute an admin command on this replica: about adapters, or to sleep or wake."""
        replica = serve.get_replica_context().replica_id.unique_id
        return msgspec.structs.replace(await self._running.adapters(command), replica=replica)

    async def pushed_content(self, digest: str) -> PushedContent | None:
        """The files of a pushed version, for another node; None if this node lacks them."""
        return await self._running.pushed_content(digest)

    async def _execute_saved(self, command: EngineCommand) -> AdapterReport:
        """Execute a saved command; a push whose files this node lacks is fetched from another."""
        report = await self._running.adapters(command)
        if isinstance(command, PushAdapter) and report.lacks_files:
            content = await _from_another_node(command.digest)
            if content is not None:
                whole = msgspec.structs.replace(command, content=content)
                report = await self._running.adapters(whole)
        return report

    async def steps(self) -> Sequence[StepRecord]:
        """The last steps, for benchmarks and tests."""
        return self._running.steps.last()

    async def snapshot(self) -> Snapshot:
        """The scheduler's numbers."""
        return await self._running.snapshot()

    async def early_submits(self) -> int:
        """How many calls attached to an early submit, for tests."""
        return self._running.early_submits.num_attached

    async def load_sums(self) -> dict[str, LoadSum]:
        """How long adapters took to load, by stage, for benchmarks."""
        return self._running.usage.load_sums()

    async def ranks(self) -> list[LoadReport]:
        """The load reports of the present ranks."""
        return self._running.ranks

    async def record_routing_stats(self) -> dict[str, Any]:
        """Serve collects this report for the routers; never waits for the engine loop."""
        return self._running.report(self._views, self._num_open).packed()

    async def record_autoscaling_stats(self) -> Stats:
        """Serve collects this report for the autoscaling policy; never waits for the loop."""
        return dict(self._stats or {})

    async def check_health(self) -> None:
        """Raise if this replica cannot serve any more: then Serve replaces it.

        While it replaces its ranks it counts as healthy, or Serve would kill it.
        """
        if self._running.failure is not None:
            raise RuntimeError(self._running.failure)

    async def __del__(self) -> None:
        """Stop the ranks; Serve calls this when the replica ends."""
        for task in self._tasks:
            task.cancel()
        if self._engine is not None:
            await self._engine.stop()

    @property
    def _running(self) -> DriverEngine:
        assert self._engine is not None, "Serve calls nothing before __init__ is done"
        return self._engine


async def _from_another_node(digest: str) -> PushedContent | None:
    """Pushed files from the first replica that has them; None if no other replica does."""
    context = serve.get_replica_context()
    peers = serve.get_deployment_handle(context.deployment, context.app_name)
    try:
        response = peers.broadcast("pushed_content", digest)
        replies = await response.results_async(return_exceptions=True)
    except (RayError, DeploymentUnavailableError):
        return None
    return next((reply for reply in replies if isinstance(reply, PushedContent)), None)


async def _follow(commands: AdminCommands, settings: OperatorSettings) -> None:
    """Execute persisted admin commands and retry settings until the replica ends."""
    while True:
        try:
            await commands.follow()
            await settings.retry()
        except Exception:
            # The last boundary of this task: a failed command is tried again.
            logger.exception("persisted admin commands could not be executed")
        await asyncio.sleep(_FOLLOW_SECONDS)

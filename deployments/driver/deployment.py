"""The Serve shell of a driver: start, health, drain."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from ray.util import get_current_placement_group

from configs.runtime import RuntimeConfig
from configs.serve import ServeConfig
from deployments.contract import Completion, EngineInfo, GenerateRequest, ReplyAddress
from deployments.driver.engine import Engine
from deployments.observability.logs import configure_logs
from deployments.observability.metrics import EngineMetrics
from deployments.observability.steps import StepRecord
from deployments.rank.group import RayRanks
from deployments.rank.messages import LoadReport
from scheduler.snapshot import Snapshot
from sharding.sources import fetch_model

_METRICS_SECONDS = 1.0

logger = logging.getLogger("loray.driver")


class DriverDeployment:
    """One driver replica and the ranks in its placement group."""

    _engine: Engine | None = None
    _reporting: asyncio.Task[None] | None = None

    async def __init__(self, config: ServeConfig) -> None:  # type: ignore[misc]
        """Start the ranks and load what is to be there before the first request."""
        configure_logs("driver")
        folder = fetch_model(config.engine.model)
        logger.info("loading %s over %d ranks", folder.name, config.engine.tensor_parallel)
        group = RayRanks(config.engine, str(folder), get_current_placement_group())
        self._engine = Engine(config.engine, folder, group)
        await self._engine.start()
        for what, choice in (await self._engine.describe()).chosen.items():
            logger.info("%s: %s", what, choice)
        self._reporting = asyncio.create_task(self._report())

    async def _report(self) -> None:
        """Feed the metrics while the replica lives."""
        metrics = EngineMetrics()
        while True:
            await asyncio.sleep(_METRICS_SECONDS)
            metrics.healthy(self._running.healthy)
            metrics.update(
                await self._running.snapshot(),
                self._running.steps.last(),
                rebuilds=self._running.num_rebuilds,
                dropped=self._running.dropped_frames,
            )

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve's way to apply a changed `user_config`: nothing restarts."""
        await self._running.reconfigure(RuntimeConfig.model_validate(user_config))

    async def generate(self, request: GenerateRequest, reply_to: ReplyAddress) -> Completion:
        """One HTTP request, to its end."""
        return await self._running.generate(request, reply_to)

    async def describe(self) -> EngineInfo:
        """What is served."""
        return await self._running.describe()

    async def steps(self) -> Sequence[StepRecord]:
        """The last steps, for benchmarks and tests."""
        return self._running.steps.last()

    async def snapshot(self) -> Snapshot:
        """The scheduler in numbers."""
        return await self._running.snapshot()

    async def ranks(self) -> list[LoadReport]:
        """The present ranks: their processes, and what each holds."""
        return self._running.ranks

    async def check_health(self) -> None:
        """Healthy while it works or rebuilds its ranks; Serve replaces it when it cannot."""
        if self._running.failure is not None:
            raise RuntimeError(self._running.failure)

    async def __del__(self) -> None:
        """Serve's way to say that the replica is going: leave no rank behind."""
        if self._reporting is not None:
            self._reporting.cancel()
        if self._engine is not None:
            await self._engine.stop()

    @property
    def _running(self) -> Engine:
        assert self._engine is not None, "Serve calls nothing before __init__ is done"
        return self._engine

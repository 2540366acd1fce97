"""The runner of batches as a Serve deployment of one replica, which Serve replaces if it ends."""

import asyncio
import logging
from contextlib import AsyncExitStack
from functools import partial

from ray import serve
from ray.serve.handle import DeploymentHandle

from configs.serve import BasesConfig, ServeConfig
from deployments.batch_runner.requests import sender
from deployments.batch_runner.runner import BatchRunner
from deployments.ingress.batches.store import BatchStore
from deployments.ingress.deployment import IngressFront
from deployments.observability.logs import hand_logs_to_serve

logger = logging.getLogger("loray.batches")


class BatchesDeployment:
    """Serves no HTTP: it sends batches' requests to an application of its own, over the driver."""

    _task: asyncio.Task[None] | None = None

    async def __init__(  # type: ignore[misc]
        self,
        config: ServeConfig | BasesConfig,
        drivers: DeploymentHandle | dict[str, DeploymentHandle],
    ) -> None:
        """Open the storage, and go on with the batches that have not ended.

        drivers: that of the base, or those of several bases by their names.
        """
        hand_logs_to_serve()
        store = BatchStore(config.batches)
        await asyncio.to_thread(lambda: store.storage)
        logger.info("batches are kept in %s", config.batches.storage)
        application = serve.get_replica_context().app_name
        if isinstance(config, BasesConfig):
            assert isinstance(drivers, dict), "one for each base"
            front = IngressFront(watches=config.has_quotas)
            app = front.bases(config, drivers, application)
            most = max(each.api.max_body_bytes for each in config.models.values())
        else:
            front = IngressFront(watches=config.api.has_quotas)
            app = front.app(config, drivers, application, front.lifespan)
            most = config.api.max_body_bytes
        self._life = AsyncExitStack()
        await self._life.enter_async_context(app.router.lifespan_context(app))
        self._runner = BatchRunner(store, partial(sender, app), most)
        self._task = asyncio.create_task(self._runner.run())

    async def wake(self) -> None:
        """Look at the batches now."""
        self._runner.wake()

    async def check_health(self) -> None:
        """Raise if the runner has ended: then Serve replaces this replica."""
        if self._task is not None and self._task.done():
            raise RuntimeError("the runner of batches has ended")

    async def __del__(self) -> None:
        """End the runner; Serve calls this when the replica ends."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._life.aclose()

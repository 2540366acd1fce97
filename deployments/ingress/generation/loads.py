"""What the driver replicas have to do, for gateways that look many times a second."""

import asyncio
import logging
from collections.abc import Sequence

from deployments.contract import EngineLoad
from deployments.driver_interface import Driver
from deployments.ingress.access.quotas import Clock

_FRESH_SECONDS = 0.25
_LOOK_SECONDS = 1.0

logger = logging.getLogger("loray.ingress")


class EngineLoads:
    """The loads of all driver replicas; they are looked up four times a second at most."""

    def __init__(self, driver: Driver, clock: Clock) -> None:
        self._driver = driver
        self._clock = clock
        self._loads: Sequence[EngineLoad] = ()
        self._looked_at = float("-inf")
        self._looking = asyncio.Lock()

    async def now(self) -> Sequence[EngineLoad]:
        """One for each replica that answered; none if they cannot be reached."""
        async with self._looking:
            if self._clock() - self._looked_at > _FRESH_SECONDS:
                self._loads = await self._look()
                self._looked_at = self._clock()
        return self._loads

    async def _look(self) -> Sequence[EngineLoad]:
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                return await self._driver.loads()
        except Exception as fault:
            # Metrics of this replica are served all the same.
            logger.debug("the drivers did not report their loads: %s", type(fault).__name__)
            return ()

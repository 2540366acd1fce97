"""Looks at the drivers' loads: shared, seldom, and never an obstacle."""

import asyncio

import pytest

from deployments.contract import EngineLoad
from deployments.ingress.generation.loads import EngineLoads
from tests.clocks import Clock

ONE = EngineLoad("tiny", 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, [])


class Drivers:
    """Replicas that report after a pause, for ever if they hang."""

    def __init__(self) -> None:
        self.num_looks = 0
        self.hanging = False

    async def loads(self) -> list[EngineLoad]:
        self.num_looks += 1
        await (asyncio.Event().wait() if self.hanging else asyncio.sleep(0))
        return [ONE]


def test_gateways_share_looks() -> None:
    async def story() -> None:
        drivers, clock = Drivers(), Clock()
        loads = EngineLoads(drivers, clock.monotonic)  # type: ignore[arg-type]
        assert await asyncio.gather(*(loads.now() for _ in range(20))) == [[ONE]] * 20
        clock.now += 0.2
        assert await loads.now() == [ONE]
        assert drivers.num_looks == 1
        clock.now += 0.1
        assert await loads.now() == [ONE]
        assert drivers.num_looks == 2

    asyncio.run(story())


def test_drivers_that_hang_cause_no_long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.ingress.generation.loads._LOOK_SECONDS", 0.01)

    async def story() -> None:
        drivers = Drivers()
        drivers.hanging = True
        loads = EngineLoads(drivers, Clock().monotonic)  # type: ignore[arg-type]
        assert list(await loads.now()) == []

    asyncio.run(story())

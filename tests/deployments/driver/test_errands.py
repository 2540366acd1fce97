"""An errand is run once for all who ask, and its end is told when all of them have gone on."""

import asyncio

import pytest

from deployments.driver.errands import Errands, when_all_have_it
from tests.deployments.driver.stories import PATIENCE_S


def test_all_who_ask_share_a_run_and_go_on_before_its_end_is_told() -> None:
    told: list[str] = []

    async def story() -> None:
        errands, may_end = Errands(), asyncio.Event()

        async def work() -> int:
            told.append("run")
            await may_end.wait()
            when_all_have_it(lambda: told.append("end"))
            return 7

        async def ask() -> None:
            told.append(f"got {await errands.once('what', work)}")

        asked = [asyncio.create_task(ask()) for _ in range(3)]
        await asyncio.sleep(0)
        asked[0].cancel()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await asked[0]
        await asyncio.gather(*asked[1:])
        await asyncio.sleep(0)
        assert told == ["run", "got 7", "got 7", "end"]
        told.clear()
        await ask()
        assert told[:2] == ["run", "got 7"], "what has ended is run again"

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))

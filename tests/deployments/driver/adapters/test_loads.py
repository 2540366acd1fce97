"""Ranks read adapters each for itself, beside the steps: the slowest holds up its own alone."""

import asyncio
import threading
from pathlib import Path

from deployments.driver.engine import DriverEngine
from scheduler.adapters.resident import AdapterState
from tests.deployments.driver.fake_ranks import FakeGroup, continuation
from tests.deployments.driver.routing.stories import NOWHERE, digest_of, play, request, tokens


def test_a_rank_that_reads_slowly_delays_neither_steps_nor_other_adapters(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        group.staging_gate.set()
        gate = group.runners[1].staging_gate = threading.Event()
        slow = asyncio.create_task(engine.generate(request("slow", [1], 5, "slow1"), NOWHERE))
        while not group.runners[0].staged:
            await engine.snapshot()
        for name in (None, "red", "blue"):
            answer = await engine.generate(request(f"over {name}", [3], 40, name), NOWHERE)
            digest = digest_of(engine, name) if name else ""
            assert tokens(answer) == [continuation(digest, [3], 40)]
        assert (await engine.snapshot()).adapters[AdapterState.STAGING] == 1
        assert not slow.done()
        sampled = [record.num_sampled for record in engine.steps.last() if record.num_rows]
        assert sampled == [1] * len(sampled), "no step was made for it"
        gate.set()
        assert tokens(await slow) == [continuation(digest_of(engine, "slow1"), [1], 5)]

    assert play(root, story).starts == 1

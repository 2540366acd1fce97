"""Loads delay no running request on real ranks: it has a row in every step."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import torch

from configs.wire.adapters import AdapterReference, AdapterSource
from configs.wire.sampling import Sampling, Stopping
from deployments.contract import (
    GenerateRequest,
    LoadAdapter,
    PinAdapter,
    SequenceRequest,
    UnpinAdapter,
)
from deployments.driver.engine import DriverEngine
from deployments.engine_commands import EngineCommand
from deployments.observability.steps import StepRecord
from deployments.rank.local import LocalRanks
from tests.checkpoints import AdapterRecipe, write_adapter, write_llama
from tests.deployments.driver.routing.stories import PATIENCE_S
from tests.deployments.rank.test_whole_ends import NOWHERE, config

NUM_TOKENS, NUM_ADAPTERS, NUM_MOVES = 60, 5, 4
HOST_BYTES = 60_000
"""Room for two of the adapters on each rank."""


async def generate(engine: DriverEngine, name: str) -> tuple[list[int], Sequence[StepRecord]]:
    """One request over the base model, and the steps from its first on."""
    await engine.snapshot()  # the loop records a step after it emitted its tokens
    records = engine.steps.last()
    before = records[-1].step if records else 0
    sequence = SequenceRequest([5, 6, 7], Sampling(), Stopping(NUM_TOKENS))
    [outcome] = (await engine.generate(GenerateRequest(name, [sequence]), NOWHERE)).sequences
    await engine.snapshot()
    steps = [record for record in engine.steps.last() if record.step > before]
    first = next(i for i, record in enumerate(steps) if record.num_rows)
    return outcome.tokens, steps[first:]


async def come_and_go(engine: DriverEngine) -> None:
    """Adapters are pinned, loaded and unpinned in a loop, in tiers that hold two of them."""
    index = 0
    while True:
        reference = AdapterReference(AdapterSource.LOCAL, f"a{index % NUM_ADAPTERS}")
        commands: list[EngineCommand] = [
            PinAdapter(reference),
            LoadAdapter(reference),
            UnpinAdapter(reference),
        ]
        for command in commands:
            report = await engine.adapters(command)
            assert report.failure is None, report.failure
        index += 1


async def story(engine: DriverEngine) -> None:
    """The request has the tokens that it has alone, one in every step, until much was moved."""
    alone, _ = await generate(engine, "alone")
    loads = asyncio.create_task(come_and_go(engine))
    num_loads = 0
    for index in range(1000):
        tokens, steps = await generate(engine, f"r{index}")
        assert tokens == alone
        assert [record.num_sampled for record in steps[:NUM_TOKENS]] == [1] * NUM_TOKENS
        num_loads += sum(record.num_loads for record in steps[:NUM_TOKENS])
        counts = (await engine.snapshot()).adapter_counts
        if min(num_loads, counts.host_evictions, counts.device_evictions) >= NUM_MOVES:
            break
    assert not loads.done(), loads
    loads.cancel()


def test_a_request_has_a_token_in_every_step_while_adapters_come_and_go(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", "gqa")
    for index in range(NUM_ADAPTERS):
        write_adapter(tmp_path / f"a{index}", model, AdapterRecipe(r=8, seed=index))
    torch.set_num_threads(1)
    opened = config(tmp_path, max_device_adapters=2, device_pages=2, host_bytes=HOST_BYTES)

    async def play() -> None:
        engine = DriverEngine(opened, model, LocalRanks(opened))
        await engine.start()
        try:
            await story(engine)
        finally:
            await engine.stop()

    asyncio.run(asyncio.wait_for(play(), 2 * PATIENCE_S))

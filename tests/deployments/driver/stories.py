"""How a story is played on an engine over fake ranks, and what its tests ask about it."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from configs.adapters import AdapterReference, AdapterSource
from configs.engine import EngineConfig
from configs.sampling import Sampling, Stopping
from deployments.contract import (
    Completion,
    Finished,
    GenerateRequest,
    ReplyAddress,
    SequenceRequest,
)
from deployments.driver.engine import Engine
from tests.deployments.driver.fake_ranks import FakeGroup

Story = Callable[[Engine, FakeGroup], Awaitable[None]]


def config(root: Path, **changes: object) -> EngineConfig:
    return EngineConfig.model_validate(
        {
            "model": {"id": str(root)},
            "tensor_parallel": 2,
            "adapters": {"local_roots": [str(root / "adapters")], "default_source": "local"},
            "limits": {"max_step_tokens": 16, "max_running": 8, "max_queued": 64},
            "recovery": {"step_timeout_s": 2.0, "recovery_timeout_s": 5.0},
            **changes,
        }
    )


def play(root: Path, story: Story, group: FakeGroup | None = None, **changes: object) -> FakeGroup:
    """Run a story on a started engine; afterwards nothing may be left open."""
    group = group or FakeGroup()

    async def act() -> None:
        engine = Engine(config(root, **changes), root, group)
        await engine.start()
        try:
            await story(engine, group)
            await engine._adapters.settle()
            assert not engine._streams, "a stream was left open"
        finally:
            await engine.stop()

    asyncio.run(asyncio.wait_for(act(), 30))
    return group


def request(
    name: str, prompt: list[int], count: int = 5, adapter: str | None = None, num: int = 1
) -> GenerateRequest:
    sequence = SequenceRequest(prompt, Sampling(), Stopping(count))
    reference = AdapterReference(AdapterSource.LOCAL, adapter) if adapter else None
    return GenerateRequest(name, [sequence] * num, reference)


NOWHERE = ReplyAddress("127.0.0.1", 1, "nobody listens here")


def tokens(completion: Completion) -> list[list[int]]:
    assert all(isinstance(s.ending, Finished) for s in completion.sequences), completion.sequences
    return [sequence.tokens for sequence in completion.sequences]


async def healthy(engine: Engine) -> None:
    """Ask until the ranks serve."""
    asked = asyncio.Event()
    while not engine.healthy:
        asyncio.get_running_loop().call_later(0.01, asked.set)
        await asked.wait()
        asked.clear()


def digest_of(engine: Engine, adapter: str) -> str:
    directory = engine._directory
    reference = AdapterReference(AdapterSource.LOCAL, adapter)
    return directory.fetched(directory._references[reference]).digest

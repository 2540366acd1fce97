"""How a story is played on an engine over fake ranks, and what its tests ask about it."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from configs.engine import EngineConfig
from configs.wire.adapters import AdapterReference, AdapterSource
from configs.wire.sampling import Sampling, Stopping
from deployments.contract import (
    Completion,
    Finished,
    GenerateRequest,
    PinAdapter,
    ReplyAddress,
    SequenceRequest,
)
from deployments.driver.engine import DriverEngine
from scheduler.adapters.resident import AdapterState
from scheduler.events import Event
from scheduler.scheduler import Scheduler
from scheduler.snapshot import Snapshot
from tests.clocks import Clock
from tests.deployments.driver.fake_ranks import FakeGroup

Story = Callable[[DriverEngine, FakeGroup], Awaitable[None]]

PATIENCE_S = 300.0
"""How long a story may last, and a thread or a rank in it may be late, on a busy machine."""


def config(root: Path, **changes: object) -> EngineConfig:
    return EngineConfig.model_validate(
        {
            "model": {"id": str(root)},
            "tensor_parallel": 2,
            "adapters": {
                "local_roots": [str(root / "adapters")],
                "default_source": "local",
                "look_timeout_s": PATIENCE_S,
            },
            "limits": {"max_step_tokens": 16, "max_running": 8, "max_queued": 64},
            "recovery": dict.fromkeys(
                ("step_timeout_s", "stage_timeout_s", "recovery_timeout_s"), PATIENCE_S
            ),
            **changes,
        }
    )


def play(root: Path, story: Story, group: FakeGroup | None = None, **changes: object) -> FakeGroup:
    """Run a story on a started engine; afterwards nothing may be left open."""
    group = group or FakeGroup()

    async def act() -> None:
        engine = DriverEngine(config(root, **changes), root, group)
        try:
            await engine.start()
            await story(engine, group)
            await engine._adapters.settle()
            assert not engine._streams, "a stream was left open"
        finally:
            await engine.stop()

    asyncio.run(asyncio.wait_for(act(), PATIENCE_S))
    return group


def request(
    name: str, prompt: list[int], count: int = 5, adapter: str | None = None, num: int = 1
) -> GenerateRequest:
    sequence = SequenceRequest(prompt, Sampling(), Stopping(count))
    reference = AdapterReference(AdapterSource.LOCAL, adapter) if adapter else None
    return GenerateRequest(name, [sequence] * num, reference)


NOWHERE = ReplyAddress("127.0.0.1", 1, "no listener")


def tokens(completion: Completion) -> list[list[int]]:
    assert all(isinstance(s.ending, Finished) for s in completion.sequences), completion.sequences
    return [sequence.tokens for sequence in completion.sequences]


async def until_true(seen: Callable[[], bool]) -> None:
    """Look again and again until it is so."""
    looked = asyncio.Event()
    while not seen():
        asyncio.get_running_loop().call_later(0.002, looked.set)
        await looked.wait()
        looked.clear()


async def healthy(engine: DriverEngine) -> None:
    """Ask until the ranks serve."""
    await until_true(lambda: engine.healthy)


async def until(engine: DriverEngine, seen: Callable[[Snapshot], bool]) -> Snapshot:
    """Ask until the scheduler's numbers are as they should come to be."""
    while not seen(snapshot := await engine.snapshot()):
        pass
    return snapshot


async def until_running(engine: DriverEngine, count: int = 1) -> None:
    """Ask until so many requests are on the ranks."""
    await until(engine, lambda snapshot: snapshot.running >= count)


async def until_lost(engine: DriverEngine) -> None:
    """Ask until the loop knows that its ranks are gone, and waits for new ones.

    The caller keeps those from starting (`FakeGroup.may_start`): else they may be back unseen.
    """
    while engine.healthy:
        await engine.snapshot()
    await engine.snapshot()


async def pass_by(engine: DriverEngine, clock: Clock, seconds: float) -> None:
    """Let time pass on the loop's clock, and have the loop look at it."""
    clock.now += seconds
    await engine.snapshot()


async def pin(engine: DriverEngine, *names: str) -> None:
    """Have these adapters, and no others, on the device."""
    for name in names:
        reference = AdapterReference(AdapterSource.LOCAL, name)
        report = await engine.adapters(PinAdapter(reference))
        assert report.failure is None, report.failure
    await until(engine, lambda snapshot: snapshot.adapters[AdapterState.DEVICE] == len(names))


async def together(
    engine: DriverEngine, sent: Sequence[GenerateRequest]
) -> list[asyncio.Task[Completion]]:
    """Have requests reach the scheduler in this order, between the same two of its steps."""
    posted = threading.Event()

    def stay(scheduler: Scheduler, now: float) -> list[Event]:
        posted.wait(PATIENCE_S)
        return []

    engine._handle.post(stay)
    tasks: list[asyncio.Task[Completion]] = []
    for each in sent:
        tasks.append(asyncio.create_task(engine.generate(each, NOWHERE)))
        await until_true(lambda: len(engine._streams) == len(tasks))
    posted.set()
    return tasks


def digest_of(engine: DriverEngine, adapter: str) -> str:
    directory = engine._directory
    reference = AdapterReference(AdapterSource.LOCAL, adapter)
    return directory.fetched(directory._references[reference]).digest

"""A rank that starts before a driver asks for it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from configs.engine import EngineConfig
from deployments.rank.ahead import Expected, StartAhead, digest_of
from deployments.rank.messages import MeasuredMemory

BEFORE = MeasuredMemory(7, 10**9)
LIMIT_S = 10.0


@dataclass
class Host:
    """Notes what is allocated, and reports it."""

    memory: MeasuredMemory | Exception
    allocations: list[tuple[int, bool]] = field(default_factory=list)

    def measure(self) -> MeasuredMemory:
        if isinstance(self.memory, Exception):
            raise self.memory
        return self.memory

    def allocate(self, num_blocks: int, record: bool) -> Any:
        self.allocations.append((num_blocks, record))
        return f"{num_blocks} blocks"

    def start(self, memory: MeasuredMemory | None = None) -> StartAhead:
        config = EngineConfig.model_validate({"model": {"id": "made"}})
        expected = Expected(config, "folder", "digest", memory, 5)
        return StartAhead(expected, self.measure, self.allocate)


def test_with_the_memory_that_it_had_it_allocates_what_it_had() -> None:
    host = Host(BEFORE)
    start = host.start(BEFORE)
    assert str(start.allocated(5, False, LIMIT_S)) == "5 blocks"
    assert start.measured(LIMIT_S) is BEFORE
    assert host.allocations == [(5, False)]


@pytest.mark.parametrize("memory", [None, MeasuredMemory(6, 10**9), MeasuredMemory(7, 10**9)])
def test_with_other_memory_it_waits_for_what_the_driver_wants(
    memory: MeasuredMemory | None,
) -> None:
    host = Host(BEFORE)
    start = host.start(memory)
    assert start.measured(LIMIT_S) is BEFORE
    assert str(start.allocated(4, True, LIMIT_S)) == "4 blocks"
    assert host.allocations == [(4, True)]


@pytest.mark.parametrize("ask", [lambda x: x.measured(1), lambda x: x.allocated(4, True, 1)])
def test_a_fault_is_raised_where_a_driver_asks(ask: Callable[[StartAhead], object]) -> None:
    start = Host(OSError("no such file")).start()
    with pytest.raises(OSError, match="no such file"):
        ask(start)


def test_what_a_start_depends_on() -> None:
    configs = [
        EngineConfig.model_validate({"model": {"id": "made"}, "tensor_parallel": size})
        for size in (1, 1, 2)
    ]
    one, same, two = (digest_of(config, "a") for config in configs)
    assert one == same
    assert len({one, two, digest_of(configs[0], "b")}) == 3

"""Standby processes are started where every GPU has room for one."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, Queue
from typing import Any

import pytest
import ray

from configs.engine import EngineConfig
from deployments.rank.ahead import Expected
from deployments.rank.messages import MeasuredMemory
from deployments.rank.processes import Process
from deployments.rank.standby import (
    LEAST_FREE_BYTES,
    Known,
    RankProcess,
    StandbyRanks,
    expect,
)

BESIDE = RankProcess("n", Process(1, 1), ("0",))
KNOWN = Known("config", MeasuredMemory(1, None))
CONFIG = EngineConfig.model_validate({"model": {"id": "made"}})


@dataclass
class Answer:
    """A method of an actor whose replies are values instead of Ray's references."""

    value: int | str | None
    calls: list[Any] = field(default_factory=list)

    def remote(self, *given: object) -> int | str | None:
        self.calls.append(given)
        return self.value


class Rank:
    """An actor that says how much of its GPU is free."""

    def __init__(self, free: int | None) -> None:
        self.free_device_bytes = Answer(free)
        self.process = Answer(None)
        self.prepare = Answer(None)
        self.open_store = Answer("store")
        self.expect = Answer(None)


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replies are values, also for the threads that a test leaves: it ends behind them."""
    before = set(threading.enumerate())
    monkeypatch.setattr(ray, "get", lambda values, timeout=None: values)
    yield
    while own := set(threading.enumerate()) - before:
        for thread in own:
            with suppress(RuntimeError):  # it is listed before it has started
                thread.join()


@pytest.mark.parametrize(
    ("free", "number"),
    [
        ([LEAST_FREE_BYTES, LEAST_FREE_BYTES + 1], 2),
        ([LEAST_FREE_BYTES, LEAST_FREE_BYTES - 1], 0),
        ([None, None], 2),  # CPUs
    ],
)
@pytest.mark.usefixtures("answered")
def test_only_where_there_is_room(free: Sequence[int | None], number: int) -> None:
    started: list[Any] = []

    def spawn(rank: int, beside: RankProcess, known: Known) -> Rank:
        started.append((rank, beside, known))
        return Rank(None)

    processes = StandbyRanks(spawn)
    ranks = [Rank(bytes) for bytes in free]
    processes.prepare(ranks, [BESIDE] * 2, [KNOWN] * 2, CONFIG)
    assert started == [(rank, BESIDE, KNOWN) for rank in range(number)]


@pytest.mark.parametrize("ending", [StandbyRanks.take, StandbyRanks.end])
@pytest.mark.usefixtures("answered")
def test_they_start_soon_unless_the_ranks_are_gone_by_then(
    ending: Callable[[StandbyRanks], object],
) -> None:
    started: Queue[int] = Queue()

    def spawn(rank: int, beside: RankProcess, known: Known) -> Rank:
        started.put(rank)
        return Rank(None)

    for quiet_s, ends in ((0.2, True), (0.0, False)):
        processes = StandbyRanks(spawn, quiet_s)
        ranks: list[Any] = [Rank(None)]
        processes.soon(partial(processes.prepare, ranks, [BESIDE], [KNOWN], CONFIG))
        if ends:
            ending(processes)
            with pytest.raises(Empty):
                started.get(timeout=3 * quiet_s)
        else:
            assert started.get(timeout=30.0) == 0


def test_all_of_a_group_expect_a_start_by_one_store() -> None:
    ranks: list[Any] = [Rank(None), Rank(None)]
    starts = [Expected(CONFIG, "folder", "digest", MeasuredMemory(n, None), 1) for n in (1, 2)]
    expect(ranks, starts)
    assert [rank.expect.calls for rank in ranks] == [[(each, "store")] for each in starts]
    assert [len(rank.open_store.calls) for rank in ranks] == [1, 0]


def test_not_beside_ranks_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(values: object, timeout: float | None = None) -> object:
        raise ray.exceptions.ActorDiedError

    monkeypatch.setattr(ray, "get", lost)
    processes = StandbyRanks(lambda *_: pytest.fail("it started one"))
    processes.prepare([Rank(None)], [BESIDE], [KNOWN], CONFIG)
    assert processes.take() == []

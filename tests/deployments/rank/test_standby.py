"""Standby processes are started where every GPU has room for one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import ray

from deployments.rank.messages import MeasuredMemory
from deployments.rank.processes import Process
from deployments.rank.standby import LEAST_FREE_BYTES, Known, RankProcess, StandbyRanks

BESIDE = RankProcess("n", Process(1, 1), ("0",))
KNOWN = Known("config", MeasuredMemory(1, None))


@dataclass
class Answer:
    """A method of an actor whose replies are values instead of Ray's references."""

    value: int | None

    def remote(self, *given: object) -> int | None:
        return self.value


class Rank:
    """An actor that says how much of its GPU is free."""

    def __init__(self, free: int | None) -> None:
        self.free_device_bytes = Answer(free)
        self.process = Answer(None)
        self.prepare = Answer(None)


@pytest.mark.parametrize(
    ("free", "number"),
    [
        ([LEAST_FREE_BYTES, LEAST_FREE_BYTES + 1], 2),
        ([LEAST_FREE_BYTES, LEAST_FREE_BYTES - 1], 0),
        ([None, None], 2),  # CPUs
    ],
)
def test_only_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, free: Sequence[int | None], number: int
) -> None:
    monkeypatch.setattr(ray, "get", lambda values, timeout=None: values)
    started: list[Any] = []

    def spawn(rank: int, beside: RankProcess, known: Known) -> Rank:
        started.append((rank, beside, known))
        return Rank(None)

    processes = StandbyRanks(spawn)
    ranks = [Rank(bytes) for bytes in free]
    processes.prepare(ranks, [BESIDE] * 2, [KNOWN] * 2, "config")
    assert started == [(rank, BESIDE, KNOWN) for rank in range(number)]


def test_not_beside_ranks_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(values: object, timeout: float | None = None) -> object:
        raise ray.exceptions.ActorDiedError

    monkeypatch.setattr(ray, "get", lost)
    processes = StandbyRanks(lambda *_: pytest.fail("it started one"))
    processes.prepare([Rank(None)], [BESIDE], [KNOWN], "config")
    assert processes.take() == []

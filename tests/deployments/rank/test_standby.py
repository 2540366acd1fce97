"""Standby processes are started where every GPU has room for one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import ray

from deployments.rank.standby import LEAST_FREE_BYTES, RankProcess, StandbyRanks


@dataclass
class Answer:
    """A method of an actor whose replies are values instead of Ray's references."""

    value: int | None

    def remote(self) -> int | None:
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

    def spawn(rank: int, gpu: str | None) -> Rank:
        started.append((rank, gpu))
        return Rank(None)

    processes = StandbyRanks(spawn)
    processes.prepare([Rank(bytes) for bytes in free], [RankProcess("n", 1, ("0",))] * 2)
    assert len(started) == number


def test_not_beside_ranks_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(values: object, timeout: float | None = None) -> object:
        raise ray.exceptions.ActorDiedError

    monkeypatch.setattr(ray, "get", lost)
    processes = StandbyRanks(lambda rank, gpu: pytest.fail("it started one"))
    processes.prepare([Rank(None)], [RankProcess("n", 1, ())])
    assert processes.take() == []

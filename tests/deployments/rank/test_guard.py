"""A process that outlives its driver for some time, and never longer."""

import subprocess
import sys
from pathlib import Path

import pytest

from deployments.rank.guard import Guard
from deployments.rank.processes import Process, is_there, kill, this_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")

WAIT_S = 60.0
LIVES, ENDED = this_process(), Process(this_process().pid, this_process().started - 1)
"""ENDED has another process's number by now."""


class Watched:
    """A guard with a clock that is set by hand."""

    def __init__(self, driver: Process | None, keeper: Process | None = None) -> None:
        self.now = 100.0
        self.ends: list[int] = []
        self.num_unled = 0
        self.guard = Guard(driver, WAIT_S, keeper, self.unled, self.ends.append, lambda: self.now)

    def unled(self) -> None:
        self.num_unled += 1

    def ended_after(self, seconds: float) -> bool:
        self.now += seconds
        self.guard.look()
        return bool(self.ends)


def test_it_stays_beside_a_driver_that_lives() -> None:
    watched = Watched(LIVES)
    assert not watched.ended_after(10 * WAIT_S)
    assert not watched.guard.waits
    watched.guard.work()
    assert not watched.ended_after(10 * WAIT_S)


@pytest.mark.parametrize(
    ("driver", "works", "unled"),
    [(None, False, 2), (ENDED, False, 2), (LIVES, False, 0), (ENDED, True, 0)],
)
def test_it_says_that_it_has_no_driver_unless_it_works(
    driver: Process | None, works: bool, unled: int
) -> None:
    watched = Watched(driver, keeper=LIVES)
    if works:
        watched.guard.work()
    watched.ended_after(1.0)
    watched.ended_after(1.0)
    assert watched.num_unled == unled


@pytest.mark.parametrize("driver", [None, ENDED], ids=["none", "ended"])
def test_it_waits_for_another_driver(driver: Process | None) -> None:
    watched = Watched(driver)
    assert watched.guard.waits
    assert not watched.ended_after(WAIT_S)
    assert watched.ended_after(1.0)


@pytest.mark.parametrize(
    ("keeper", "ended"), [(LIVES, False), (ENDED, True)], ids=["lives", "ended"]
)
def test_its_keeper_needs_it_until_it_works(keeper: Process, ended: bool) -> None:
    watched = Watched(None, keeper)
    assert watched.guard.waits
    assert watched.ended_after(2 * WAIT_S) is ended
    assert watched.guard.acquire(ENDED)
    watched.guard.work()
    assert watched.ended_after(0.0)


def test_it_ends_with_the_driver_that_it_works_for() -> None:
    watched = Watched(ENDED)
    watched.guard.work()
    assert not watched.guard.waits
    assert not watched.guard.acquire(LIVES)
    assert watched.ended_after(0.0)


@pytest.mark.parametrize(
    ("before", "given"),
    [(None, True), (ENDED, True), (LIVES, False)],
    ids=["none", "ended", "lives"],
)
def test_only_a_driver_that_has_ended_loses_it(before: Process | None, given: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        started = int(Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[19])
        driver = Process(other.pid, started)
        watched = Watched(before)
        assert watched.guard.acquire(driver) is given
        assert not watched.guard.waits
        # The second acquire of a driver is the same one.
        assert watched.guard.acquire(driver) is given
        assert kill(driver, WAIT_S)
        other.wait()
    assert not is_there(driver)
    assert watched.guard.waits is given


def test_a_process_of_the_same_number_is_not_killed() -> None:
    assert kill(ENDED, WAIT_S)
    assert is_there(LIVES)

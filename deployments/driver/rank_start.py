"""Starts a group of ranks on a thread of its own, while the engine loop runs commands."""

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from deployments.rank.messages import LoadReport
from deployments.rank.transport import RankLinks

_ATTEMPTS = 2

logger = logging.getLogger("loray.driver.loop")


class RankGroup(Protocol):
    """Starts and kills the ranks (`RayRanks`)."""

    def start(self) -> tuple[RankLinks, list[LoadReport]]:
        """Start every rank; RanksLost when that fails."""
        ...

    def stop(self) -> None:
        """Kill every rank; a start may follow."""
        ...

    def release(self) -> None:
        """Kill every rank, and the processes that wait to take over."""
        ...

    def await_ends(self) -> None:
        """Wait until killed ranks have given their memory back, but not for long."""
        ...


class RankStart:
    """One start of a group, with a second attempt.

    result: the links and load reports, once they are there. fault: of the last attempt.
    """

    def __init__(self, group: RankGroup, ended: Callable[[], None]) -> None:
        """Begin; ended: called on the thread of the start when it has ended."""
        self.result: tuple[RankLinks, list[LoadReport]] | None = None
        self.fault = ""
        self._group = group
        self._notify = ended
        self._abandoned = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="restart-ranks", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the start goes on."""
        return self._thread.is_alive() and not self._ended.is_set()

    def abandon(self, timeout_s: float) -> None:
        """Make no further attempt, and wait for the present one."""
        self._abandoned = True
        self._thread.join(timeout_s)

    def _run(self) -> None:
        for _ in range(_ATTEMPTS):
            if self._abandoned:
                break
            try:
                self.result = self._group.start()
            except Exception as error:
                # The next attempt starts from nothing, whatever the fault was.
                logger.exception("the ranks did not start")
                self._group.stop()
                self.fault = f"{type(error).__name__}: {error}"
                continue
            break
        self._ended.set()
        self._notify()

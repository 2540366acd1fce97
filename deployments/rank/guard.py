"""Ends a rank's process that Ray would not end with its driver."""

import os
import threading
import time
from collections.abc import Callable

from deployments.rank.processes import Process, is_there

LOOK_S = 0.5
UNUSED_S = 30.0
"""How long a process without a driver waits for another one, and may hold a GPU's memory."""


class Guard:
    """Watches the driver of this process, on the same machine.

    While it stands by, the process outlives its driver for some time, and another driver may take
    it. Once it works for a driver, it ends with that one.
    """

    def __init__(
        self,
        driver: Process | None,
        wait_s: float,
        keeper: Process | None = None,
        unled: Callable[[], None] = lambda: None,
        end: Callable[[int], object] = os._exit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """driver: None if none has it yet. wait_s: how long it waits for one without its keeper.

        keeper: the driver of others that may need it, on the same machine too. unled: called at
        each look while it waits for a driver.
        """
        self._driver = driver
        self._keeper = keeper
        self._unled = unled
        self._wait_s = wait_s
        self._end = end
        self._clock = clock
        self._works = False
        self._alone_since = clock()
        self._lock = threading.Lock()

    def watch(self) -> None:
        """Look regularly, on a thread of its own."""
        threading.Thread(target=self._watch, name="guard", daemon=True).start()

    def acquire(self, driver: Process) -> bool:
        """Give the process to a driver; False while it has another that lives."""
        with self._lock:
            if self._driver != driver and (self._works or _lives(self._driver)):
                return False
            self._driver = driver
            return True

    @property
    def waits(self) -> bool:
        """Whether the process has no driver that lives."""
        return not self._works and not _lives(self._driver)

    def work(self) -> None:
        """End with the driver from now on."""
        self._works = True

    def look(self) -> None:
        """End the process if it is of no use any more."""
        with self._lock:
            led = _lives(self._driver)
            if led or (not self._works and _lives(self._keeper)):
                self._alone_since = self._clock()
            elif self._works or self._clock() - self._alone_since > self._wait_s:
                self._end(1)
            if not led and not self._works:
                self._unled()

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_S)
            self.look()


def _lives(process: Process | None) -> bool:
    return process is not None and is_there(process)

"""How far a long part of a start has come, in the log."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

logger = logging.getLogger("loray.progress")

SECONDS_A_LINE = 2.0
"""Between two lines; a part that is shorter logs nothing."""

SHOWN_S = 0.5
"""Seconds from which a part of a start is worth a line."""

T = TypeVar("T")


class Progress:
    """Logs what is done, how much of it, and how many seconds are left."""

    def __init__(
        self, what: str, total: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """what: in the plural. total: how many there are; None if that is not known."""
        self._what = what
        self._total = total
        self._clock = clock
        self._started = self._logged = clock()
        self._done = 0

    def add(self, detail: str = "") -> None:
        """Count one more; detail: of all so far, as "4.0 GB"."""
        self._done += 1
        now = self._clock()
        if now - self._logged < SECONDS_A_LINE:
            return
        self._logged = now
        seconds = now - self._started
        of, left = "", ""
        if self._total is not None:
            # What takes part in a start is of similar sizes, as layers are.
            rest = max(self._total - self._done, 0) * seconds / self._done
            of, left = f" of {self._total}", f", about {rest:.0f} s left"
        size = f" ({detail})" if detail else ""
        logger.info("%s: %d%s%s in %.0f s%s", self._what, self._done, of, size, seconds, left)


def counted(what: str, items: Sequence[T]) -> Iterator[T]:
    """The items, with lines in the log while the caller works on them."""
    progress = Progress(what, len(items))
    for item in items:
        yield item
        progress.add()


@contextmanager
def timed(part: str) -> Iterator[None]:
    """Log what a part of a start took, once it has ended; at debug level if that was little."""
    began = time.monotonic()
    yield
    seconds = time.monotonic() - began
    level = logging.INFO if seconds >= SHOWN_S else logging.DEBUG
    logger.log(level, "start: %s: %.2f s", part, seconds)

"""How many bytes each caller may have downloaded: a bucket that refills over an hour."""

import threading
import time
from collections.abc import Callable

_PERIOD_S = 3600.0


class DownloadBudget:
    """Bytes an hour for each payer; any thread may charge.

    A download begins while any are left, so one may be larger than what is left; what it takes
    beyond that is a debt, which the next ones wait for.
    """

    def __init__(self, bytes_per_hour: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Everybody begins with an hour's worth. `clock` counts seconds."""
        self._full = float(bytes_per_hour)
        self._clock = clock
        self._lock = threading.Lock()
        self._left: dict[str, tuple[float, float]] = {}

    def charge(self, payer: str, num_bytes: int) -> float:
        """Take the bytes and return 0, or take none and return the seconds until any are left."""
        now, rate = self._clock(), self._full / _PERIOD_S
        with self._lock:
            left, since = self._left.get(payer, (self._full, now))
            left = min(self._full, left + (now - since) * rate)
            if left <= 0:
                self._left[payer] = (left, now)
                return max(1.0, -left / rate)
            self._left[payer] = (left - num_bytes, now)
            return 0.0

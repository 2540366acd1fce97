"""A limit of the bytes that each caller's requests download in an hour."""

import threading
import time
from collections.abc import Callable

_PERIOD_S = 3600.0


class DownloadBudget:
    """A token bucket of bytes for each payer, refilled over an hour; any thread may charge.

    A download begins while any bytes are left, and may use more than are left. Then the next one
    waits until the balance is positive again.
    """

    def __init__(self, bytes_per_hour: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Start each payer with an hour's bytes; `clock` returns seconds."""
        self._full = float(bytes_per_hour)
        self._clock = clock
        self._lock = threading.Lock()
        self._left: dict[str, tuple[float, float]] = {}

    def charge(self, payer: str, num_bytes: int) -> float:
        """Charge the bytes and return 0, or charge nothing and return the seconds to wait."""
        now, rate = self._clock(), self._full / _PERIOD_S
        with self._lock:
            left, since = self._left.get(payer, (self._full, now))
            left = min(self._full, left + (now - since) * rate)
            if left <= 0:
                self._left[payer] = (left, now)
                return max(1.0, -left / rate)
            self._left[payer] = (left - num_bytes, now)
            return 0.0

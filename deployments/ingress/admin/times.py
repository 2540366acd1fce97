"""The times of commands, by which driver replicas know the younger of two."""

import time


class CommandTimes:
    """Times that are each later than the one before, also if the clock is set back."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        """Nanoseconds since the epoch."""
        self._last = max(time.time_ns(), self._last + 1)
        return self._last

"""Repeat calls that fail for a while: exponential back-off with jitter."""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from sources.base import Unreachable

_LONGEST_WAIT_S = 10.0

T = TypeVar("T")


def fault_of(error: Exception) -> str:
    """Return what a message says of a call that failed."""
    if isinstance(error, Unreachable):
        return str(error)
    status = getattr(getattr(error, "response", None), "status_code", None)
    return type(error).__name__ if status is None else f"answer {status}"


@dataclass(frozen=True)
class RetryPolicy:
    """How often and when a call is repeated.

    attempts: the most calls.
    backoff_s: the longest wait before the second one.
    stopping: set when the server stops.
    """

    attempts: int
    backoff_s: float
    stopping: threading.Event = field(default_factory=threading.Event)

    def call(self, request: Callable[[], T], is_transient: Callable[[Exception], bool]) -> T:
        """Return the request's result; Unreachable after the last attempt.

        Errors that are not transient are raised at once.
        """
        for attempt in range(self.attempts):
            self.check()
            try:
                return request()
            except Exception as error:
                # The source knows which of its errors are transient.
                if not is_transient(error):
                    raise
                last = error
            if attempt + 1 < self.attempts:
                self.wait(attempt)
        raise Unreachable(f"{fault_of(last)} after {self.attempts} attempts") from last

    def wait(self, attempt: int) -> None:
        """Sleep before the next attempt, for a random time, so that callers do not coincide."""
        longest = min(_LONGEST_WAIT_S, self.backoff_s * 2**attempt)
        self.stopping.wait(random.uniform(longest / 2, longest))

    def check(self) -> None:
        """Raise Unreachable if the server is stopping."""
        if self.stopping.is_set():
            raise Unreachable("this server is stopping")

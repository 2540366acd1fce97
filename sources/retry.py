"""Repeat calls that fail for a while: exponential back-off with jitter."""

import random
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TypeVar

from sources.base import Unreachable

_LONGEST_WAIT_S = 10.0
_TOO_MANY = 429
# Seconds until more requests are allowed, as in `"api";r=0;t=55`.
_RESET = re.compile(r";\s*t=(\d{1,9})\b")

T = TypeVar("T")


def fault_of(error: Exception) -> str:
    """Return what a message says of a call that failed."""
    if isinstance(error, Unreachable):
        return str(error)
    status = getattr(getattr(error, "response", None), "status_code", None)
    return type(error).__name__ if status is None else f"answer {status}"


def requested_wait(error: Exception) -> float:
    """Return for how many seconds a reply asks to be left alone; 0 if it does not.

    Most servers say it in `Retry-After`, the hub in `RateLimit`, which it sends with good replies
    too.
    """
    response = getattr(error, "response", None)
    if response is None:
        return 0.0
    value = response.headers.get("retry-after", "")
    if not value and response.status_code == _TOO_MANY:
        found = _RESET.search(response.headers.get("ratelimit", ""))
        value = "" if found is None else found[1]
    if value.isascii() and value.isdigit():
        return float(value)
    with suppress(ValueError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return 0.0


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
                self.wait(attempt, last)
        raise Unreachable(f"{fault_of(last)} after {self.attempts} attempts") from last

    def wait(self, attempt: int, fault: Exception) -> None:
        """Sleep before the next attempt, for a random time, so that callers do not coincide.

        At least as long as a reply asks for; Unreachable if that is too long for a request.
        """
        wanted = requested_wait(fault)
        if wanted > _LONGEST_WAIT_S:
            message = f"{fault_of(fault)}, to be tried again after {wanted:.0f} s"
            raise Unreachable(message) from fault
        longest = min(_LONGEST_WAIT_S, self.backoff_s * 2**attempt)
        self.stopping.wait(wanted + random.uniform(longest / 2, longest))

    def check(self) -> None:
        """Raise Unreachable if the server is stopping."""
        if self.stopping.is_set():
            raise Unreachable("this server is stopping")

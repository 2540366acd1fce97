"""Asking again when a fault may pass: exponential back-off with full jitter."""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from sources.base import Unreachable

_LONGEST_WAIT_S = 10.0

T = TypeVar("T")


@dataclass(frozen=True)
class RetryPolicy:
    """How often something is tried, and the longest wait in seconds before the second try.

    stopping: set when nobody waits for answers any more.
    """

    attempts: int
    backoff_s: float
    stopping: threading.Event = field(default_factory=threading.Event)

    def call(self, question: Callable[[], T], is_transient: Callable[[Exception], bool]) -> T:
        """The answer; Unreachable after the last attempt. Other faults are raised at once."""
        for attempt in range(self.attempts):
            self.check()
            try:
                return question()
            except Exception as error:
                # Which kinds may pass is the source's to say.
                if not is_transient(error):
                    raise
                last = error
            if attempt + 1 < self.attempts:
                self.wait(attempt)
        raise Unreachable(f"{type(last).__name__} after {self.attempts} attempts") from last

    def wait(self, attempt: int) -> None:
        """Sleep before the attempt after this one, callers at different lengths."""
        longest = min(_LONGEST_WAIT_S, self.backoff_s * 2**attempt)
        self.stopping.wait(random.uniform(longest / 2, longest))

    def check(self) -> None:
        """Unreachable when it is time to stop."""
        if self.stopping.is_set():
            raise Unreachable("this server is stopping")

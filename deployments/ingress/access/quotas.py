"""Quotas of a key: two buckets that fill by the minute."""

import time
from collections.abc import Callable

from deployments.contract import ErrorKind
from deployments.ingress.http.errors import RequestError

_MINUTE = 60.0

Clock = Callable[[], float]
Replicas = Callable[[], int]


def alone() -> int:
    """The number of replicas where there is one."""
    return 1


class Bucket:
    """Holds up to a minute's worth and fills evenly; what is taken may leave it in debt.

    Debt makes it exact: a request's tokens are known only when it has ended. Each of
    several replicas has an equal part of what a minute is worth, but always room for one.
    """

    def __init__(
        self, per_minute: int, clock: Clock = time.monotonic, replicas: Replicas = alone
    ) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._replicas = replicas
        self._level = max(1.0, self._rate)
        self._filled = clock()

    def seconds_until(self, wanted: float) -> float:
        """How long until it holds `wanted`; 0 if it does."""
        self._fill()
        return max(0.0, (wanted - self._level) * _MINUTE / self._rate)

    def take(self, amount: float) -> None:
        """Take this much, whatever it holds."""
        self._fill()
        self._level -= amount

    @property
    def _rate(self) -> float:
        """What this replica's bucket gains in a minute."""
        return self._per_minute / self._replicas()

    def _fill(self) -> None:
        now = self._clock()
        gained = (now - self._filled) * self._rate / _MINUTE
        self._level = min(max(1.0, self._rate), self._level + gained)
        self._filled = now


class Quota:
    """What one key may use on this ingress replica; None: without limit."""

    def __init__(
        self,
        requests: int | None,
        tokens: int | None,
        clock: Clock = time.monotonic,
        replicas: Replicas = alone,
    ) -> None:
        """Both by the minute, over all replicas."""
        self._requests = Bucket(requests, clock, replicas) if requests else None
        self._tokens = Bucket(tokens, clock, replicas) if tokens else None

    def count_request(self) -> None:
        """One request more; raises QUOTA, and counts nothing, when there have been too many."""
        if self._requests is None:
            return
        _demand(self._requests, 1.0, "requests")
        self._requests.take(1.0)

    def admit_tokens(self) -> None:
        """Raise QUOTA while the tokens of earlier requests have used up the minute."""
        if self._tokens is not None:
            _demand(self._tokens, 1.0, "tokens")

    def take_tokens(self, count: int) -> None:
        """Charge tokens, those of a prompt before it runs and of an answer after."""
        if self._tokens is not None:
            self._tokens.take(count)


def _demand(bucket: Bucket, amount: float, what: str) -> None:
    wait = bucket.seconds_until(amount)
    if wait > 0:
        message = f"this API key has used up its {what} per minute: try again later"
        raise RequestError(ErrorKind.QUOTA, message, retry_after_s=wait)

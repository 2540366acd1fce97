"""Quotas of an API key: a token bucket for requests, and one for tokens."""

import time
from collections.abc import Callable

from deployments.contract import ErrorKind
from deployments.ingress.http.errors import RequestError

_MINUTE = 60.0

Clock = Callable[[], float]
Replicas = Callable[[], int]


def alone() -> int:
    """The number of replicas of a server that has only one."""
    return 1


class Bucket:
    """A token bucket with a capacity of one minute; its level may become negative.

    A request's tokens are known only when it has ended, so they are taken then, even if that leaves
    a debt. Each replica has an equal part of the rate, but a capacity of at least 1.
    """

    def __init__(
        self, per_minute: int, clock: Clock = time.monotonic, replicas: Replicas = alone
    ) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._replicas = replicas
        self._level = max(1.0, self._rate)
        self._filled = clock()

    def seconds_until(self, amount: float) -> float:
        """Seconds until the level is `amount`; 0 if it is already."""
        self._fill()
        return max(0.0, (amount - self._level) * _MINUTE / self._rate)

    def take(self, amount: float) -> None:
        """Take this much, whatever the level."""
        self._fill()
        self._level -= amount

    @property
    def _rate(self) -> float:
        """What this replica's bucket gains in a minute: the number of replicas may change."""
        return self._per_minute / self._replicas()

    def _fill(self) -> None:
        now = self._clock()
        gained = (now - self._filled) * self._rate / _MINUTE
        # A capacity of at least 1: with many replicas the rate alone could never admit a request.
        self._level = min(max(1.0, self._rate), self._level + gained)
        self._filled = now


class Quota:
    """The quota of one key on this ingress replica."""

    def __init__(
        self,
        requests: int | None,
        tokens: int | None,
        clock: Clock = time.monotonic,
        replicas: Replicas = alone,
    ) -> None:
        """requests, tokens: a minute, over all replicas; None: unlimited."""
        self._requests = Bucket(requests, clock, replicas) if requests else None
        self._tokens = Bucket(tokens, clock, replicas) if tokens else None

    @property
    def counts_tokens(self) -> bool:
        """Whether tokens are limited."""
        return self._tokens is not None

    def count_request(self) -> None:
        """Count a request; raises QUOTA, without counting it, if there were too many."""
        if self._requests is None:
            return
        _demand(self._requests, 1.0, "requests")
        self._requests.take(1.0)

    def admit_tokens(self) -> None:
        """Raise QUOTA while earlier requests have used up the tokens."""
        if self._tokens is not None:
            _demand(self._tokens, 1.0, "tokens")

    def take_tokens(self, count: int) -> None:
        """Charge tokens: a prompt's before the request runs, the answer's afterwards."""
        if self._tokens is not None:
            self._tokens.take(count)


def _demand(bucket: Bucket, amount: float, what: str) -> None:
    wait = bucket.seconds_until(amount)
    if wait > 0:
        message = f"this API key has used up its {what} per minute: try again later"
        raise RequestError(ErrorKind.QUOTA, message, retry_after_s=wait)

"""Trials: whom the ranks are lost by, when they are lost again and again.

A loss tells of a request only that it was involved: a plan in flight named it, or its adapter
was on its way. Whoever was involved in two losses in a row, without its proof (PROOF_TOKENS new
tokens) between them, is a suspect, and suspects are tried: one group of them runs and nobody
else. Who has given his proof stands aside. A group that is lost again is halved. So one request
among n that breaks every step is found after 2 + ceil(log2 n) losses, and once more for
certainty; it ends when it was alone at MAX_ALONE of MAX_LOSSES losses. All others are only
postponed.

Requests that break the ranks only in company give their proof and meet again. Each trial asks
for four times as many tokens as the one before, so there are few of them before one ends.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from configs.wire.adapters import AdapterKey
from scheduler.admission.admission_queue import AdmissionQueue
from scheduler.admission.rate_limits import QueueKey
from scheduler.events import RanksFailure
from scheduler.request import Request, Status
from scheduler.running import RunningRequests

MAX_LOSSES = 3
"""Losses in a row that a request may have been involved in, at the least, when it ends by them."""

MAX_ALONE = 2
"""How many of them it was alone in."""


class CrashIsolation:
    """Who may wait in his queue: everybody, or while suspects are tried one group of them.

    active: suspects are tried. While they are, whoever waits and is not of the present group is
    set aside, so that no step is made for him and no adapter moved.
    """

    def __init__(self, turns: AdmissionQueue) -> None:
        """Start without suspicion."""
        self.active = False
        self._turns = turns
        self._present: dict[int, Request] = {}
        self._later: deque[list[Request]] = deque()
        self._aside: dict[int, Request] = {}

    def __len__(self) -> int:
        """How many requests wait, set aside or not."""
        return len(self._turns.queues) + len(self._turns.held) + len(self._aside)

    def __iter__(self) -> Iterator[Request]:
        """All waiting requests."""
        yield from self._turns.queues
        yield from self._turns.held.values()
        yield from self._aside.values()

    @property
    def num_suspects(self) -> int:
        """How many requests are or will be tried."""
        groups = (self._present.values(), *self._later)
        return sum(not _is_done(request) for group in groups for request in group)

    def is_full(self, key: QueueKey, limit: int) -> bool:
        """Whether another request of this adapter is one too many where `limit` may wait."""
        if self.active:
            return len(self) >= limit
        return self._turns.queues.is_full(key, max(limit - len(self._turns.held), 0))

    def wait(self, request: Request) -> None:
        """Let a request wait that is new, or that holds nothing on the ranks any more."""
        if self.active and request.serial not in self._present:
            self._aside[request.serial] = request
        else:
            self._queue(request)

    def leave(self, request: Request) -> None:
        """The request ended while it waited."""
        if self._aside.pop(request.serial, None) is None:
            self._turns.leave(request)

    def lost(
        self, ran: Sequence[Request], moved: Sequence[AdapterKey]
    ) -> dict[Request, RanksFailure]:
        """Have all wait again who ran, and count the loss; returns who must end by it.

        moved: the adapters that were on their way. Where that tells of nobody, it may be any who
        waited.
        """
        waited = list(self._turns.queues)
        involved = [each for key in moved for each in self._turns.queues.waiting_for(key)]
        involved += [request for request in ran if request.in_flight]
        involved += self._turns.held.values()  # Their matchers were being made.
        for request in self._turns.release():
            self.wait(request)
        for request in ran:
            request.rewind()
            self.wait(request)
        involved = involved or waited
        for request in involved:
            request.count_loss(alone=len(involved) == 1)
        suspects = sorted((r for r in involved if r.losses > 1), key=lambda each: each.serial)
        guilty = [r for r in suspects if r.losses >= MAX_LOSSES and r.alone >= MAX_ALONE]
        if self.active or suspects:
            self._try(suspects)
        return {request: _failure(request) for request in guilty}

    def conduct(self, running: RunningRequests) -> None:
        """Before a step: who has given his proof makes room, then the next group comes."""
        if not self.active:
            return
        for request in [r for r in self._present.values() if _is_done(r)]:
            del self._present[request.serial]
            if request.status is Status.RUNNING:
                running.preempt(request)
            elif request.status is Status.WAITING:
                self._put_aside(request)
        if not self._present and not running.num_held:
            self._call_next()

    def check(self) -> None:
        """Assert that requests are set aside only while others are tried."""
        queued = {request.serial for request in self._turns.queues}
        assert queued.isdisjoint(self._aside), "a request waits twice"
        assert self.active or not (self._aside or self._present or self._later)
        assert not self.active or queued <= self._present.keys(), "not of the present group"

    def _try(self, suspects: list[Request]) -> None:
        """Begin a trial, or go on with the present group's halves."""
        if not self.active:
            for request in suspects:
                request.trials += 1
        names = {request.serial for request in suspects}
        others = [r for r in self._present.values() if r.serial not in names and not _is_done(r)]
        self._present = {}
        self.active = self._turns.shares.lenient = True
        for request in list(self._turns.queues):
            self._put_aside(request)
        half = (len(suspects) + 1) // 2
        for group in (others, suspects[half:], suspects[:half]):
            self._later.appendleft(group)

    def _call_next(self) -> None:
        """Queue the next group; after the last one everybody."""
        while self._later and not self._present:
            group = self._later.popleft()
            self._present = {r.serial: r for r in group if r.status is not Status.ENDED}
        self.active = self._turns.shares.lenient = bool(self._present)
        for serial in list(self._present) or sorted(self._aside):
            self._queue(self._aside.pop(serial))

    def _put_aside(self, request: Request) -> None:
        self._turns.leave(request)
        self._aside[request.serial] = request

    def _queue(self, request: Request) -> None:
        if request.first_scheduled is None and not request.aside:
            self._turns.queues.append(request)
        else:
            self._turns.queues.bring_back(request)
        request.aside = False
        self._turns.enlist(request)


def _is_done(request: Request) -> bool:
    return not request.losses or request.status is Status.ENDED


def _failure(request: Request) -> RanksFailure:
    return RanksFailure(
        f"the ranks failed {request.losses} times in a row while this request ran, "
        f"{request.alone} times while nothing else did"
    )

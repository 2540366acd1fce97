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
        self._admission = turns
        self._group: dict[int, Request] = {}
        self._next_groups: deque[list[Request]] = deque()
        self._held_back: dict[int, Request] = {}

    def __len__(self) -> int:
        """How many requests wait, set aside or not."""
        return (
            len(self._admission.queues)
            + len(self._admission.waiting_for_matcher)
            + len(self._held_back)
        )

    def __iter__(self) -> Iterator[Request]:
        """All waiting requests."""
        yield from self._admission.queues
        yield from self._admission.waiting_for_matcher.values()
        yield from self._held_back.values()

    @property
    def num_isolated(self) -> int:
        """How many requests are or will be tried."""
        groups = (self._group.values(), *self._next_groups)
        return sum(not _is_done(request) for group in groups for request in group)

    def is_full(self, key: QueueKey, limit: int) -> bool:
        """Whether another request of this adapter is one too many where `limit` may wait."""
        if self.active:
            return len(self) >= limit
        return self._admission.queues.is_full(
            key, max(limit - len(self._admission.waiting_for_matcher), 0)
        )

    def enqueue(self, request: Request) -> None:
        """Let a request wait that is new, or that holds nothing on the ranks any more."""
        if self.active and request.serial not in self._group:
            self._held_back[request.serial] = request
        else:
            self._queue(request)

    def remove(self, request: Request) -> None:
        """The request ended while it waited."""
        if self._held_back.pop(request.serial, None) is None:
            self._admission.remove(request)

    def ranks_lost(
        self, ran: Sequence[Request], moved: Sequence[AdapterKey]
    ) -> dict[Request, RanksFailure]:
        """Have all wait again who ran, and count the loss; returns who must end by it.

        moved: the adapters that were on their way. Where that tells of nobody, it may be any who
        waited.
        """
        waited = list(self._admission.queues)
        involved = [each for key in moved for each in self._admission.queues.waiting_for(key)]
        involved += [request for request in ran if request.in_flight]
        involved += self._admission.waiting_for_matcher.values()  # Their matchers were being made.
        for request in self._admission.release_for_matcher():
            self.enqueue(request)
        for request in ran:
            request.rewind()
            self.enqueue(request)
        involved = involved or waited
        for request in involved:
            request.count_loss(alone=len(involved) == 1)
        suspects = sorted((r for r in involved if r.losses > 1), key=lambda each: each.serial)
        guilty = [r for r in suspects if r.losses >= MAX_LOSSES and r.losses_alone >= MAX_ALONE]
        if self.active or suspects:
            self._start_round(suspects)
        return {request: _failure(request) for request in guilty}

    def prepare_step(self, running: RunningRequests) -> None:
        """Before a step: who has given his proof makes room, then the next group comes."""
        if not self.active:
            return
        for request in [r for r in self._group.values() if _is_done(r)]:
            del self._group[request.serial]
            if request.status is Status.RUNNING:
                running.preempt(request)
            elif request.status is Status.WAITING:
                self._hold_back(request)
        if not self._group and not running.num_held:
            self._next_group()

    def check(self) -> None:
        """Assert that requests are set aside only while others are tried."""
        queued = {request.serial for request in self._admission.queues}
        assert queued.isdisjoint(self._held_back), "a request waits twice"
        assert self.active or not (self._held_back or self._group or self._next_groups)
        assert not self.active or queued <= self._group.keys(), "not of the present group"

    def _start_round(self, suspects: list[Request]) -> None:
        """Begin a trial, or go on with the present group's halves."""
        if not self.active:
            for request in suspects:
                request.isolation_rounds += 1
        names = {request.serial for request in suspects}
        others = [r for r in self._group.values() if r.serial not in names and not _is_done(r)]
        self._group = {}
        self.active = self._admission.rate_limits.ignores_rates = True
        for request in list(self._admission.queues):
            self._hold_back(request)
        half = (len(suspects) + 1) // 2
        for group in (others, suspects[half:], suspects[:half]):
            self._next_groups.appendleft(group)

    def _next_group(self) -> None:
        """Queue the next group; after the last one everybody."""
        while self._next_groups and not self._group:
            group = self._next_groups.popleft()
            self._group = {r.serial: r for r in group if r.status is not Status.ENDED}
        self.active = self._admission.rate_limits.ignores_rates = bool(self._group)
        for serial in list(self._group) or sorted(self._held_back):
            self._queue(self._held_back.pop(serial))

    def _hold_back(self, request: Request) -> None:
        self._admission.remove(request)
        self._held_back[request.serial] = request

    def _queue(self, request: Request) -> None:
        if request.first_scheduled is None and not request.waiting_for_matcher:
            self._admission.queues.append(request)
        else:
            self._admission.queues.requeue(request)
        request.waiting_for_matcher = False
        self._admission.enqueue(request)


def _is_done(request: Request) -> bool:
    return not request.losses or request.status is Status.ENDED


def _failure(request: Request) -> RanksFailure:
    return RanksFailure(
        f"the ranks failed {request.losses} times in a row while this request ran, "
        f"{request.losses_alone} times while nothing else did"
    )

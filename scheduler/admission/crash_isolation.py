"""CrashIsolation: find the request that kills the ranks, when they are lost again and again.

A request is involved in a loss when a plan in flight named it or its adapter was being moved. A
request that was involved in two losses in a row, without PROOF_TOKENS new tokens between them, is
isolated: isolated requests run in groups while all others are held back. A request that gets its
tokens is cleared. A group that is lost again is split in two. A request that was lost alone
MAX_ALONE times, in MAX_LOSSES losses, ends. docs/design/crash_isolation.md gives the bounds.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from configs.wire.adapters import AdapterKey
from scheduler.admission.admission_queue import AdmissionQueue
from scheduler.admission.rate_limits import QueueKey
from scheduler.events import RanksFailure
from scheduler.request import Request, Status

MAX_LOSSES = 3
"""A request ends by a loss only when it was involved in at least so many losses in a row..."""

MAX_ALONE = 2
"""...and was the only one involved in so many of them."""


class CrashIsolation:
    """Which requests may wait in their queues: all, or during isolation those of one group.

    active: isolation is on. Requests outside the present group are held back, so that no step
    computes them and no adapter is moved for them.
    """

    def __init__(self, admission: AdmissionQueue) -> None:
        self.active = False
        self._admission = admission
        self._group: dict[int, Request] = {}
        self._next_groups: deque[list[Request]] = deque()
        self._held_back: dict[int, Request] = {}

    def __len__(self) -> int:
        """How many requests wait, held back or not."""
        admission = self._admission
        held = len(self._held_back) + len(admission.waiting_for_matcher)
        return len(admission.queues) + held

    def __iter__(self) -> Iterator[Request]:
        """All waiting requests."""
        yield from self._admission.waiting
        yield from self._held_back.values()

    @property
    def num_isolated(self) -> int:
        """How many requests run or will run in isolation."""
        groups = (self._group.values(), *self._next_groups)
        return sum(not _is_done(request) for group in groups for request in group)

    def is_full(self, key: QueueKey, limit: int) -> bool:
        """Whether another request of this adapter is too many where `limit` may wait."""
        if self.active:
            return len(self) >= limit
        return self._admission.queues.is_full(
            key, max(limit - len(self._admission.waiting_for_matcher), 0)
        )

    def enqueue(self, request: Request) -> None:
        """Have a request wait that is new, or that holds nothing on the ranks any more."""
        if self.active and request.serial not in self._group:
            self._held_back[request.serial] = request
        else:
            self._queue(request)

    def remove(self, request: Request) -> None:
        """The request ended while it waited."""
        if self._held_back.pop(request.serial, None) is None:
            self._admission.remove(request)

    def ranks_lost(
        self, ran: Sequence[Request], moved: Sequence[AdapterKey], wanted: bool = False
    ) -> dict[Request, RanksFailure]:
        """Put all running requests back into their queues and count the loss, unless `wanted`.

        ran: the requests that held batch slots. moved: the adapters that were being staged or
        loaded. If that involves no request, any of those that waited may be the cause. Returns the
        requests that must end by the loss.
        """
        # Taken before the queues change below.
        waited = list(self._admission.queues)
        involved = [each for key in moved for each in self._admission.queues.waiting_for(key)]
        involved += [request for request in ran if request.in_flight]
        # The ranks were preparing the matchers of these.
        involved += self._admission.waiting_for_matcher.values()
        for request in self._admission.release_for_matcher():
            self.enqueue(request)
            self._admission.end_hold(request)
        for request in ran:
            request.rewind()
            self.enqueue(request)
        if wanted:
            return {}
        involved = involved or waited
        for request in involved:
            request.count_loss(alone=len(involved) == 1)
        isolated = sorted((r for r in involved if r.losses > 1), key=lambda each: each.serial)
        failed = [r for r in isolated if r.losses >= MAX_LOSSES and r.losses_alone >= MAX_ALONE]
        if self.active or isolated:
            self._start_round(isolated)
        return {request: _failure(request) for request in failed}

    def take_cleared(self) -> list[Request]:
        """Take cleared requests out of the group; returns those that run and must be preempted."""
        cleared = [request for request in self._group.values() if _is_done(request)]
        for request in cleared:
            del self._group[request.serial]
            # The group must run without it: a waiting one is held back, a running one preempted.
            if request.status is Status.WAITING:
                self._hold_back(request)
        return [request for request in cleared if request.status is Status.RUNNING]

    def next_group(self) -> None:
        """If the group is done, queue the next one; after the last one, all requests."""
        if self._group:
            return
        while self._next_groups and not self._group:
            group = self._next_groups.popleft()
            self._group = {r.serial: r for r in group if r.status is not Status.ENDED}
        self.active = self._admission.rate_limits.ignores_rates = bool(self._group)
        for serial in list(self._group) or sorted(self._held_back):
            self._queue(self._held_back.pop(serial))

    def check(self) -> None:
        """Assert that requests are held back only during isolation."""
        queued = {request.serial for request in self._admission.queues}
        assert queued.isdisjoint(self._held_back), "a request waits twice"
        assert self.active or not (self._held_back or self._group or self._next_groups)
        assert not self.active or queued <= self._group.keys(), "not of the present group"

    def _start_round(self, isolated: list[Request]) -> None:
        """Start isolation, or continue it with the present group in two."""
        if not self.active:
            for request in isolated:
                request.isolation_rounds += 1
        names = {request.serial for request in isolated}
        others = [r for r in self._group.values() if r.serial not in names and not _is_done(r)]
        self._group = {}
        self.active = self._admission.rate_limits.ignores_rates = True
        for request in list(self._admission.queues):
            self._hold_back(request)
        # Members of the lost group that were not involved in the loss run after these two groups.
        middle = (len(isolated) + 1) // 2
        for group in (others, isolated[middle:], isolated[:middle]):
            self._next_groups.appendleft(group)

    def _hold_back(self, request: Request) -> None:
        self._admission.remove(request)
        self._held_back[request.serial] = request

    def _queue(self, request: Request) -> None:
        # A request that was admitted, or was next before, goes ahead of new ones.
        if request.first_scheduled is None and not request.waiting_for_matcher:
            self._admission.queues.append(request)
        else:
            self._admission.queues.requeue(request)
        request.waiting_for_matcher = False
        self._admission.enqueue(request)


def _is_done(request: Request) -> bool:
    """Whether the request is cleared (its losses were forgotten) or has ended."""
    return not request.losses or request.status is Status.ENDED


def _failure(request: Request) -> RanksFailure:
    return RanksFailure(
        f"the ranks failed {request.losses} times in a row while this request ran, "
        f"{request.losses_alone} times while nothing else did"
    )

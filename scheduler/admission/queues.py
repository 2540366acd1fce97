"""AdapterQueues: one queue for each adapter, served by deficit round-robin in tokens.

The round takes one queue after the other. If a queue's first request costs more than its credit, it
earns its quantum (quantum_tokens times its weight), and the round goes on. Each priority has a
round of its own, and the highest one is served; a lower one that has seen PASSED_OVER requests of
higher ones admitted is served once. docs/design/fairness.md gives the bounds.

If a queue's first request is a background one, the queue is in a round below all others, which is
never due: background requests take what the others leave.

A queue is in one QueueState. The round sees only those that admit; those that wait for room
on the device are pending loads, ordered by when they began to wait (each priority counts as a
number of steps waited).
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum
from itertools import islice
from math import ceil

from configs.runtime import MAX_PRIORITY, AdapterShare
from configs.wire.adapters import AdapterKey
from scheduler.admission.rate_limits import QueueKey, RateLimits
from scheduler.request import FIRST_BACKGROUND, Request

PASSED_OVER = 16
"""Requests of higher priorities that are admitted before a lower priority is served once."""

BACKGROUND = -MAX_PRIORITY - 1
"""The priority of background requests, below that of any adapter."""


def cost(request: Request) -> int:
    """The most tokens that a new request may take; a preempted one has paid already."""
    return 0 if request.first_scheduled is not None else request.max_total


class QueueState(Enum):
    """What a queue waits for; docs/architecture.md draws the transitions."""

    NEW = "not looked at yet"
    ADMITS = "the round to come to it"
    WAITS_FOR_DEVICE = "room on the device: a pending load"
    WAITS_FOR_BYTES = "staging, or the copy to the device"
    OVER_LIMIT = "its rate limit, or a queue that shares the limit and comes first"


class AdapterQueue:
    """The waiting requests of one adapter: those that were preempted first, then the new ones.

    Background requests come after all others, again the preempted ones first.

    credit: tokens that it may still admit before the round passes on and it earns its quantum.
    state: what it waits for. AdapterQueues.enter alone changes it.
    pending_load: its sort key among the pending loads: (the step since which it waits, less the
    steps that its priority counts for; a number that breaks ties). None until it waits for the
    device, and again once a request was admitted.
    pending_since: the step since which it waits for the device.
    entered: its priority when it entered its state.
    """

    def __init__(self, key: QueueKey, share: AdapterShare) -> None:
        self.key = key
        self.share = share
        self.credit = 0.0
        self.state = QueueState.NEW
        self.pending_load: tuple[int, int] | None = None
        self.pending_since = 0
        self.entered = share.priority
        self._resumed: list[Request] = []
        self._fresh: OrderedDict[int, Request] = OrderedDict()
        self._background: OrderedDict[int, Request] = OrderedDict()

    def __len__(self) -> int:
        """How many requests wait."""
        return len(self._resumed) + len(self._fresh) + len(self._background)

    def __iter__(self) -> Iterator[Request]:
        """The requests in the order in which they will be served."""
        # The serials of background requests are above all others.
        num_online = bisect_left(self._resumed, FIRST_BACKGROUND, key=lambda each: each.serial)
        yield from self._resumed[:num_online]
        yield from self._fresh.values()
        yield from self._resumed[num_online:]
        yield from self._background.values()

    @property
    def priority(self) -> int:
        """That of its first request."""
        return BACKGROUND if self.first().background else self.share.priority

    def append(self, request: Request) -> None:
        """Add a new request at the back."""
        line = self._background if request.background else self._fresh
        line[request.serial] = request

    def requeue(self, request: Request) -> None:
        """Add a preempted request at the front, behind older ones of its kind."""
        insort(self._resumed, request, key=lambda each: each.serial)

    def first(self) -> Request:
        """The request to serve next."""
        if self._resumed and not (self._fresh and self._resumed[0].background):
            return self._resumed[0]
        return next(iter((self._fresh or self._background).values()))

    def remove(self, request: Request) -> None:
        """Take one request out, wherever it is in the queue."""
        line = self._background if request.background else self._fresh
        if line.pop(request.serial, None) is None:
            self._resumed.remove(request)


class _Round:
    """The queues of one priority that admit, the next one first.

    passed_over: requests of higher priorities that were admitted since one of these was.
    """

    def __init__(self) -> None:
        self.ring: OrderedDict[QueueKey, AdapterQueue] = OrderedDict()
        self.passed_over = 0

    def next_request(self, quantum_tokens: int) -> Request:
        """The first request that its queue can pay for; queues that cannot earn their quantum."""
        while True:
            for _ in range(len(self.ring)):
                key, queue = next(iter(self.ring.items()))
                request = queue.first()
                if cost(request) <= queue.credit:
                    return request
                queue.credit += quantum_tokens * queue.share.weight
                self.ring.move_to_end(key)
            # One round was not enough for any queue: the next ones are computed, not walked.
            self._skip(quantum_tokens)

    def _skip(self, quantum_tokens: int) -> None:
        """Go forward at once through the rounds in which no queue can pay: bounded time a call."""
        quanta = [(queue, quantum_tokens * queue.share.weight) for queue in self.ring.values()]
        rounds = min(ceil((cost(q.first()) - q.credit) / quantum) for q, quantum in quanta)
        for queue, quantum in quanta if rounds > 0 else ():
            queue.credit += rounds * quantum


class AdapterQueues:
    """All queues, their states, and which request is next."""

    def __init__(self, quantum_tokens: int, rate_limits: RateLimits | None = None) -> None:
        self.quantum_tokens = quantum_tokens
        self._rate_limits = rate_limits or RateLimits()
        self._queues: dict[QueueKey, AdapterQueue] = {}
        self._rounds: dict[int, _Round] = {}
        self._pending_loads: list[tuple[tuple[int, int], AdapterKey]] = []
        self._num_pending = 0
        self._num_waiting = 0
        self._num_background = 0

    def __len__(self) -> int:
        """How many requests wait, whatever they wait for."""
        return self._num_waiting

    @property
    def num_online(self) -> int:
        """How many of them are no background requests."""
        return self._num_waiting - self._num_background

    def __iter__(self) -> Iterator[Request]:
        """All waiting requests, adapter by adapter."""
        for queue in self._queues.values():
            yield from queue

    def __contains__(self, key: QueueKey) -> bool:
        """Whether any request of this adapter waits."""
        return key in self._queues

    @property
    def keys(self) -> list[QueueKey]:
        """The adapters that requests wait for."""
        return list(self._queues)

    @property
    def num_pending_loads(self) -> int:
        """How many adapters wait for room on the device."""
        return len(self._pending_loads)

    def is_full(self, key: QueueKey, limit: int) -> bool:
        """Whether another request of this adapter is too many where `limit` may wait.

        When `limit` wait, an adapter with less than an equal part of them may still queue, so that
        one adapter's flood does not have the others refused. At most twice the limit wait.
        Background requests do not count: those that send them bound their number.
        """
        if self.num_online < limit:
            return False
        own = sum(not request.background for request in self._queues.get(key, ()))
        return own * len(self._queues) >= limit or self.num_online >= 2 * limit

    def waiting_for(self, key: QueueKey) -> list[Request]:
        """The requests of one adapter, in the order in which they will be served."""
        return list(self._queues.get(key, ()))

    def append(self, request: Request) -> None:
        """Queue a new request."""
        queue = self._queue(request.adapter)
        queue.append(request)
        self._added(queue, request)

    def requeue(self, request: Request) -> None:
        """Queue a request that was admitted before ahead of all new ones of its adapter."""
        queue = self._queue(request.adapter)
        queue.requeue(request)
        self._added(queue, request)

    def remove(self, request: Request) -> None:
        """Take a request out: it is admitted, or it ended while it waited."""
        queue = self._queues[request.adapter]
        queue.remove(request)
        self._num_waiting -= 1
        self._num_background -= request.background
        if not len(queue):
            self._leave_state(queue)
            del self._queues[queue.key]
        elif queue.state is QueueState.ADMITS:
            self._change_rounds(queue)

    def admit(self, request: Request) -> None:
        """Take out the next request and charge its queue."""
        queue = self._queues[request.adapter]
        queue.credit -= cost(request)
        for priority, each in self._rounds.items():
            if priority < queue.entered:
                each.passed_over += 1
        self._rounds[queue.entered].passed_over = 0
        # It was served: if it waits for the device again, it waits from then on.
        queue.pending_load = None
        self.remove(request)

    def next_request(self) -> Request | None:
        """The request to admit next; the same one until something changes."""
        if not self._rounds:
            return None
        highest = max(self._rounds)
        # A lower priority that was passed over too often goes first, the most neglected one.
        due = [
            (each.passed_over, priority)
            for priority, each in self._rounds.items()
            if BACKGROUND < priority < highest and each.passed_over >= PASSED_OVER
        ]
        priority = max(due)[1] if due else highest
        return self._rounds[priority].next_request(self.quantum_tokens)

    def enter(
        self, key: QueueKey, state: QueueState, step: int = 0, priority_steps: int = 0
    ) -> None:
        """Move a queue to a state.

        step: now; the pending load of a queue that begins to wait for the device starts here.
        priority_steps: steps of waiting that each priority counts for. A queue that waited for the
        device before, and has admitted nothing since, keeps its sort key.
        """
        queue = self._queues[key]
        self._leave_state(queue)
        queue.state, queue.entered = state, queue.priority
        if state is QueueState.ADMITS:
            self._rounds.setdefault(queue.entered, _Round()).ring[key] = queue
        elif state is QueueState.WAITS_FOR_DEVICE:
            assert key is not None, "the base model needs no room on the device"
            if queue.pending_load is None:
                self._num_pending += 1
                queue.pending_since = step
                started = step - priority_steps * queue.entered
                queue.pending_load = (started, self._num_pending)
            insort(self._pending_loads, (queue.pending_load, key))

    def admits(self, key: QueueKey) -> bool:
        """Whether the queue takes part in a round."""
        queue = self._queues.get(key)
        return queue is not None and queue.state is QueueState.ADMITS

    def pending_loads(self, limit: int) -> list[AdapterKey]:
        """The first `limit` adapters that wait for room on the device, longest wait first."""
        return [key for _, key in islice(self._pending_loads, limit)]

    def has_online(self, key: AdapterKey) -> bool:
        """Whether any request that waits for this adapter is no background request."""
        return self._queues[key].priority != BACKGROUND

    def pending_since(self, key: AdapterKey) -> int | None:
        """The step since which the adapter waits for the device; None if it does not."""
        queue = self._queues[key]
        return None if queue.pending_load is None else queue.pending_since

    def update_shares(self) -> None:
        """Read all shares again; the caller must then `enter` a state for each queue."""
        for queue in self._queues.values():
            self._leave_state(queue)
            queue.state = QueueState.NEW
            queue.share = self._rate_limits.share_of(queue.key)

    def check(self) -> None:
        """Assert that every queue is where its state says, and that requests are counted."""
        assert self._num_waiting == sum(len(queue) for queue in self._queues.values())
        assert self._num_background == sum(request.background for request in self)
        assert all(len(queue) for queue in self._queues.values()), "an empty queue"
        assert all(each.ring for each in self._rounds.values()), "an empty round"
        assert self._pending_loads == sorted(self._pending_loads)
        rings = [key for each in self._rounds.values() for key in each.ring]
        assert sorted(rings, key=str) == self._in_state(QueueState.ADMITS)
        pending = [key for _, key in self._pending_loads]
        assert sorted(pending, key=str) == self._in_state(QueueState.WAITS_FOR_DEVICE)
        for load, key in self._pending_loads:
            assert self._queues[key].pending_load == load, key
        for priority, each in self._rounds.items():
            assert all(queue.priority == priority for queue in each.ring.values())

    def _in_state(self, state: QueueState) -> list[QueueKey]:
        keys = [key for key, queue in self._queues.items() if queue.state is state]
        return sorted(keys, key=str)

    def _queue(self, key: QueueKey) -> AdapterQueue:
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = AdapterQueue(key, self._rate_limits.share_of(key))
            queue.credit = self.quantum_tokens * queue.share.weight
        return queue

    def _added(self, queue: AdapterQueue, request: Request) -> None:
        """Count a request that was queued; the first one may raise its queue's priority."""
        self._num_waiting += 1
        self._num_background += request.background
        if queue.state is QueueState.ADMITS:
            self._change_rounds(queue)
        elif queue.state is QueueState.WAITS_FOR_DEVICE and queue.priority > queue.entered:
            # It waits from now on like others; the caller looks again at what it waits for.
            self._leave_state(queue)
            queue.state, queue.pending_load = QueueState.NEW, None

    def _change_rounds(self, queue: AdapterQueue) -> None:
        """Put a queue that admits into the round of its first request."""
        if queue.priority != queue.entered:
            self._leave_state(queue)
            queue.entered = queue.priority
            self._rounds.setdefault(queue.entered, _Round()).ring[queue.key] = queue

    def _leave_state(self, queue: AdapterQueue) -> None:
        """Take the queue out of its round or out of the pending loads."""
        priority = queue.entered
        if queue.state is QueueState.ADMITS:
            ring = self._rounds[priority].ring
            del ring[queue.key]
            if not ring:
                del self._rounds[priority]
        elif queue.state is QueueState.WAITS_FOR_DEVICE:
            assert queue.pending_load is not None, queue.key
            assert queue.key is not None
            index = bisect_left(self._pending_loads, (queue.pending_load, queue.key))
            del self._pending_loads[index]

"""AdapterQueues: one queue for each adapter, served by deficit round-robin in tokens.

Each time the round comes to a queue whose first request costs more than its credit, the queue
earns its quantum (quantum_tokens times its weight) and the round goes on. So between two turns
of one queue every other queue of its priority admits at most its own quantum and one longest
request, and a request that heads its queue is in turn after at most ceil(longest request / its
quantum) rounds, whatever the others hold.

Every priority has a round of its own, and the highest with anybody in it is served. A lower one
that has seen PASSED_OVER requests of higher ones admitted has the next turn. So of any
PASSED_OVER + 3 n admissions in a row, n being the number of priorities that wait, every one of
them has at least one.

A queue whose adapter waits for room on the device is a claim, and the round passes it by until
there is room; claims are served in the order in which they began to wait, where each priority
is a head start. One whose adapter is not staged, or has used up its share, is in neither.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from math import ceil

from configs.runtime import AdapterShare
from configs.wire.adapters import AdapterKey
from scheduler.admission.rate_limits import QueueKey
from scheduler.request import Request

PASSED_OVER = 16
"""Requests of higher priorities that are admitted before a lower one has a turn."""

_EVEN = AdapterShare()


def cost(request: Request) -> int:
    """The most tokens that a new request may take; one that comes back has paid already."""
    return 0 if request.first_scheduled is not None else request.max_total


class AdapterQueue:
    """The waiting requests of one adapter: those that come back first, then first come first.

    pending_load: (when in the order of claims, a number that breaks ties) its adapter awaits room on
    the device; pending_since: the step since which it does.
    """

    def __init__(self, key: QueueKey, share: AdapterShare) -> None:
        """Start empty; who makes it gives it its first credit."""
        self.key = key
        self.share = share
        self.credit = 0.0
        self.pending_load: tuple[int, int] | None = None
        self.pending_since = 0
        self._resumed: list[Request] = []
        self._fresh: OrderedDict[int, Request] = OrderedDict()

    def __len__(self) -> int:
        """How many requests wait."""
        return len(self._resumed) + len(self._fresh)

    def __iter__(self) -> Iterator[Request]:
        """The requests in the order in which they will be served."""
        yield from self._resumed
        yield from self._fresh.values()

    def append(self, request: Request) -> None:
        """Add a new request at the back."""
        self._fresh[request.serial] = request

    def requeue(self, request: Request) -> None:
        """Add a preempted request at the front, behind older ones of its kind."""
        insort(self._resumed, request, key=lambda each: each.serial)

    def first(self) -> Request:
        """The request to serve next."""
        return self._resumed[0] if self._resumed else next(iter(self._fresh.values()))

    def remove(self, request: Request) -> None:
        """Take one request out, wherever it stands."""
        if self._fresh.pop(request.serial, None) is None:
            self._resumed.remove(request)


class _Round:
    """The queues of one priority that take part, the next one first.

    passed_over: requests of higher priorities that were admitted since one of these was.
    """

    def __init__(self) -> None:
        self.ring: OrderedDict[QueueKey, AdapterQueue] = OrderedDict()
        self.passed_over = 0

    def next_request(self, quantum_tokens: int) -> Request:
        """The request that the round has come to."""
        while True:
            for _ in range(len(self.ring)):
                key, queue = next(iter(self.ring.items()))
                request = queue.first()
                if cost(request) <= queue.credit:
                    return request
                queue.credit += quantum_tokens * queue.share.weight
                self.ring.move_to_end(key)
            self._skip(quantum_tokens)

    def _skip(self, quantum_tokens: int) -> None:
        """Let the rounds pass in which certainly nobody is in turn."""
        quanta = [(queue, quantum_tokens * queue.share.weight) for queue in self.ring.values()]
        rounds = min(ceil((cost(q.first()) - q.credit) / quantum) for q, quantum in quanta)
        for queue, quantum in quanta if rounds > 0 else ():
            queue.credit += rounds * quantum


class AdapterQueues:
    """All waiting requests, and whose turn it is."""

    def __init__(
        self, quantum_tokens: int, share_of: Callable[[QueueKey], AdapterShare] = lambda _: _EVEN
    ) -> None:
        """Start with nobody waiting."""
        self.quantum_tokens = quantum_tokens
        self._share_of = share_of
        self._queues: dict[QueueKey, AdapterQueue] = {}
        self._rounds: dict[int, _Round] = {}
        self._pending_loads: list[tuple[tuple[int, int], AdapterKey]] = []
        self._num_pending = 0
        self._num_waiting = 0

    def __len__(self) -> int:
        """How many requests wait, whatever they wait for."""
        return self._num_waiting

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
        """Whether another request of this adapter is one too many where `limit` may wait.

        When so many wait, those adapters may still queue that have less than an equal part, or
        one that floods would have all others refused. So never more than twice the limit wait.
        """
        if self._num_waiting < limit:
            return False
        own = len(self._queues.get(key, ()))
        return own * len(self._queues) >= limit or self._num_waiting >= 2 * limit

    def waiting_for(self, key: QueueKey) -> list[Request]:
        """The requests of one adapter, first to be served first."""
        return list(self._queues.get(key, ()))

    def append(self, request: Request) -> None:
        """Queue a new request."""
        self._queue(request.adapter).append(request)
        self._num_waiting += 1

    def requeue(self, request: Request) -> None:
        """Queue a preempted request before all new ones of its adapter."""
        self._queue(request.adapter).requeue(request)
        self._num_waiting += 1

    def remove(self, request: Request) -> None:
        """Take a request out: it is admitted, or it ended while it waited."""
        queue = self._queues[request.adapter]
        queue.remove(request)
        self._num_waiting -= 1
        if not len(queue):
            self.deactivate(queue.key)
            del self._queues[queue.key]

    def admit(self, request: Request) -> None:
        """Take out the request in turn and charge its queue."""
        queue = self._queues[request.adapter]
        queue.credit -= cost(request)
        for priority, each in self._rounds.items():
            if priority < queue.share.priority:
                each.passed_over += 1
        self._rounds[queue.share.priority].passed_over = 0
        self._leave_pending(queue)
        queue.pending_load = None
        self.remove(request)

    def next_request(self) -> Request | None:
        """The request whose turn it is; the same one until something changes."""
        if not self._rounds:
            return None
        highest = max(self._rounds)
        due = [
            (each.passed_over, priority)
            for priority, each in self._rounds.items()
            if priority < highest and each.passed_over >= PASSED_OVER
        ]
        priority = max(due)[1] if due else highest
        return self._rounds[priority].next_request(self.quantum_tokens)

    def activate(self, key: QueueKey, first: bool = False) -> None:
        """Let the queue take part in its round, from the end or the front."""
        queue = self._queues.get(key)
        if queue is None or self.is_active(key):
            return
        ring = self._rounds.setdefault(queue.share.priority, _Round()).ring
        ring[key] = queue
        ring.move_to_end(key, last=not first)

    def wait_for_device(self, key: AdapterKey, step: int, head_start: int = 0) -> None:
        """The adapter must wait for the device, since `step` unless it has waited before.

        head_start: steps by which each priority stands before the next lower one.
        """
        queue = self._queues[key]
        self._leave_round(queue)
        if queue.pending_load is None:
            self._num_pending += 1
            queue.pending_since = step
            queue.pending_load = (step - head_start * queue.share.priority, self._num_pending)
        if self._index(queue) is None:
            insort(self._pending_loads, (queue.pending_load, key))

    def deactivate(self, key: QueueKey) -> None:
        """Take the queue out of the round until it is resumed; it keeps its seniority."""
        queue = self._queues[key]
        self._leave_round(queue)
        self._leave_pending(queue)

    def is_active(self, key: QueueKey) -> bool:
        """Whether the queue takes part in a round."""
        queue = self._queues.get(key)
        each = None if queue is None else self._rounds.get(queue.share.priority)
        return each is not None and key in each.ring

    def pending_loads(self, limit: int) -> list[AdapterKey]:
        """The first `limit` adapters that wait for the device, in the order of claims.

        They stay claims until a request of theirs is admitted, in the round or not.
        """
        return [key for _, key in islice(self._pending_loads, limit)]

    def pending_since(self, key: AdapterKey) -> int | None:
        """The step since which the adapter waits for the device; None if it does not."""
        queue = self._queues[key]
        return None if queue.pending_load is None else queue.pending_since

    def update_shares(self) -> None:
        """Ask for everybody's share again; all queues are out of the round until resumed."""
        for key, queue in self._queues.items():
            self.deactivate(key)
            queue.share = self._share_of(key)

    def check(self) -> None:
        """Assert that every queue is in one place and that requests are counted."""
        assert self._num_waiting == sum(len(queue) for queue in self._queues.values())
        assert all(len(queue) for queue in self._queues.values()), "an empty queue"
        listed = [key for _, key in self._pending_loads]
        assert self._pending_loads == sorted(self._pending_loads)
        assert len(set(listed)) == len(listed)
        assert all(each.ring for each in self._rounds.values()), "an empty round"
        rings = [key for each in self._rounds.values() for key in each.ring]
        assert len(set(rings)) == len(rings)
        assert {*listed, *rings} <= set(self._queues)
        assert all(self.is_active(key) for key in rings), "a queue in another priority's round"
        assert all(self._queues[key].pending_load == claim for claim, key in self._pending_loads)

    def _queue(self, key: QueueKey) -> AdapterQueue:
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = AdapterQueue(key, self._share_of(key))
            queue.credit = self.quantum_tokens * queue.share.weight
        return queue

    def _leave_round(self, queue: AdapterQueue) -> None:
        each = self._rounds.get(queue.share.priority)
        if each is not None and each.ring.pop(queue.key, None) is not None and not each.ring:
            del self._rounds[queue.share.priority]

    def _index(self, queue: AdapterQueue) -> int | None:
        """Where the queue stands among the claims."""
        if queue.pending_load is None or queue.key is None:
            return None
        entry = (queue.pending_load, queue.key)
        index = bisect_left(self._pending_loads, entry)
        found = index < len(self._pending_loads) and self._pending_loads[index] == entry
        return index if found else None

    def _leave_pending(self, queue: AdapterQueue) -> None:
        index = self._index(queue)
        if index is not None:
            del self._pending_loads[index]

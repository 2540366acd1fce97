"""AdapterQueues: one queue for each adapter, served by deficit round-robin in tokens.

Each time the round comes to a queue whose first request costs more than its credit, the queue
earns a quantum and the round goes on. So between two turns of one queue every other queue
admits at most a quantum and one longest request, and a request that heads its queue is in turn
after at most ceil(longest request / quantum) rounds, whatever the others hold.

A queue whose adapter waits for room on the device is a claim, and the round passes it by until
there is room; claims are served in the order in which they began to wait. One whose adapter is
not staged is in neither.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from configs.adapters import AdapterKey
from scheduler.request import Request

QueueKey = AdapterKey | None
"""The adapter of a queue; None is the base model's."""


def cost(request: Request) -> int:
    """The most tokens that a new request may take; one that comes back has paid already."""
    return 0 if request.first_scheduled is not None else request.max_total


class AdapterQueue:
    """The waiting requests of one adapter: those that come back first, then first come first.

    claim: (since which step, a number that breaks ties) its adapter awaits room on the device.
    """

    def __init__(self, key: QueueKey, credit: int) -> None:
        """Start empty, with one turn's credit."""
        self.key = key
        self.credit = credit
        self.claim: tuple[int, int] | None = None
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

    def bring_back(self, request: Request) -> None:
        """Add a preempted request at the front, behind older ones of its kind."""
        insort(self._resumed, request, key=lambda each: each.serial)

    def first(self) -> Request:
        """The request to serve next."""
        return self._resumed[0] if self._resumed else next(iter(self._fresh.values()))

    def remove(self, request: Request) -> None:
        """Take one request out, wherever it stands."""
        if self._fresh.pop(request.serial, None) is None:
            self._resumed.remove(request)


class AdapterQueues:
    """All waiting requests, and whose turn it is."""

    def __init__(self, quantum_tokens: int) -> None:
        """Start with nobody waiting."""
        self.quantum_tokens = quantum_tokens
        self._queues: dict[QueueKey, AdapterQueue] = {}
        self._ring: OrderedDict[QueueKey, AdapterQueue] = OrderedDict()
        self._claims: list[tuple[tuple[int, int], AdapterKey]] = []
        self._num_claims = 0
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

    def waiting_for(self, key: QueueKey) -> list[Request]:
        """The requests of one adapter, first to be served first."""
        return list(self._queues.get(key, ()))

    def append(self, request: Request) -> None:
        """Queue a new request."""
        self._queue(request.adapter).append(request)
        self._num_waiting += 1

    def bring_back(self, request: Request) -> None:
        """Queue a preempted request before all new ones of its adapter."""
        self._queue(request.adapter).bring_back(request)
        self._num_waiting += 1

    def remove(self, request: Request) -> None:
        """Take a request out: it is admitted, or it ended while it waited."""
        queue = self._queues[request.adapter]
        queue.remove(request)
        self._num_waiting -= 1
        if not len(queue):
            self.suspend(queue.key)
            del self._queues[queue.key]

    def admit(self, request: Request) -> None:
        """Take out the request in turn and charge its queue."""
        queue = self._queues[request.adapter]
        queue.credit -= cost(request)
        self._unlist(queue)
        queue.claim = None
        self.remove(request)

    def in_turn(self) -> Request | None:
        """The request that the round has come to; the same one until something changes."""
        while self._ring:
            key, queue = next(iter(self._ring.items()))
            request = queue.first()
            if cost(request) <= queue.credit:
                return request
            queue.credit += self.quantum_tokens
            self._ring.move_to_end(key)
        return None

    def resume(self, key: QueueKey, first: bool = False) -> None:
        """Let the queue take part in the round, from its end or its front."""
        queue = self._queues.get(key)
        if queue is None or key in self._ring:
            return
        self._ring[key] = queue
        self._ring.move_to_end(key, last=not first)

    def park(self, key: AdapterKey, step: int) -> None:
        """The adapter must wait for the device, since `step` unless it has waited before."""
        queue = self._queues[key]
        self._ring.pop(key, None)
        if queue.claim is None:
            self._num_claims += 1
            queue.claim = (step, self._num_claims)
        if self._index(queue) is None:
            insort(self._claims, (queue.claim, key))

    def suspend(self, key: QueueKey) -> None:
        """Take the queue out of the round until it is resumed; it keeps its seniority."""
        self._ring.pop(key, None)
        self._unlist(self._queues[key])

    def in_round(self, key: QueueKey) -> bool:
        """Whether the queue takes part in the round."""
        return key in self._ring

    def claims(self, limit: int) -> list[AdapterKey]:
        """The first `limit` adapters that wait for the device, the longest waiting first.

        They stay claims until a request of theirs is admitted, in the round or not.
        """
        return [key for _, key in islice(self._claims, limit)]

    def waits_since(self, key: AdapterKey) -> int | None:
        """The step since which the adapter waits for the device; None if it does not."""
        claim = self._queues[key].claim
        return None if claim is None else claim[0]

    def check(self) -> None:
        """Assert that every queue is in one place and that requests are counted."""
        assert self._num_waiting == sum(len(queue) for queue in self._queues.values())
        assert all(len(queue) for queue in self._queues.values()), "an empty queue"
        listed = [key for _, key in self._claims]
        assert self._claims == sorted(self._claims)
        assert len(set(listed)) == len(listed)
        assert {*listed, *self._ring} <= set(self._queues)
        assert all(self._queues[key].claim == claim for claim, key in self._claims)

    def _queue(self, key: QueueKey) -> AdapterQueue:
        if key not in self._queues:
            self._queues[key] = AdapterQueue(key, self.quantum_tokens)
        return self._queues[key]

    def _index(self, queue: AdapterQueue) -> int | None:
        """Where the queue stands among the claims."""
        if queue.claim is None or queue.key is None:
            return None
        entry = (queue.claim, queue.key)
        index = bisect_left(self._claims, entry)
        found = index < len(self._claims) and self._claims[index] == entry
        return index if found else None

    def _unlist(self, queue: AdapterQueue) -> None:
        index = self._index(queue)
        if index is not None:
            del self._claims[index]

"""AdmissionQueue: which waiting request may join next.

Three things decide: the round among the adapters' queues (queues.py), rate limits
(rate_limits.py), and whether a step can use the adapter's bytes (adapters/residency.py). Each
queue is in one QueueState; `_state_of` decides which, `_enter` puts it there.

Adapters that wait for the device share it by time. A loaded adapter keeps its slot for a slice,
from its first admission on; after that it is the next to make room, whether its requests are old
or new. Time is counted in steps, and one more for every STEP_TOKENS tokens of them, so that one
adapter's long prompts do not stretch the wait of all others (docs/design/fairness.md).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from configs.runtime import AdapterShare
from configs.wire.adapters import AdapterKey
from scheduler.adapters.residency import AdapterReadiness, Residency
from scheduler.admission.limits import Limits
from scheduler.admission.queues import AdapterQueues, QueueState
from scheduler.admission.rate_limits import QueueKey, RateLimits
from scheduler.request import STEP_TOKENS, Request
from scheduler.running import SHORTEST_SLICE
from scheduler.step import StepBuilder

MAX_LOADS_SEEN = 16
"""How many pending loads a step looks at, so that its cost does not grow with their number."""

_STATE = {
    AdapterReadiness.READY: QueueState.ADMITS,
    AdapterReadiness.CAN_LOAD: QueueState.WAITS_FOR_DEVICE,
    AdapterReadiness.MUST_WAIT: QueueState.WAITS_FOR_DEVICE,
    AdapterReadiness.LOADING: QueueState.WAITS_FOR_BYTES,
    AdapterReadiness.NOT_STAGED: QueueState.WAITS_FOR_BYTES,
}
"""What the queue of an adapter waits for, as far as the adapter decides it."""


class AdmissionQueue:
    """All waiting requests and what keeps each from being admitted.

    queues: the requests that wait in their adapter's queue.
    waiting_for_matcher: by serial, the requests that were next before the ranks had prepared their
    matcher.
    rate_limits: the adapters' shares and what they have used.
    """

    def __init__(self, limits: Limits, residency: Residency) -> None:
        self.rate_limits = RateLimits()
        self.waiting_for_matcher: dict[int, Request] = {}
        self.queues = AdapterQueues(limits.quantum_tokens, self.rate_limits)
        self._limits = limits
        self._residency = residency
        self._step = 0
        self._tokens = 0
        self._now = 0.0

    def reconfigure(self, limits: Limits) -> None:
        """Go on under other limits."""
        self._limits = limits
        self.queues.quantum_tokens = limits.quantum_tokens

    def set_shares(
        self, base: AdapterShare, default: AdapterShare, own: Mapping[AdapterKey, AdapterShare]
    ) -> None:
        """Go on under other shares."""
        self.rate_limits.replace(base, default, own)
        self._update_shares()

    def set_share(self, key: AdapterKey, share: AdapterShare) -> None:
        """Give one adapter a share of its own."""
        self.rate_limits.set_share(key, share)
        self._update_shares()

    def register(self, request: Request) -> None:
        """Count a new request before it is queued."""
        if request.adapter is not None and request.parts:
            self.rate_limits.add_merge_request(request.adapter, request.parts)

    def forget(self, request: Request) -> None:
        """A request ended, wherever it was."""
        if request.adapter is not None and request.parts:
            self.rate_limits.remove_merge_request(request.adapter)

    def enqueue(self, request: Request) -> None:
        """Have a request that is in its queue wait for its adapter, then to be next."""
        if request.adapter is not None:
            self._residency.add_waiting(request.adapter)
        self.update(request.adapter)

    def hold_for_matcher(self, request: Request) -> None:
        """Take the next request out of its queue until its matcher is prepared.

        It still counts as waiting for its adapter: else the adapter, loaded for it, could be
        evicted before the matcher is there, loaded again, and so on without end.
        """
        self.queues.remove(request)
        self._update_sharing(request.charged_adapters)
        request.waiting_for_matcher = True
        self.waiting_for_matcher[request.serial] = request

    def release_for_matcher(self, matcher: int | None = None) -> list[Request]:
        """Stop waiting for this matcher, or for any if None; returns the requests that did.

        When each is queued again, call `end_hold`.
        """
        found = [
            each for each in self.waiting_for_matcher.values() if matcher in (None, each.matcher)
        ]
        for request in found:
            del self.waiting_for_matcher[request.serial]
        return found

    @property
    def waiting(self) -> list[Request]:
        """All requests that count as waiting for their adapters."""
        return [*self.queues, *self.waiting_for_matcher.values()]

    def end_hold(self, request: Request) -> None:
        """A request that waited for its matcher counts as waiting for its adapter only once."""
        if request.adapter is not None:
            self._residency.remove_waiting(request.adapter)

    def remove(self, request: Request) -> None:
        """The request ended while it waited."""
        if self.waiting_for_matcher.pop(request.serial, None) is not None:
            self.end_hold(request)
            return
        self.queues.remove(request)
        if request.adapter is not None:
            self._residency.remove_waiting(request.adapter)
        self._update_sharing(request.charged_adapters)

    def advance_time(self, num_tokens: int) -> None:
        """A step with so many tokens was made."""
        more, self._tokens = divmod(self._tokens + num_tokens, STEP_TOKENS)
        self._step += 1 + more
        self._residency.now = self._step

    def begin_step(self, now: float) -> None:
        """Before a step's admissions: look again at queues with a recovered rate limit."""
        self._now = now
        for key in self.rate_limits.take_expired(now):
            self._update_sharing((key,))

    @property
    def slice_steps(self) -> int:
        """For how many steps an adapter keeps its slot while others wait for one.

        Where few wait for many slots, slices are short in proportion: a single pending load hardly
        waits, and the fraction of requests that are preempted stays the same. Where many wait for
        few slots, slices are short again, so that the wait does not grow with the number that wait.
        """
        loaded = max(1, self._residency.device.num_loaded)
        pending = max(1, self.queues.num_pending_loads)
        longest = self._limits.slice_steps
        few = max(SHORTEST_SLICE, longest * pending // loaded)
        many = 2 * SHORTEST_SLICE * max(1, loaded * loaded // pending)
        return min(longest, few, many)

    def expired_slices(self) -> list[AdapterKey]:
        """The adapters that must make room for another and have had their slice."""
        latest = self._step - self.slice_steps
        closed = self._residency.device.closed
        return [key for key in closed if self._residency.admitting_since(key) <= latest]

    def start_loads(self, step: StepBuilder) -> None:
        """Begin to load the adapters that the device has room for, longest wait first.

        A load begins before its queue is next, and no step waits for it.
        """
        # Adapters that were closed for an ended reservation admit again, if still loaded.
        for key in self._residency.device.take_reopened():
            self.update(key)
        pending = self._pending_loads()
        patience, length = self._limits.patience_steps, self.slice_steps
        waited = self._waited(pending[0]) if pending else -1
        # Only for others: background requests use the adapters and the room that there is.
        if waited >= patience and self.queues.has_online(pending[0]):
            # An adapter that needs the pages of several others might never find that all of them
            # have had their slice at once: after twice the patience and a slice, any makes room.
            may_wait = waited < 2 * patience + length
            self._reserve(pending[0], self._step - length if may_wait else None)
        reserved = self._residency.device.reserved
        for key in pending if reserved is None else [reserved, *pending]:
            self._load(key, step)

    def make_room(self, step: StepBuilder) -> None:
        """Reserve room for the first pending load at once: no request runs that would end."""
        pending = self._pending_loads()
        if pending and not self._residency.num_loading:
            self._reserve(pending[0])
            self._load(pending[0], step)

    def next(self) -> Request | None:
        """The request that may be admitted now; the same one until something changes."""
        while (request := self.queues.next_request()) is not None:
            state = self._state_of(request.adapter)
            if state is QueueState.ADMITS:
                return request
            # Its adapter was evicted or reached a limit since the queue entered the round.
            self._enter(request.adapter, state)
        return None

    def admit(self, request: Request) -> int:
        """Take the next request out of its queue; returns its adapter slot, -1 for no adapter."""
        key = request.adapter
        # A preempted request has paid for its prompt already.
        is_new = request.first_scheduled is None
        self.queues.admit(request)
        slot = -1
        if key is not None:
            slot = self._residency.acquire(key)
            self._residency.remove_waiting(key)
        for charged in request.charged_adapters:
            self.rate_limits.admitted(charged, len(request.prompt) if is_new else 0, self._now)
        self.rate_limits.record_admission(key)
        self._update_sharing(request.charged_adapters)
        return slot

    def release(self, request: Request) -> None:
        """An admitted request holds nothing on the ranks any more."""
        for charged in request.charged_adapters:
            self.rate_limits.freed(charged)
        if request.adapter is not None:
            self._residency.release(request.adapter)
        self._update_sharing(request.charged_adapters)
        if request.parts:
            self.update(request.adapter)

    def reset(self) -> None:
        """The ranks are gone: no request holds anything there, and no adapter is staged."""
        self.rate_limits.reset()
        for key in self.queues.keys:
            self.queues.enter(key, QueueState.WAITS_FOR_BYTES)
        self.update(None)  # The base model needs no adapter: its queue admits at once.

    def update(self, key: QueueKey) -> None:
        """Look again at what a queue waits for.

        A queue that admits is looked at when the round comes to it, in `next`. So it stays in the
        round until then; if its adapter was evicted, it becomes a pending load behind those that
        wait longer.
        """
        if key in self.queues and not self.queues.admits(key):
            self._enter(key, self._state_of(key))

    def check(self, running: Iterable[Request], alive: Iterable[Request]) -> None:
        """Assert every invariant; `running`: the requests that hold batch slots, `alive`: all."""
        self.queues.check()
        charged = Counter(key for request in running for key in request.charged_adapters)
        merges = Counter(request.adapter for request in alive if request.parts)
        self.rate_limits.check(charged, merges)

    def _update_shares(self) -> None:
        self.queues.update_shares()
        for key in self.queues.keys:
            self.update(key)

    def _state_of(self, key: QueueKey) -> QueueState:
        """What the queue waits for now."""
        if self._is_over_limit(key):
            return QueueState.OVER_LIMIT
        return QueueState.ADMITS if key is None else _STATE[self._residency.readiness(key)]

    def _enter(self, key: QueueKey, state: QueueState) -> None:
        self.queues.enter(key, state, self._step, self._limits.patience_steps)
        if state is QueueState.OVER_LIMIT and key is not None:
            # No room is made for an adapter that may not admit requests.
            self._residency.cancel_reservation(key)

    def _is_over_limit(self, key: QueueKey) -> bool:
        return self.rate_limits.is_over_limit(key, self._now) or self._must_yield(key)

    def _must_yield(self, key: QueueKey) -> bool:
        """Whether another queue shares a limit with this one, comes first and could admit."""
        waiting = [each for each in self.rate_limits.ahead_of(key) if each in self.queues]
        return any(
            each is None or self._residency.readiness(each) is not AdapterReadiness.NOT_STAGED
            for each in waiting
        )

    def _update_sharing(self, charged: Sequence[QueueKey]) -> None:
        """The usage of these has fallen: look again at the queues that share a limit with them."""
        for key in self.rate_limits.sharing_limits_with(charged):
            self.update(key)

    def _pending_loads(self) -> list[AdapterKey]:
        """The first pending loads, without those that are over their limit by now."""
        pending = []
        for key in self.queues.pending_loads(MAX_LOADS_SEEN):
            if self._is_over_limit(key):
                self._enter(key, QueueState.OVER_LIMIT)
            else:
                pending.append(key)
        return pending

    def _waited(self, key: AdapterKey) -> int:
        """For how many steps a load has been pending."""
        since = self.queues.pending_since(key)
        return self._step - (self._step if since is None else since)

    def _reserve(self, key: AdapterKey, latest: int | None = None) -> None:
        """Have other adapters make room for this one, unless there is a reservation already.

        latest: only those that began to admit at this step or before; None: any.
        """
        blocked = self._residency.readiness(key) is AdapterReadiness.MUST_WAIT
        if blocked and self._residency.device.reserved is None:
            self._residency.reserve(key, latest)

    def _load(self, key: AdapterKey, step: StepBuilder) -> None:
        """Begin the adapter's load if it can begin, and update its queue's state."""
        readiness = self._residency.readiness(key)
        if readiness is AdapterReadiness.CAN_LOAD and step.may_load:
            self._residency.load(key, step)
            readiness = AdapterReadiness.LOADING
        # Room may be reserved for an adapter of which all requests wait for a matcher now.
        if key in self.queues:
            self._enter(key, _STATE[readiness])

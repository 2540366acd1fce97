"""Turns: which waiting request may join next.

Three things decide: whose turn it is (queues.py), who has used up his share (shares.py), and
whether the adapter's bytes are where a step can use them (residency.py). A queue that may not
admit now stands aside and is seated again when what it waits for has come.

Adapters that wait for the device share its places by time. A resident holds its place for a slice
from its first admission on; after that it is the next to yield, however many requests it has, and
whether they are new or old makes no difference. Time is counted in steps, of which one with many
tokens counts for several: else one adapter's prompts would stretch everybody's waiting.

Nobody starves, counted in steps. Let S be the most steps that an admitted request runs, and a
claim an adapter that is staged but finds no room on the device. The n-th claim gets its room
within n * (2 patience_steps + s + S) steps, s being a slice (slice_steps at most, see turns.py):
when the first has waited for its patience, residents in its way that have had theirs admit
nobody, and what they run ends; after s + patience_steps more, any do. Where the prefix cache
keeps what was computed, what they run makes way when the slice is over, unless it ends within
SHORTEST_SLICE steps, so that S is hardly more than s. A step with many tokens counts for several.
Claims stand in the order of their age; one whose priority is p higher stands where one that is
p * patience_steps steps older would, so only for so many steps can newcomers go before it. Among
queues with room, turns come by deficit round-robin in tokens, and a lower priority has one of
every PASSED_OVER + 3 n admissions (queues.py). An admission takes S steps at most, for a request
in turn that lacks blocks or a place keeps its turn (against lower priorities, and against all
once its own was passed over so often) until the running ones end. Among running requests the
oldest is never preempted for lack of blocks and always advances. Who has used up his share
(shares.py) waits for requests that are charged to him to end, or for his own debt; a merge waits
for each of its parts. Bytes on their way to the device are waited for by their own rows alone,
however many steps that takes; a resident that was filled for somebody admits him before it is
closed. After losses of the ranks suspects are tried apart, and all others wait (trials.py).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from configs.runtime import AdapterShare
from configs.wire.adapters import AdapterKey
from scheduler.adapters.residency import AdapterReadiness, Residency
from scheduler.admission.limits import Limits
from scheduler.admission.queues import AdapterQueues
from scheduler.admission.rate_limits import QueueKey, RateLimits
from scheduler.request import Request
from scheduler.running import SHORTEST_SLICE
from scheduler.step import StepBuilder

MAX_CLAIMS_SEEN = 16
"""How many claims a step looks at, so that its cost does not grow with the adapters waiting."""

STEP_TOKENS = 192
"""Time goes on by one for each step and each so many tokens: about as many take a GPU as long to
compute as it takes to read the weights that every step reads, whatever the model."""

_ON_THE_WAY = (AdapterReadiness.NOT_STAGED, AdapterReadiness.LOADING)
"""Where an adapter is when something else than the device's room is awaited."""


class AdmissionQueue:
    """All waiting requests and what keeps each from joining.

    limits: the scheduler's, for the quantum and the patience. held: those that stand aside until
    the ranks have made their matchers.
    """

    def __init__(self, limits: Limits, residency: Residency) -> None:
        """Start with nobody waiting."""
        self.rate_limits = RateLimits()
        self.held: dict[int, Request] = {}
        self.queues = AdapterQueues(limits.quantum_tokens, self.rate_limits.share_of)
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
        self.queues.update_shares()
        self.update_all()

    def set_share(self, key: AdapterKey, share: AdapterShare) -> None:
        """Give one adapter a share of its own."""
        self.rate_limits.set_share(key, share)
        self.queues.update_shares()
        self.update_all()

    def register(self, request: Request) -> None:
        """A request came; it is told of before it is queued."""
        if request.adapter is not None and request.parts:
            self.rate_limits.add_merge_request(request.adapter, request.parts)

    def forget(self, request: Request) -> None:
        """A request ended, wherever it was."""
        if request.adapter is not None and request.parts:
            self.rate_limits.remove_merge_request(request.adapter)

    def enqueue(self, request: Request) -> None:
        """Let a queued request wait for its turn, and for its adapter before that."""
        if request.adapter is not None:
            self._residency.add_waiting(request.adapter)
        self.update(request.adapter)

    def hold(self, request: Request) -> None:
        """The request in turn stands aside, and others have theirs."""
        self.remove(request)
        request.aside = True
        self.held[request.serial] = request

    def release(self, matcher: int | None = None) -> list[Request]:
        """Those who stand aside for this matcher, or for any, do so no longer."""
        freed = [each for each in self.held.values() if matcher in (None, each.matcher)]
        for request in freed:
            del self.held[request.serial]
        return freed

    def remove(self, request: Request) -> None:
        """The request ended while it waited."""
        if self.held.pop(request.serial, None) is not None:
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
        """Before a step's admissions: seat whoever may have come to be able to admit."""
        self._now = now
        for payer in self.rate_limits.take_expired(now):
            self._update_sharing((payer,))

    @property
    def slice_steps(self) -> int:
        """For how many steps a resident holds its place while others wait for one.

        Where few wait for many places slices are short in proportion, so that a lone claim hardly
        waits, and the share of answers that are interrupted stays the same. Where many wait for
        few they are short again, so that claims do not wait the longer the more they are.
        """
        placed, claims = (
            max(1, self._residency.device.num_loaded),
            max(1, self.queues.num_pending_loads),
        )
        longest = self._limits.slice_steps
        few = max(SHORTEST_SLICE, longest * claims // placed)
        many = 2 * SHORTEST_SLICE * max(1, placed * placed // claims)
        return min(longest, few, many)

    def expired_slices(self) -> list[AdapterKey]:
        """The residents in a claim's way that had their slice."""
        latest = self._step - self.slice_steps
        closed = self._residency.device.closed
        return [key for key in closed if self._residency.admitting_since(key) <= latest]

    def load_pending(self, step: StepBuilder) -> None:
        """Begin to bring claims that the device has room for there, in their order.

        They come before their turn, and so that no step waits for them: a queue is seated in
        its round when its adapter is there.
        """
        for key in self._residency.device.take_reopened():
            self.update(key)
        claims = self._pending_loads()
        patience, length = self._limits.patience_steps, self.slice_steps
        waited = self._waited(claims[0]) if claims else -1
        if waited >= patience:
            # One that needs several places may never find that all have had their slice.
            may_wait = waited < 2 * patience + length
            self._reserve(claims[0], self._step - length if may_wait else None)
        reserved = self._residency.device.reserved
        for key in claims if reserved is None else [reserved, *claims]:
            self._advance(key, step)

    def make_room(self, step: StepBuilder) -> None:
        """Nobody runs whose end would make room: reserve it for the first claim at once."""
        claims = self._pending_loads()
        if claims and not self._residency.num_loading:
            self._reserve(claims[0])
            self._advance(claims[0], step)

    def next(self) -> Request | None:
        """The request that may join now; the same one until something changes."""
        while (request := self.queues.next_request()) is not None:
            if self._may_admit(request.adapter):
                return request
        return None

    def admit(self, request: Request) -> int:
        """Take the request in turn out of its queue; returns its adapter's slot, -1 for none."""
        key = request.adapter
        fresh = request.first_scheduled is None
        self.queues.admit(request)
        slot = -1
        if key is not None:
            slot = self._residency.acquire(key)
            self._residency.remove_waiting(key)
        for payer in request.charged_adapters:
            self.rate_limits.admitted(payer, len(request.prompt) if fresh else 0, self._now)
        self.rate_limits.record_admission(key)
        self._update_sharing(request.charged_adapters)
        return slot

    def freed(self, request: Request) -> None:
        """An admitted request holds nothing on the ranks any more."""
        for payer in request.charged_adapters:
            self.rate_limits.freed(payer)
        if request.adapter is not None:
            self._residency.release(request.adapter)
        self._update_sharing(request.charged_adapters)
        if request.parts:
            self.update(request.adapter)

    def reset(self) -> None:
        """The ranks are gone: nobody holds anything, and no adapter is staged."""
        self.rate_limits.reset()
        for key in self.queues.keys:
            self.queues.deactivate(key)
        self.update(None)

    def update_all(self) -> None:
        """Seat every queue, where nothing says which may have changed."""
        for key in self.queues.keys:
            self.update(key)

    def update(self, key: QueueKey) -> None:
        """Put a queue where it may be: in the round, among the claims, or aside.

        An adapter that is not on the device always begins as a claim, behind the older ones:
        it must not take the room that they wait for because it happens to come at its turn.
        """
        if key not in self.queues or self.queues.is_active(key):
            return
        if self._holds_back(key):
            return
        if key is None:
            self.queues.activate(None)
            return
        standing = self._residency.readiness(key)
        if standing is AdapterReadiness.READY:
            self._resume(key)
        elif standing in _ON_THE_WAY:
            self.queues.deactivate(key)
        else:
            self._park(key)

    def check(self, running: Iterable[Request], alive: Iterable[Request]) -> None:
        """Assert every invariant; `running`: the requests that hold places, `alive`: all."""
        self.queues.check()
        charged = Counter(payer for request in running for payer in request.charged_adapters)
        merges = Counter(request.adapter for request in alive if request.parts)
        self.rate_limits.check(charged, merges)

    def _resume(self, key: AdapterKey) -> None:
        """The adapter is there: it is no claim any more, but keeps its seniority as one."""
        self.queues.deactivate(key)
        self.queues.activate(key)

    def _park(self, key: AdapterKey) -> None:
        self.queues.wait_for_device(key, self._step, self._limits.patience_steps)

    def _holds_back(self, key: QueueKey) -> bool:
        """Set the queue aside if its share is used up: no room is to be made for it meanwhile.

        The same if it shares a cap with one that has the turn before it and could come to admit.
        """
        if not self.rate_limits.is_over_limit(key, self._now) and not self._gives_way(key):
            return False
        self.queues.deactivate(key)
        if key is not None:
            self._residency.cancel_reservation(key)
        return True

    def _gives_way(self, key: QueueKey) -> bool:
        waiting = [each for each in self.rate_limits.ahead_of(key) if each in self.queues]
        return any(
            each is None or self._residency.readiness(each) is not AdapterReadiness.NOT_STAGED
            for each in waiting
        )

    def _update_sharing(self, payers: Sequence[QueueKey]) -> None:
        """Seat those who may come to admit because something is charged to these no more."""
        for key in self.rate_limits.sharing_with(payers):
            self.update(key)

    def _may_admit(self, key: QueueKey) -> bool:
        """Whether the queue in turn may admit in this step; if not, it steps aside."""
        if self._holds_back(key):
            return False
        if key is None:
            return True
        standing = self._residency.readiness(key)
        if standing in _ON_THE_WAY:
            self.queues.deactivate(key)
        elif standing is not AdapterReadiness.READY:
            self._park(key)
        return standing is AdapterReadiness.READY

    def _pending_loads(self) -> list[AdapterKey]:
        """The first claims, but for those that have used up their share."""
        return [
            key for key in self.queues.pending_loads(MAX_CLAIMS_SEEN) if not self._holds_back(key)
        ]

    def _waited(self, key: AdapterKey) -> int:
        """For how many steps a claim has waited."""
        since = self.queues.pending_since(key)
        return self._step - (self._step if since is None else since)

    def _reserve(self, key: AdapterKey, latest: int | None = None) -> None:
        """Have others make room for a claim that finds none, unless they do for another.

        latest: only those that began to admit by then.
        """
        blocked = self._residency.readiness(key) is AdapterReadiness.MUST_WAIT
        if blocked and self._residency.device.reserved is None:
            self._residency.reserve(key, latest)

    def _advance(self, key: AdapterKey, step: StepBuilder) -> None:
        """Bring a claim one stage further, if it can."""
        standing = self._residency.readiness(key)
        if standing is AdapterReadiness.CAN_LOAD and step.may_load:
            self._residency.load(key, step)
            self.queues.deactivate(key)
        elif standing in _ON_THE_WAY:
            self.queues.deactivate(key)
        elif standing is AdapterReadiness.READY:
            self._resume(key)

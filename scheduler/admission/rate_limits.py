"""RateLimits: each adapter's share (weight, priority, limits), and what it has used of it.

A token rate is kept by a bucket that gains `tokens_per_second` up to BURST_SECONDS of it. An
adapter admits while its bucket is not below zero. Prompts are charged when they are admitted,
generated tokens when they come. So an adapter takes at most its rate, the burst, one prompt, and
what its running requests still generate after the bucket is empty; it admits again when that debt
is paid.

A request over a merge is charged in full to each part, so that an adapter's limits hold whatever
it is merged with. A merge's queue has the least weight and the lowest priority of its parts. Queues
that are charged to one limited adapter admit in the order of their last admissions; the order is
the same for all adapters, so two queues never wait for each other (docs/design/fairness.md).
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from configs.runtime import AdapterShare
from configs.wire.adapters import AdapterKey

QueueKey = AdapterKey | None
"""The adapter of a queue; None is the base model's."""

BURST_SECONDS = 1.0
"""An idle adapter may take the tokens of so many seconds at once."""

_DEBT = -1e-6
"""A bucket below this level is in debt; sums of fractions do not come to zero exactly."""


@dataclass(slots=True)
class _Bucket:
    """A token bucket.

    level: tokens in it at the time `at`; below zero is a debt.
    at: seconds on the caller's clock.
    """

    level: float
    at: float


@dataclass(slots=True)
class _Merge:
    """A merge that requests are for.

    parts: the adapters that it is made of, each once.
    num_requests: its requests that have not ended.
    """

    parts: tuple[AdapterKey, ...]
    num_requests: int = 0


class RateLimits:
    """The shares of all adapters, what each has used, and until when it must not admit.

    has_rates: whether any adapter has a token rate.
    ignores_rates: adapters in debt admit all the same, and are charged. Set during crash isolation,
    when all other requests would wait for them.
    """

    def __init__(self) -> None:
        self._base = self._default = AdapterShare()
        self._own: dict[AdapterKey, AdapterShare] = {}
        self._running: dict[QueueKey, int] = {}
        self._buckets: OrderedDict[QueueKey, _Bucket] = OrderedDict()
        self._in_debt: set[QueueKey] = set()
        self._debts_end: list[tuple[float, int, QueueKey]] = []
        self._num_debts = 0
        self._merges: dict[QueueKey, _Merge] = {}
        self._merges_of: dict[QueueKey, dict[QueueKey, None]] = {}
        self._last_admissions: dict[QueueKey, int] = {}
        self._num_admissions = 0
        self.has_rates = False
        self.ignores_rates = False

    def share_of(self, key: QueueKey) -> AdapterShare:
        """The share of an adapter or of the base model; for a merge, the least of its parts."""
        merge = self._merges.get(key)
        if merge is not None:
            parts = [self.share_of(part) for part in merge.parts]
            weight = min(share.weight for share in parts)
            return AdapterShare(weight=weight, priority=min(share.priority for share in parts))
        return self._base if key is None else self._own.get(key, self._default)

    def replace(
        self, base: AdapterShare, default: AdapterShare, own: Mapping[AdapterKey, AdapterShare]
    ) -> None:
        """Use other shares from now on; what was used so far still counts."""
        self._base, self._default, self._own = base, default, dict(own)
        self.has_rates = any(
            share.tokens_per_second is not None for share in (base, default, *own.values())
        )
        self._clear_debts()

    def set_share(self, key: AdapterKey, share: AdapterShare) -> None:
        """Give one adapter a share of its own."""
        self._own[key] = share
        self.has_rates = self.has_rates or share.tokens_per_second is not None
        self._clear_debts()

    def add_merge_request(self, key: AdapterKey, parts: tuple[AdapterKey, ...]) -> None:
        """A request over a merge of these parts was added."""
        if key not in self._merges:
            self._merges[key] = _Merge(parts)
            # As if it had admitted just now: new recipes do not go before queues that wait.
            self._last_admissions[key] = self._num_admissions
            for part in parts:
                self._merges_of.setdefault(part, {})[key] = None
        assert self._merges[key].parts == parts, (self._merges[key], parts)
        self._merges[key].num_requests += 1

    def remove_merge_request(self, key: AdapterKey) -> None:
        """A request over a merge ended; with the last one the merge is forgotten."""
        merge = self._merges[key]
        merge.num_requests -= 1
        if merge.num_requests:
            return
        del self._merges[key], self._last_admissions[key]
        for part in merge.parts:
            del self._merges_of[part][key]
            if not self._merges_of[part]:
                del self._merges_of[part]
                self._last_admissions.pop(part, None)

    def sharing_limits_with(self, charged: Sequence[QueueKey]) -> list[QueueKey]:
        """These queues, and the merges that share a limit with them, by their last admissions."""
        if not self._merges_of:
            return list(charged)
        found = dict.fromkeys(charged)
        for key in charged:
            if self._is_capped(key):
                found.update(self._merges_of.get(key, {}))
        return sorted(found, key=self._last_admission)

    def ahead_of(self, key: QueueKey) -> list[QueueKey]:
        """The queues that share a limit with this one and admitted last before it did."""
        if not self._merges_of:
            return []
        merge = self._merges.get(key)
        charged = [p for p in ((key,) if merge is None else merge.parts) if self._is_capped(p)]
        own = self._last_admission(key)
        return [
            each for each in self.sharing_limits_with(charged) if self._last_admission(each) < own
        ]

    def record_admission(self, key: QueueKey) -> None:
        """A queue has admitted a request."""
        self._num_admissions += 1
        if key in self._merges or key in self._merges_of:
            self._last_admissions[key] = self._num_admissions

    def num_running(self, key: QueueKey) -> int:
        """How many requests that are charged to the adapter hold a batch slot."""
        return self._running.get(key, 0)

    def is_over_limit(self, key: QueueKey, now: float) -> bool:
        """Whether the adapter has used up its share and must not admit now.

        An adapter in debt (or the part of a merge that is) is returned by `take_expired` when its
        debt is paid.
        """
        merge = self._merges.get(key)
        if merge is not None:
            # A list, not a generator: each part in debt must enter the heap.
            return any([self.is_over_limit(part, now) for part in merge.parts])
        share = self.share_of(key)
        most = share.max_concurrent
        if most is not None and self.num_running(key) >= most:
            return True
        rate = share.tokens_per_second
        if rate is None or self.ignores_rates or (level := self._level(key, rate, now)) >= _DEBT:
            return False
        # At most one entry for each key in the heap.
        if key not in self._in_debt:
            self._in_debt.add(key)
            self._num_debts += 1
            heappush(self._debts_end, (now - level / rate, self._num_debts, key))
        return True

    def admitted(self, key: QueueKey, prompt_tokens: int, now: float) -> None:
        """A request got a batch slot; prompt_tokens is 0 for one that was preempted."""
        self._running[key] = self.num_running(key) + 1
        self.charge(key, prompt_tokens, now)

    def charge(self, key: QueueKey, num_tokens: int, now: float) -> None:
        """Charge tokens to an adapter that has a rate."""
        rate = self.share_of(key).tokens_per_second
        if rate is None:
            return
        level = self._level(key, rate, now) - num_tokens
        self._buckets[key] = _Bucket(level, now)
        self._buckets.move_to_end(key)  # By their last charges: the first is full first, mostly.
        self._forget_full(now)

    def freed(self, key: QueueKey) -> None:
        """A request gave its batch slot back."""
        left = self._running[key] - 1
        assert left >= 0, key
        if left:
            self._running[key] = left
        else:
            del self._running[key]

    def reset(self) -> None:
        """The ranks are gone: no request holds a batch slot."""
        self._running.clear()

    def take_expired(self, now: float) -> list[QueueKey]:
        """The adapters that have paid their debt by now, each named once."""
        keys = []
        while self._debts_end and self._debts_end[0][0] <= now:
            keys.append(heappop(self._debts_end)[2])
        self._in_debt.difference_update(keys)
        return keys

    @property
    def next_wake(self) -> float | None:
        """When the next debt is paid, in seconds on the caller's clock."""
        return self._debts_end[0][0] if self._debts_end else None

    def check(self, running: Mapping[QueueKey, int], merges: Mapping[QueueKey, int]) -> None:
        """Assert that `running` requests hold batch slots, and `merges` have so many requests."""
        assert {key: each.num_requests for key, each in self._merges.items()} == merges
        known = {part for merge in self._merges.values() for part in merge.parts}
        assert self._merges_of.keys() == known, (self._merges_of, self._merges)
        assert self._last_admissions.keys() <= {*self._merges, *known}
        assert self._running == running, (self._running, running)
        assert self._in_debt == {key for _, _, key in self._debts_end}

    def _is_capped(self, key: QueueKey) -> bool:
        share = self.share_of(key)
        return share.max_concurrent is not None or share.tokens_per_second is not None

    def _last_admission(self, key: QueueKey) -> int:
        return self._last_admissions.get(key, 0)

    def _clear_debts(self) -> None:
        """Forget when debts end: that was computed from old rates; `is_over_limit` does it anew."""
        self._in_debt.clear()
        self._debts_end.clear()

    def _level(self, key: QueueKey, rate: float, now: float) -> float:
        bucket = self._buckets.get(key)
        full = rate * BURST_SECONDS
        if bucket is None:
            return full
        return min(bucket.level + max(now - bucket.at, 0.0) * rate, full)

    def _forget_full(self, now: float) -> None:
        """Drop the bucket that was charged longest ago if it is full, as unknown ones are."""
        key = next(iter(self._buckets))
        rate = self.share_of(key).tokens_per_second
        if rate is None or self._level(key, rate, now) >= rate * BURST_SECONDS:
            del self._buckets[key]

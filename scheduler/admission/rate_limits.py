"""Shares: what each adapter may take of the ranks, and what it has taken.

Rates are kept by a bucket that fills with `tokens_per_second` up to BURST_SECONDS of it. An
adapter admits while its bucket is not below zero; prompts are charged when they are admitted,
generated tokens when they come. So over any time an adapter takes at most what the rate allows,
the burst, one prompt, and what its running requests still generate after the bucket ran dry; the
debt is paid back before it admits again.

What a request over a merge takes is charged to each of the merge's parts, all of it, so that an
adapter's caps hold whatever it is merged with. A merge's queue has the least weight and the
lowest priority of its parts, and is held back while any of them is. Queues that are charged to
one capped adapter take turns: who admitted last stands last. As that order is the same for all
adapters, the first of all gets every part that it needs as soon as those who have them end.
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
"""An adapter that has asked for nothing may take the tokens of so many seconds at once."""

_DEBT = -1e-6
"""Below this level a bucket is in debt; sums of fractions never meet zero exactly."""


@dataclass(slots=True)
class _Bucket:
    """level: tokens in it at the time `at`, in seconds; below zero is a debt."""

    level: float
    at: float


@dataclass(slots=True)
class _Merge:
    """A merge that requests are for; parts: what it is made of, each once."""

    parts: tuple[AdapterKey, ...]
    num_requests: int = 0


class RateLimits:
    """Everybody's share, who has used his up, and until when.

    ignores_rates: who is in debt admits all the same, and is charged (all others wait for him).
    """

    def __init__(self) -> None:
        """Start with equal shares without caps."""
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
        """The share of an adapter, or of the base model; of a merge what counts for its queue."""
        merge = self._merges.get(key)
        if merge is not None:
            parts = [self.share_of(part) for part in merge.parts]
            weight = min(share.weight for share in parts)
            return AdapterShare(weight=weight, priority=min(share.priority for share in parts))
        return self._base if key is None else self._own.get(key, self._default)

    def replace(
        self, base: AdapterShare, default: AdapterShare, own: Mapping[AdapterKey, AdapterShare]
    ) -> None:
        """Go on under other shares; what was taken so far still counts."""
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
        """A request over a merge of these came."""
        if key not in self._merges:
            self._merges[key] = _Merge(parts)
            self._last_admissions[key] = (
                self._num_admissions
            )  # New recipes do not go before those who wait.
            for part in parts:
                self._merges_of.setdefault(part, {})[key] = None
        assert self._merges[key].parts == parts, (self._merges[key], parts)
        self._merges[key].num_requests += 1

    def remove_merge_request(self, key: AdapterKey) -> None:
        """A request over a merge ended; after the last one nothing is known of the merge."""
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

    def sharing_limits_with(self, payers: Sequence[QueueKey]) -> list[QueueKey]:
        """These, and the merges that share a cap of theirs; in the order of their turns."""
        if not self._merges_of:
            return list(payers)
        found = dict.fromkeys(payers)
        for payer in payers:
            if self._is_capped(payer):
                found.update(self._merges_of.get(payer, {}))
        return sorted(found, key=self._last_admission)

    def ahead_of(self, key: QueueKey) -> list[QueueKey]:
        """Who shares a cap with this queue and has the turn before it."""
        if not self._merges_of:
            return []
        merge = self._merges.get(key)
        payers = [p for p in ((key,) if merge is None else merge.parts) if self._is_capped(p)]
        own = self._last_admission(key)
        return [
            each for each in self.sharing_limits_with(payers) if self._last_admission(each) < own
        ]

    def record_admission(self, key: QueueKey) -> None:
        """A queue has admitted a request."""
        self._num_admissions += 1
        if key in self._merges or key in self._merges_of:
            self._last_admissions[key] = self._num_admissions

    def num_running(self, key: QueueKey) -> int:
        """How many requests that are charged to it hold a place."""
        return self._running.get(key, 0)

    def is_over_limit(self, key: QueueKey, now: float) -> bool:
        """Whether the adapter has used up its share and must not admit now.

        One that ran dry, or the part of a merge that did, is named by `woken` when its bucket
        has paid its debt.
        """
        merge = self._merges.get(key)
        if merge is not None:
            return any([self.is_over_limit(part, now) for part in merge.parts])
        share = self.share_of(key)
        most = share.max_concurrent
        if most is not None and self.num_running(key) >= most:
            return True
        rate = share.tokens_per_second
        if rate is None or self.ignores_rates or (level := self._level(key, rate, now)) >= _DEBT:
            return False
        if key not in self._in_debt:
            self._in_debt.add(key)
            self._num_debts += 1
            heappush(self._debts_end, (now - level / rate, self._num_debts, key))
        return True

    def admitted(self, key: QueueKey, prompt_tokens: int, now: float) -> None:
        """A request took a place; prompt_tokens is 0 for one that comes back."""
        self._running[key] = self.num_running(key) + 1
        self.charge(key, prompt_tokens, now)

    def charge(self, key: QueueKey, num_tokens: int, now: float) -> None:
        """Charge tokens to an adapter that has a rate."""
        rate = self.share_of(key).tokens_per_second
        if rate is None:
            return
        level = self._level(key, rate, now) - num_tokens
        self._buckets[key] = _Bucket(level, now)
        self._buckets.move_to_end(key)
        self._forget_full(now)

    def freed(self, key: QueueKey) -> None:
        """A request gave its place back."""
        left = self._running[key] - 1
        assert left >= 0, key
        if left:
            self._running[key] = left
        else:
            del self._running[key]

    def reset(self) -> None:
        """Nobody holds a place any more."""
        self._running.clear()

    def take_expired(self, now: float) -> list[QueueKey]:
        """Those whose time of waiting for tokens is over, each named once."""
        keys = []
        while self._debts_end and self._debts_end[0][0] <= now:
            keys.append(heappop(self._debts_end)[2])
        self._in_debt.difference_update(keys)
        return keys

    @property
    def next_wake(self) -> float | None:
        """When somebody is to be named by `woken`, in seconds on the caller's clock."""
        return self._debts_end[0][0] if self._debts_end else None

    def check(self, running: Mapping[QueueKey, int], merges: Mapping[QueueKey, int]) -> None:
        """Assert that exactly these requests hold places, and who lives over each merge."""
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
        """Times to wake were told by old rates: whoever asks again is told anew."""
        self._in_debt.clear()
        self._debts_end.clear()

    def _level(self, key: QueueKey, rate: float, now: float) -> float:
        bucket = self._buckets.get(key)
        full = rate * BURST_SECONDS
        if bucket is None:
            return full
        return min(bucket.level + max(now - bucket.at, 0.0) * rate, full)

    def _forget_full(self, now: float) -> None:
        """Drop the bucket that was charged longest ago once it is full, as one unknown is."""
        key = next(iter(self._buckets))
        rate = self.share_of(key).tokens_per_second
        if rate is None or self._level(key, rate, now) >= rate * BURST_SECONDS:
            del self._buckets[key]

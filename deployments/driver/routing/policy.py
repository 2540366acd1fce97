"""Which driver replica serves a request: the choice alone, without Ray.

A request over an adapter goes to a replica that holds it: on the device before host memory
before disk before nowhere. Every adapter orders all replicas by a hash of its name and theirs
(rendezvous hashing), so all routers agree on its home without asking: among replicas that hold
it equally well the first in that order is meant. Two bounds keep the load even, counted in open
requests:

* among those that hold an adapter equally well in memory, one may have `LEEWAY` times what the
  least busy of them has, and `HELD_SLACK` more;
* whoever is chosen may have `LEEWAY` times what the least busy replica has, and `COLD_SLACK`
  more; beyond that those who hold the adapter less well are asked.

So a hot adapter spreads with its requests, and goes home again with the last of them; copies
that nobody asks for leave by themselves. A request for the base model takes the less busy of
two replicas at random. What replicas tell serves to choose well; it is never waited for.
"""

import random
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from typing import Annotated, Any

import msgspec

from configs.wire.adapters import AdapterReference

LEEWAY = 1.25
HELD_SLACK = 2
COLD_SLACK = 8
REPORT_SECONDS = 2.0
STALE_SECONDS = 15.0
MARK_BYTES = 8

_SENT_SECONDS = 3 * REPORT_SECONDS
_CHOSEN_SECONDS = 1.0
_MAX_HOLDS = 1 << 12

Mark = bytes
"""A short digest of how clients name an adapter."""

Counts = Mapping[str, int]
"""Replicas that live, and the open requests that each has of this router."""


class HoldingTier(IntEnum):
    """How well a replica holds an adapter; DISK: it downloaded the files."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    NOWHERE = 3


def adapter_hash(reference: AdapterReference) -> Mark:
    """The same for the same name in every process; whatever characters it has."""
    return blake2b(repr(reference).encode(), digest_size=MARK_BYTES).digest()


class _Stats(msgspec.Struct, frozen=True):
    """A report as it travels: the marks of each tier in one string of bytes."""

    ready: bool
    load: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
    beat: int
    device: bytes
    host: bytes
    disk: bytes


@dataclass(frozen=True)
class ReplicaReport:
    """What a driver replica tells routers about itself.

    tiers: adapters and where they are. load: open requests. ready: its ranks serve. beat: grows
    with time, so that a replica which tells nothing new differs from a silent one.
    """

    tiers: Mapping[Mark, HoldingTier]
    load: int = 0
    ready: bool = True
    beat: int = 0

    def packed(self) -> dict[str, Any]:
        """As Serve's routing stats, which are equal where nothing changed."""
        tiers = [
            self._joined(tier) for tier in (HoldingTier.DEVICE, HoldingTier.HOST, HoldingTier.DISK)
        ]
        return msgspec.structs.asdict(_Stats(self.ready, self.load, self.beat, *tiers))

    @classmethod
    def unpacked(cls, stats: Mapping[str, Any]) -> "ReplicaReport | None":
        """Read them; None where there are none, or another version wrote them."""
        try:
            told = msgspec.convert(stats, _Stats)
        except msgspec.ValidationError:
            return None
        tiers = {
            HoldingTier.DISK: told.disk,
            HoldingTier.HOST: told.host,
            HoldingTier.DEVICE: told.device,
        }
        held = {each: tier for tier, joined in tiers.items() for each in _hashes(joined)}
        return cls(held, told.load, told.ready, told.beat)

    def _joined(self, tier: HoldingTier) -> bytes:
        return b"".join(sorted(each for each, place in self.tiers.items() if place is tier))


@dataclass
class _LastReport:
    """A replica's last stats, what they say, and since when they are known; seconds.

    own_requests: the router's own open requests at that time.
    """

    stats: Mapping[str, Any]
    report: ReplicaReport | None
    since: float
    own_requests: int


class RoutingPolicy:
    """What one router knows of the replicas, and its choice among them."""

    def __init__(self, chance: random.Random) -> None:
        """Nothing is known; `chance` draws replicas for the base model."""
        self._chance = chance
        self._reports: dict[str, _LastReport] = {}
        self._holds_until: OrderedDict[tuple[Mark, str], float] = OrderedDict()

    def update(self, stats: Mapping[str, Mapping[str, Any]], counts: Counts, now: float) -> None:
        """The replicas that live and the last stats of each; others are forgotten."""
        for name in self._reports.keys() - stats.keys():
            del self._reports[name]
        for name, new in stats.items():
            told = self._reports.get(name)
            if told is None or told.stats != new:
                self._reports[name] = _LastReport(
                    new, ReplicaReport.unpacked(new), now, counts.get(name, 0)
                )

    def chosen(self, adapter: AdapterReference, replica: str, now: float) -> None:
        """A request is about to go there: those that come with it are to follow."""
        key = (adapter_hash(adapter), replica)
        if self._holds_until.get(key, now) <= now:
            self._hold(key, now + _CHOSEN_SECONDS)

    def sent(self, adapter: AdapterReference | None, replica: str, now: float) -> None:
        """A request goes there: until it can report, it counts as one that holds the adapter."""
        if adapter is not None:
            self._hold((adapter_hash(adapter), replica), now + _SENT_SECONDS)

    def order(
        self, adapter: AdapterReference | None, counts: Counts, now: float
    ) -> list[list[str]]:
        """Groups of replicas in the order in which to try them; of a group, the least busy.

        The first group is the one that is meant. Replicas whose ranks are being rebuilt come last.
        """
        able = [name for name in counts if self._is_ready(name, now)] or list(counts)
        if not able:
            return []
        loads = {name: self._load(name, counts[name], now) for name in able}
        if adapter is None:
            first = min(self._chance.sample(able, min(2, len(able))), key=loads.__getitem__)
        else:
            first = self._preferred(adapter_hash(adapter), loads, now)
        rest = [name for name in able if name != first]
        rebuilding = [name for name in counts if name not in loads]
        return [group for group in ([first], rest, rebuilding) if group]

    def _preferred(self, adapter: Mark, loads: Mapping[str, int], now: float) -> str:
        """Of those within both bounds the one that holds the adapter best, then its hash's first.

        The least busy replica is within both, so there is one.
        """
        tiers = {name: self._tier(adapter, name, now) for name in loads}
        bounds = dict.fromkeys(HoldingTier, _bound(loads.values(), COLD_SLACK))
        for tier in {HoldingTier.DEVICE, HoldingTier.HOST} & set(tiers.values()):
            equals = [loads[name] for name in loads if tiers[name] is tier]
            bounds[tier] = min(bounds[tier], _bound(equals, HELD_SLACK))
        within = [name for name in loads if loads[name] <= bounds[tiers[name]]]
        return min(within, key=lambda name: (tiers[name], _distance(adapter, name)))

    def _load(self, name: str, own: int, now: float) -> int:
        """Open requests of a replica, as far as that is known.

        Its last report has everybody's, and since then this router knows its own. A replica of
        which nothing is known counts as idle: to send it one is to learn.
        """
        report = self._report(name, now)
        if report is None:
            return own
        return max(own, report.load + own - self._reports[name].own_requests)

    def _report(self, name: str, now: float) -> ReplicaReport | None:
        """What a replica told, unless that is old."""
        told = self._reports.get(name)
        return told.report if told is not None and now - told.since <= STALE_SECONDS else None

    def _is_ready(self, name: str, now: float) -> bool:
        report = self._report(name, now)
        return report is None or report.ready

    def _tier(self, adapter: Mark, name: str, now: float) -> HoldingTier:
        report = self._report(name, now)
        told = (
            report.tiers.get(adapter, HoldingTier.NOWHERE)
            if report is not None
            else HoldingTier.NOWHERE
        )
        until = self._holds_until.get((adapter, name), now)
        return min(told, HoldingTier.HOST) if now < until else told

    def _hold(self, key: tuple[Mark, str], until: float) -> None:
        self._holds_until[key] = until
        self._holds_until.move_to_end(key)
        if len(self._holds_until) > _MAX_HOLDS:
            self._holds_until.popitem(last=False)


def _distance(adapter: Mark, replica: str) -> bytes:
    """An order of all replicas for each adapter; a change of replicas moves no others."""
    return blake2b(replica.encode(), key=adapter, digest_size=MARK_BYTES).digest()


def _bound(loads: Iterable[int], slack: int) -> float:
    """What a replica may have beside the least busy of these."""
    return LEEWAY * min(loads) + slack


def _hashes(joined: bytes) -> Sequence[Mark]:
    return [joined[i : i + MARK_BYTES] for i in range(0, len(joined), MARK_BYTES)]

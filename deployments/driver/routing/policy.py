"""Selects the driver replica for a request; knows no Ray.

A request over an adapter goes to a replica that holds it: on the device before host memory
before disk before nowhere. A hash of the adapter's and the replica's names orders all replicas
for each adapter (rendezvous hashing), so all routers agree without communication: among replicas
that hold it in the same tier, the first in that order is selected. Two bounds keep the load even,
in open requests:

* a replica that holds the adapter in memory may have `LEEWAY` times the requests of the least busy
  replica that holds it in the same tier, and `HELD_SLACK` more;
* the selected replica may have `LEEWAY` times the requests of the least busy replica, and
  `COLD_SLACK` more; beyond that, replicas of a lower tier are considered.

So a hot adapter spreads over replicas with its load, and back to one when the load falls; unused
copies are evicted as usual. A request for the base model goes to the less busy of two replicas at
random. Reports improve the selection; no request waits for one.
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
HASH_BYTES = 8

_SENT_SECONDS = 3 * REPORT_SECONDS
_SELECTED_SECONDS = 1.0
_MAX_HOLDS = 1 << 12

AdapterHash = bytes
"""A short digest of an adapter's reference."""

Counts = Mapping[str, int]
"""The live replicas, and this router's open requests at each."""


class HoldingTier(IntEnum):
    """Where a replica has an adapter, fastest first; DISK: it downloaded the files."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    NOWHERE = 3


def adapter_hash(reference: AdapterReference) -> AdapterHash:
    """Hash a reference; equal in all processes."""
    return blake2b(repr(reference).encode(), digest_size=HASH_BYTES).digest()


class _Stats(msgspec.Struct, frozen=True):
    """A report as it is sent: the hashes of each tier in one string of bytes."""

    ready: bool
    load: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
    beat: int
    device: bytes
    host: bytes
    disk: bytes


@dataclass(frozen=True)
class ReplicaReport:
    """A driver replica's report to the routers.

    tiers: where its adapters are.
    load: open requests.
    ready: whether its ranks serve.
    beat: grows with time, so that an unchanged report differs from a missing one.
    """

    tiers: Mapping[AdapterHash, HoldingTier]
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
        """Decode stats; None if there are none, or another version of the server wrote them."""
        try:
            sent = msgspec.convert(stats, _Stats)
        except msgspec.ValidationError:
            return None
        tiers = {
            HoldingTier.DISK: sent.disk,
            HoldingTier.HOST: sent.host,
            HoldingTier.DEVICE: sent.device,
        }
        held = {each: tier for tier, joined in tiers.items() for each in _hashes(joined)}
        return cls(held, sent.load, sent.ready, sent.beat)

    def _joined(self, tier: HoldingTier) -> bytes:
        return b"".join(sorted(each for each, own in self.tiers.items() if own is tier))


@dataclass
class _LastReport:
    """A replica's last stats and the report in them; since: when they came, in seconds.

    own_requests: the router's own open requests at that time.
    """

    stats: Mapping[str, Any]
    report: ReplicaReport | None
    since: float
    own_requests: int


class RoutingPolicy:
    """One router's reports of the replicas, and its selection among them."""

    def __init__(self, rng: random.Random) -> None:
        """rng: draws replicas for the base model."""
        self._rng = rng
        self._reports: dict[str, _LastReport] = {}
        self._holds_until: OrderedDict[tuple[AdapterHash, str], float] = OrderedDict()

    def update(self, stats: Mapping[str, Mapping[str, Any]], counts: Counts, now: float) -> None:
        """Store the last stats of the present replicas; forget all others."""
        for name in self._reports.keys() - stats.keys():
            del self._reports[name]
        for name, new in stats.items():
            last = self._reports.get(name)
            if last is None or last.stats != new:
                self._reports[name] = _LastReport(
                    new, ReplicaReport.unpacked(new), now, counts.get(name, 0)
                )

    def selected(self, adapter: AdapterReference, replica: str, now: float) -> None:
        """Count the replica as a holder for a moment: requests of the same burst follow."""
        key = (adapter_hash(adapter), replica)
        if self._holds_until.get(key, now) <= now:
            self._hold(key, now + _SELECTED_SECONDS)

    def sent(self, adapter: AdapterReference | None, replica: str, now: float) -> None:
        """Count the replica as a holder until its own reports can include the adapter."""
        if adapter is not None:
            self._hold((adapter_hash(adapter), replica), now + _SENT_SECONDS)

    def order(
        self, adapter: AdapterReference | None, counts: Counts, now: float
    ) -> list[list[str]]:
        """Groups of replicas in the order in which to try them; of a group, the least busy.

        The first group is the selected one. Replicas that replace their ranks come last.
        """
        able = [name for name in counts if self._is_ready(name, now)] or list(counts)
        if not able:
            return []
        loads = {name: self._load(name, counts[name], now) for name in able}
        if adapter is None:
            first = min(self._rng.sample(able, min(2, len(able))), key=loads.__getitem__)
        else:
            first = self._preferred(adapter_hash(adapter), loads, now)
        rest = [name for name in able if name != first]
        rebuilding = [name for name in counts if name not in loads]
        return [group for group in ([first], rest, rebuilding) if group]

    def _preferred(self, adapter: AdapterHash, loads: Mapping[str, int], now: float) -> str:
        """Of the replicas within both bounds, the one of the best tier, then the first by hash.

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

        Its last report counts the requests of all routers; since then this router counts its own.
        A replica without a report counts as idle: the first request makes it known.
        """
        report = self._report(name, now)
        if report is None:
            return own
        return max(own, report.load + own - self._reports[name].own_requests)

    def _report(self, name: str, now: float) -> ReplicaReport | None:
        """A replica's last report; None if it is too old."""
        last = self._reports.get(name)
        return last.report if last is not None and now - last.since <= STALE_SECONDS else None

    def _is_ready(self, name: str, now: float) -> bool:
        report = self._report(name, now)
        return report is None or report.ready

    def _tier(self, adapter: AdapterHash, name: str, now: float) -> HoldingTier:
        report = self._report(name, now)
        reported = (
            report.tiers.get(adapter, HoldingTier.NOWHERE)
            if report is not None
            else HoldingTier.NOWHERE
        )
        until = self._holds_until.get((adapter, name), now)
        return min(reported, HoldingTier.HOST) if now < until else reported

    def _hold(self, key: tuple[AdapterHash, str], until: float) -> None:
        self._holds_until[key] = until
        self._holds_until.move_to_end(key)
        if len(self._holds_until) > _MAX_HOLDS:
            self._holds_until.popitem(last=False)


def _distance(adapter: AdapterHash, replica: str) -> bytes:
    """Orders all replicas for an adapter; a replica that comes or goes leaves the others' order."""
    return blake2b(replica.encode(), key=adapter, digest_size=HASH_BYTES).digest()


def _bound(loads: Iterable[int], slack: int) -> float:
    """How many requests a replica may have, given the loads of all."""
    return LEEWAY * min(loads) + slack


def _hashes(joined: bytes) -> Sequence[AdapterHash]:
    return [joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES)]

"""Replicas and their routers over time, on a fake clock."""

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest

from configs.wire.adapters import AdapterReference
from deployments.driver.routing.policy import (
    REPORT_SECONDS,
    HoldingTier,
    ReplicaReport,
    RoutingPolicy,
    adapter_hash,
)
from tests.deployments.driver.routing.test_policy import NAMES, RED, adapter, home


@dataclass
class Replica:
    """Holds requested adapters: the last `slots` on the device, others on disk."""

    slots: int = 4
    adapters: list[AdapterReference] = field(default_factory=list)
    ends: deque[float] = field(default_factory=deque)

    def take(self, what: AdapterReference | None, ends: float) -> None:
        self.ends.append(ends)
        if what is not None:
            self.adapters = [what, *(a for a in self.adapters if a != what)]

    def report(self, beat: int) -> ReplicaReport:
        held = {
            adapter_hash(a): HoldingTier.DEVICE if i < self.slots else HoldingTier.DISK
            for i, a in enumerate(self.adapters)
        }
        return ReplicaReport(held, len(self.ends), beat=beat)


class Cluster:
    """Replicas, and routers that see them by reports and by what they send.

    counting: whether routers count what they send.
    """

    def __init__(self, *names: str, routers: int = 1, counting: bool = True) -> None:
        self.replicas = {name: Replica() for name in names}
        self.routers = [RoutingPolicy(random.Random(i)) for i in range(routers)]
        self.now = 0.0
        self.served: Counter[tuple[AdapterReference | None, str]] = Counter()
        self._counting = counting
        self._sent: list[dict[str, deque[float]]] = [{} for _ in self.routers]
        self._reported = 0.0

    def play(self, what: AdapterReference | None, a_second: float, seconds: float) -> None:
        """Requests come evenly, to one router after the other."""
        for i in range(int(seconds * a_second)):
            self.ask(what, i % len(self.routers))
            self.pass_by(1 / a_second)

    def ask(self, what: AdapterReference | None, router: int = 0, service: float = 2.0) -> str:
        """Route a request that takes `service` seconds; returns its replica."""
        [name], *_ = self.routers[router].order(what, self._counts(router), self.now)
        replica, ends = self.replicas[name], self.now + service
        replica.take(what, ends)
        self._sent[router].setdefault(name, deque()).append(ends)
        self.routers[router].sent(what, name, self.now)
        self.served[what, name] += 1
        return name

    def pass_by(self, seconds: float) -> None:
        """Requests end and, when it is time, replicas report."""
        self.now += seconds
        sent = [ends for each in self._sent for ends in each.values()]
        for ends in [*sent, *(replica.ends for replica in self.replicas.values())]:
            while ends and ends[0] <= self.now:
                ends.popleft()
        if self.now - self._reported >= REPORT_SECONDS:
            self._reported = self.now
            self._report()

    def holders(self, what: AdapterReference) -> set[str]:
        """The replicas that ever had a request for it."""
        return {name for name, each in self.replicas.items() if what in each.adapters}

    def _counts(self, router: int) -> dict[str, int]:
        own = self._sent[router] if self._counting else {}
        return {name: len(own.get(name, ())) for name in self.replicas}

    def _report(self) -> None:
        beat = int(self.now / 5)
        stats = {name: each.report(beat).packed() for name, each in self.replicas.items()}
        for i, router in enumerate(self.routers):
            router.update(stats, self._counts(i), self.now)


@pytest.mark.parametrize("routers", [1, 3])
def test_a_hot_adapter_spreads_within_5_seconds_and_goes_home_again(routers: int) -> None:
    cluster = Cluster(*NAMES[:3], routers=routers)
    at_home = home(RED, *NAMES[:3])
    cluster.play(RED, a_second=2, seconds=10)
    assert cluster.holders(RED) == {at_home}
    cluster.play(RED, a_second=30, seconds=5)
    assert len(cluster.holders(RED)) == 3
    cluster.served.clear()
    cluster.play(RED, a_second=30, seconds=20)
    shares = [cluster.served[RED, name] for name in NAMES[:3]]
    assert max(shares) < 2 * min(shares), shares
    cluster.pass_by(5)
    cluster.served.clear()
    cluster.play(RED, a_second=1, seconds=20)
    assert set(cluster.served) == {(RED, at_home)}


def test_by_reports_alone_a_hot_adapter_spreads_too() -> None:
    cluster = Cluster(*NAMES[:3], counting=False)
    cluster.play(RED, a_second=30, seconds=5)
    assert len(cluster.holders(RED)) > 1


@pytest.mark.parametrize("routers", [1, 3])
def test_adapters_stay_on_their_homes(routers: int) -> None:
    cluster = Cluster(*NAMES[:3], routers=routers)
    requests = [adapter(i) for i in range(12)]
    for _ in range(20):
        for i, each in enumerate(requests):
            cluster.ask(each, i % routers, service=0.3)
            cluster.pass_by(0.1)
    assert all(len(cluster.holders(each)) == 1 for each in requests)
    assert len({name for _, name in cluster.served}) == 3


def test_when_a_replica_dies_its_adapters_find_one_new_home_each() -> None:
    cluster = Cluster(*NAMES[:3])
    requests = [adapter(i) for i in range(12)]
    homes = {each: cluster.ask(each, service=0.1) for each in requests}
    cluster.pass_by(REPORT_SECONDS)
    del cluster.replicas["r0"]
    for _ in range(5):
        cluster.pass_by(1)
        for each in requests:
            cluster.ask(each, service=0.1)
            cluster.pass_by(0.1)
    for each in requests:
        [holder] = cluster.holders(each)
        assert holder == homes[each] or homes[each] == "r0"


def test_a_new_replica_takes_new_adapters_and_what_is_too_much_for_the_others() -> None:
    cluster = Cluster("r0", "r1")
    requests = [adapter(i) for i in range(8)]
    for each in requests:
        cluster.ask(each, service=0.1)
        cluster.pass_by(0.1)
    cluster.pass_by(REPORT_SECONDS)
    cluster.replicas["r2"] = Replica(slots=8)
    cluster.pass_by(REPORT_SECONDS)
    for each in requests:
        cluster.ask(each, service=0.1)
        cluster.pass_by(0.1)
    assert not cluster.replicas["r2"].adapters, "what is held stays where it is"
    fresh = [adapter(i) for i in range(20, 40)]
    for each in fresh:
        cluster.ask(each, service=0.1)
        cluster.pass_by(0.1)
    assert len(cluster.replicas["r2"].adapters) > 2
    cluster.play(requests[0], a_second=30, seconds=5)
    assert "r2" in cluster.holders(requests[0])

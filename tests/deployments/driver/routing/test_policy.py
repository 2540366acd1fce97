"""The selection of a driver replica: its bounds, the selected replica, and the age of reports."""

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.wire.adapters import AdapterReference, AdapterSource
from deployments.driver.routing.policy import (
    COLD_SLACK,
    HELD_SLACK,
    LEEWAY,
    REPORT_SECONDS,
    STALE_SECONDS,
    Counts,
    HoldingTier,
    ReplicaReport,
    RoutingPolicy,
    adapter_hash,
)

RED = AdapterReference(AdapterSource.HUB, "red")
NAMES = [f"r{i}" for i in range(6)]
TIERS = st.sampled_from(HoldingTier)
LOADS = st.integers(0, 60)


def adapter(i: int) -> AdapterReference:
    return AdapterReference(AdapterSource.LOCAL, f"a{i}")


def routing(
    holds: Mapping[str, HoldingTier] | None = None,
    loads: Mapping[str, int] | None = None,
    rebuilding: tuple[str, ...] = (),
) -> RoutingPolicy:
    """A router that just heard where RED is and how many requests each replica has."""
    names = {*(holds or {}), *(loads or {}), *rebuilding}
    reply = RoutingPolicy(random.Random(3))
    stats = {
        name: ReplicaReport(
            {adapter_hash(RED): (holds or {}).get(name, HoldingTier.NOWHERE)},
            (loads or {}).get(name, 0),
            name not in rebuilding,
        ).packed()
        for name in names
    }
    reply.update(stats, {}, 0.0)
    return reply


def first(router: RoutingPolicy, counts: Counts, what: AdapterReference | None = RED) -> str:
    """The selected replica."""
    [name], *_ = router.order(what, counts, 0.0)
    return name


def idle(*names: str) -> Counts:
    return dict.fromkeys(names, 0)


def home(what: AdapterReference, *names: str) -> str:
    return first(RoutingPolicy(random.Random(0)), idle(*names), what)


# -- Any state ---------------------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from(NAMES), st.tuples(TIERS, LOADS), min_size=1))
def test_the_best_holder_within_both_bounds_is_selected(
    state: dict[str, tuple[HoldingTier, int]],
) -> None:
    tiers = {name: tier for name, (tier, _) in state.items()}
    loads = {name: load for name, (_, load) in state.items()}
    selected = first(routing(tiers, loads), idle(*state))
    among_all = LEEWAY * min(loads.values()) + COLD_SLACK

    def is_within(name: str) -> bool:
        equals = [loads[other] for other in state if tiers[other] is tiers[name]]
        among_equals = LEEWAY * min(equals) + HELD_SLACK
        in_memory = tiers[name] <= HoldingTier.HOST
        return loads[name] <= (min(among_all, among_equals) if in_memory else among_all)

    assert is_within(selected)
    assert tiers[selected] == min(tiers[name] for name in state if is_within(name))


@given(
    st.dictionaries(st.sampled_from(NAMES), LOADS),
    st.dictionaries(st.sampled_from(NAMES), st.tuples(TIERS, LOADS, st.booleans())),
    st.none() | st.builds(AdapterReference, st.sampled_from(AdapterSource), st.text()),
    st.floats(0, 100),
)
def test_every_replica_is_tried_once(
    counts: dict[str, int],
    reply: dict[str, tuple[HoldingTier, int, bool]],
    what: AdapterReference | None,
    now: float,
) -> None:
    router = RoutingPolicy(random.Random(0))
    reports = {
        n: ReplicaReport({adapter_hash(RED): t}, load, ready)
        for n, (t, load, ready) in reply.items()
    }
    router.update({name: report.packed() for name, report in reports.items()}, {}, 0.0)
    order = router.order(what, counts, now)
    assert sorted(name for group in order for name in group) == sorted(counts)
    assert all(order)
    assert not order or len(order[0]) == 1


@given(st.sets(st.sampled_from(NAMES), min_size=2), st.integers(0, 99), st.data())
def test_a_replica_that_goes_moves_its_own_adapters_alone(
    names: set[str], which: int, data: st.DataObject
) -> None:
    """And one that comes takes only those whose home it is."""
    gone = data.draw(st.sampled_from(sorted(names)))
    before, after = home(adapter(which), *names), home(adapter(which), *(names - {gone}))
    assert before in (gone, after)


JUNK: st.SearchStrategy[object] = st.sampled_from(
    [None, True, 0, -1, 1 << 600, 0.5, float("nan"), float("inf"), "", "AAAA", b"", b"odd", [], {}]
)


@given(
    st.dictionaries(
        st.sampled_from(["ready", "load", "beat", "device", "host", "disk", "other"]), JUNK
    ),
    LOADS,
)
def test_reports_never_keep_a_request_from_a_replica(stats: dict[str, Any], count: int) -> None:
    """Stats may come from another version, or not come at all."""
    router = RoutingPolicy(random.Random(0))
    router.update({"r0": stats, "r1": {}}, {}, 0.0)
    for what in (RED, None):
        order = router.order(what, {"r0": count, "r1": 1, "r2": 0}, 1.0)
        assert sorted(name for group in order for name in group) == ["r0", "r1", "r2"]


@given(
    st.dictionaries(st.binary(min_size=8, max_size=8), TIERS),
    LOADS,
    st.booleans(),
    st.integers(0, 1 << 40),
)
def test_a_report_is_equal_after_encoding(
    held: dict[bytes, HoldingTier], load: int, ready: bool, beat: int
) -> None:
    replies = {each: tier for each, tier in held.items() if tier is not HoldingTier.NOWHERE}
    stats = ReplicaReport(held, load, ready, beat).packed()
    assert ReplicaReport.unpacked(stats) == ReplicaReport(replies, load, ready, beat)
    assert stats == ReplicaReport(dict(reversed(held.items())), load, ready, beat).packed()


# -- The selected replica ----------------------------------------------------------------------


@pytest.mark.parametrize("better", [HoldingTier.DEVICE, HoldingTier.HOST, HoldingTier.DISK])
@pytest.mark.parametrize("holder", NAMES[:3])
def test_a_better_holder_comes_before_the_home(better: HoldingTier, holder: str) -> None:
    worse = HoldingTier(better + 1)
    tiers = {name: worse for name in NAMES[:3]} | {holder: better}
    assert first(routing(tiers), idle(*NAMES[:3])) == holder


def test_homes_are_spread_over_the_replicas() -> None:
    homes = Counter(home(adapter(i), *NAMES[:4]) for i in range(400))
    assert len(homes) == 4
    assert min(homes.values()) > 70


def test_hashes_are_equal_in_all_processes() -> None:
    assert adapter_hash(RED).hex() == "bc1085de86f018dd"
    assert home(RED, *NAMES) == "r0"


def test_names_differ_by_source_and_revision() -> None:
    names = [
        RED,
        AdapterReference(AdapterSource.LOCAL, "red"),
        AdapterReference(AdapterSource.HUB, "red", "v2"),
        AdapterReference(AdapterSource.HUB, "\ud800"),
    ]
    assert len({adapter_hash(name) for name in names}) == len(names)


def test_a_calm_holder_is_not_passed_over() -> None:
    """Of two that hold it the home is too busy for the whole, the other is not."""
    holders = {"r0": HoldingTier.DEVICE, "r1": HoldingTier.DEVICE, "r2": HoldingTier.NOWHERE}
    for busy, calm in (("r0", "r1"), ("r1", "r0")):
        router = routing(holders, {busy: 60, calm: 50, "r2": 40})
        assert first(router, idle(*holders)) == calm


@pytest.mark.parametrize(
    ("tiers", "most"),
    [
        ((HoldingTier.DEVICE, HoldingTier.DEVICE), 2),
        ((HoldingTier.HOST, HoldingTier.HOST), 2),
        ((HoldingTier.HOST, HoldingTier.DISK), 8),
        ((HoldingTier.DISK, HoldingTier.DISK), 8),
        ((HoldingTier.NOWHERE, HoldingTier.NOWHERE), 8),
    ],
)
def test_how_much_busier_than_an_idle_replica_the_home_may_be(
    tiers: tuple[HoldingTier, HoldingTier], most: int
) -> None:
    at_home = home(RED, *NAMES[:2])
    elsewhere = next(name for name in NAMES[:2] if name != at_home)
    holders = dict(zip((at_home, elsewhere), tiers, strict=True))
    for load in (most, most + 1):
        selected = first(routing(holders, {at_home: load}), idle(*NAMES[:2]))
        assert selected == (at_home if load == most else elsewhere)


def test_of_two_for_the_base_model_the_less_busy_serves() -> None:
    loads = {"r0": 5, "r1": 0, "r2": 9}
    router = routing(loads=loads)
    drawn = Counter(first(router, idle(*loads), None) for _ in range(300))
    assert set(drawn) == {"r0", "r1"}, "the busiest is never the better of two"
    assert drawn["r1"] > drawn["r0"] > 50
    assert first(router, idle("r2"), None) == "r2"


def test_replicas_whose_ranks_are_rebuilt_come_last() -> None:
    for what in (RED, None):
        router = routing({"r0": HoldingTier.DEVICE, "r1": HoldingTier.NOWHERE}, rebuilding=("r0",))
        assert router.order(what, idle("r0", "r1"), 0.0) == [["r1"], ["r0"]]
        first_of_all, *others = router.order(what, idle("r0", "r1", "r2"), 0.0)
        assert others == [[name for name in ("r1", "r2") if name not in first_of_all], ["r0"]]
        assert router.order(what, idle("r0"), 0.0) == [["r0"]]
        both = routing(rebuilding=("r0", "r1")).order(what, idle("r0", "r1"), 0.0)
        assert sorted(name for group in both for name in group) == ["r0", "r1"]


def test_without_replicas_there_is_no_order() -> None:
    assert RoutingPolicy(random.Random(0)).order(RED, {}, 0.0) == []


# -- What is known, and until when -------------------------------------------------------------


def test_old_reports_are_ignored() -> None:
    elsewhere = next(name for name in NAMES[:2] if name != home(RED, *NAMES[:2]))
    router = routing({elsewhere: HoldingTier.DEVICE})
    counts = idle(*NAMES[:2])
    router.update(
        {elsewhere: ReplicaReport({adapter_hash(RED): HoldingTier.DEVICE}).packed(), "r9": {}},
        {},
        9.0,
    )
    assert router.order(RED, counts, STALE_SECONDS)[0] == [elsewhere]
    assert router.order(RED, counts, STALE_SECONDS + 1)[0] == [home(RED, *NAMES[:2])]
    silent = routing(rebuilding=(home(RED, *NAMES[:2]),))
    assert silent.order(RED, counts, STALE_SECONDS + 1)[0] == [home(RED, *NAMES[:2])]


def test_an_unchanged_report_is_valid_while_its_beat_grows() -> None:
    router = RoutingPolicy(random.Random(0))
    elsewhere = next(name for name in NAMES[:2] if name != home(RED, *NAMES[:2]))
    for beat in range(5):
        report = ReplicaReport({adapter_hash(RED): HoldingTier.HOST}, beat=beat)
        router.update({elsewhere: report.packed()}, {}, beat * STALE_SECONDS)
    now = 5 * STALE_SECONDS
    assert router.order(RED, idle(*NAMES[:2]), now)[0] == [elsewhere]


def test_a_replica_that_died_and_its_reports_are_forgotten() -> None:
    elsewhere = next(name for name in NAMES[:2] if name != home(RED, *NAMES[:2]))
    router = routing({elsewhere: HoldingTier.DEVICE})
    router.update({}, {}, 1.0)
    assert first(router, idle(*NAMES[:2])) == home(RED, *NAMES[:2])


def test_a_replica_counts_as_a_holder_from_its_first_request_on() -> None:
    at_home = home(RED, *NAMES[:2])
    elsewhere = next(name for name in NAMES[:2] if name != at_home)
    router, counts = RoutingPolicy(random.Random(0)), {at_home: 0, elsewhere: 0}
    router.sent(RED, elsewhere, 0.0)
    assert router.order(RED, counts, 2.9 * REPORT_SECONDS)[0] == [elsewhere]
    assert router.order(RED, counts, 3 * REPORT_SECONDS)[0] == [at_home]


def test_a_replica_counts_as_a_holder_for_a_moment_when_it_is_selected() -> None:
    """A replica that never accepts does not keep the adapter from one that does."""
    at_home = home(RED, *NAMES[:2])
    elsewhere = next(name for name in NAMES[:2] if name != at_home)
    router, counts = RoutingPolicy(random.Random(0)), {at_home: COLD_SLACK + 1, elsewhere: 0}
    for now in (0.0, 0.3, 0.6, 0.9):
        router.selected(RED, elsewhere, now)
    counts[at_home] = 0
    assert router.order(RED, counts, 0.9)[0] == [elsewhere]
    assert router.order(RED, counts, 1.0)[0] == [at_home]
    router.sent(RED, elsewhere, 1.0)
    router.selected(RED, elsewhere, 1.1)
    assert router.order(RED, counts, 6.9)[0] == [elsewhere], "the longer of both counts"


def test_recent_requests_are_remembered_within_a_bound() -> None:
    at_home = home(RED, *NAMES[:2])
    elsewhere = next(name for name in NAMES[:2] if name != at_home)
    router, counts = RoutingPolicy(random.Random(0)), {at_home: 0, elsewhere: 0}
    router.sent(RED, elsewhere, 0.0)
    for i in range(1 << 12):
        router.sent(adapter(i), elsewhere, 0.0)
    assert router.order(RED, counts, 0.0)[0] == [at_home]
    assert router.order(adapter(1), counts, 0.0)[0] == [elsewhere]


def test_a_reports_load_grows_with_this_routers_requests() -> None:
    at_home = home(RED, *NAMES[:2])
    elsewhere = next(name for name in NAMES[:2] if name != at_home)
    router, report = (
        RoutingPolicy(random.Random(0)),
        ReplicaReport({adapter_hash(RED): HoldingTier.DEVICE}, 50).packed(),
    )
    router.update({at_home: report}, {at_home: 45}, 0.0)
    assert first(router, {at_home: 45, elsewhere: 0}) == elsewhere, "five are others'"
    assert first(router, {at_home: 0, elsewhere: 0}) == at_home, "the own have ended since"
    assert first(router, {at_home: 4, elsewhere: 0}) == elsewhere
    assert first(router, {at_home: 60, elsewhere: 50}) == at_home


def test_a_replica_has_at_least_what_this_router_sent_it() -> None:
    """Its report was written before they came."""
    at_home = home(RED, *NAMES[:2])
    elsewhere = next(name for name in NAMES[:2] if name != at_home)
    router = RoutingPolicy(random.Random(0))
    router.update(
        {at_home: ReplicaReport({adapter_hash(RED): HoldingTier.DEVICE}).packed()},
        {at_home: 50},
        0.0,
    )
    assert first(router, {at_home: 50, elsewhere: 0}) == elsewhere


def test_without_reports_a_busy_home_is_left_for_one_of_which_nothing_is_known() -> None:
    at_home = home(RED, *NAMES[:2])
    elsewhere = next(name for name in NAMES[:2] if name != at_home)
    router = RoutingPolicy(random.Random(0))
    router.sent(RED, at_home, 0.0)
    counts = {at_home: COLD_SLACK, elsewhere: 0}
    assert router.order(RED, counts, 0.0)[0] == [at_home]
    counts[at_home] = COLD_SLACK + 1
    assert router.order(RED, counts, 0.0)[0] == [elsewhere]

"""A replica's adapter report: clients' names, their tiers, and a bound."""

import asyncio
from pathlib import Path

import pytest

from configs.wire.adapters import AdapterKey, AdapterReference, AdapterSource
from configs.wire.merging import MergeRule
from deployments.driver.adapters.aliases import Aliases
from deployments.driver.adapters.report import MAX_NAMES, AdapterReporter
from deployments.driver.engine import DriverEngine
from deployments.driver.routing.policy import HoldingTier, ReplicaReport, adapter_hash
from scheduler.adapters.resident import AdapterState
from scheduler.snapshot import AdapterView
from tests.deployments.driver.fake_ranks import FakeGroup
from tests.deployments.driver.routing.stories import NOWHERE, play, request

ONE, TWO = AdapterKey(1), AdapterKey(2)
RED = AdapterReference(AdapterSource.HUB, "red")
BLUE = AdapterReference(AdapterSource.LOCAL, "blue")


def view(key: AdapterKey, state: AdapterState, draining: bool = False) -> AdapterView:
    return AdapterView(key, state, 0, 0, False, draining, 0, 0)


class Names:
    """Names of a driver: aliases, and the contents that they mean."""

    def __init__(self) -> None:
        self.aliases = Aliases()
        self.contents: dict[AdapterReference, AdapterKey] = {RED: ONE, BLUE: TWO}
        self.reporter = AdapterReporter(self.aliases, self)  # type: ignore[arg-type]

    def serving(self, reference: AdapterReference) -> AdapterKey | None:
        return self.contents.get(reference)

    def report(self, *views: AdapterView, pins: tuple[AdapterReference, ...] = ()) -> ReplicaReport:
        return self.reporter.report(views, pins, load=3, ready=True, now=12.0)


@pytest.mark.parametrize(
    ("state", "tier"),
    [
        (AdapterState.DEVICE, HoldingTier.DEVICE),
        (AdapterState.LOADING, HoldingTier.HOST),
        (AdapterState.HOST, HoldingTier.HOST),
        (AdapterState.STAGING, HoldingTier.HOST),
        (AdapterState.DISK, HoldingTier.DISK),
    ],
)
def test_a_report_has_the_tier_of_an_adapter(state: AdapterState, tier: HoldingTier) -> None:
    names = Names()
    assert names.report(view(ONE, state)).tiers == {}, "it was not requested"
    names.reporter.requested(RED)
    assert names.report(view(ONE, state)).tiers == {adapter_hash(RED): tier}
    assert names.report(view(ONE, state, draining=True)).tiers == {
        adapter_hash(RED): HoldingTier.DISK
    }
    del names.contents[RED]
    assert names.report(view(ONE, state)).tiers == {}, "it was forgotten"


def test_files_count_where_they_were_downloaded() -> None:
    names = Names()
    rule = MergeRule((1.0, 1.0))
    mixed = AdapterReference(AdapterSource.LOCAL, "mixed", parts=(BLUE, RED), rule=rule)
    names.contents[mixed] = AdapterKey(3)
    names.aliases.given[AdapterReference(AdapterSource.LOCAL, "mine")] = RED
    for name in (RED, BLUE, mixed, *names.aliases.given):
        names.reporter.requested(name)
    reply = names.report().tiers
    assert reply == {
        adapter_hash(name): HoldingTier.DISK for name in (RED, mixed, *names.aliases.given)
    }


def test_two_names_of_one_content_are_both_reported() -> None:
    names = Names()
    names.contents[BLUE] = ONE
    names.reporter.requested(RED)
    names.reporter.requested(BLUE)
    reply = names.report(view(ONE, AdapterState.DEVICE)).tiers
    assert reply == {adapter_hash(RED): HoldingTier.DEVICE, adapter_hash(BLUE): HoldingTier.DEVICE}


def test_only_pins_and_the_last_names_are_reported() -> None:
    names = Names()
    many = [AdapterReference(AdapterSource.HUB, f"a{i}") for i in range(2 * MAX_NAMES)]
    names.contents |= dict.fromkeys(many, TWO)
    for name in (*many, many[7]):
        names.reporter.requested(name)
    reply = names.report(view(TWO, AdapterState.HOST), pins=(RED,)).tiers
    last = [many[7], *reversed(many[-MAX_NAMES:])][: MAX_NAMES - 1]
    assert reply == {
        adapter_hash(RED): HoldingTier.DISK,
        **{adapter_hash(name): HoldingTier.HOST for name in last},
    }


def test_a_name_that_is_requested_again_stays() -> None:
    names = Names()
    many = [AdapterReference(AdapterSource.HUB, f"a{i}") for i in range(MAX_NAMES)]
    for name in (RED, *many[: MAX_NAMES // 2], RED, *many[MAX_NAMES // 2 :]):
        names.reporter.requested(name)
    assert names.report(view(ONE, AdapterState.HOST)).tiers == {adapter_hash(RED): HoldingTier.HOST}


def test_the_beat_grows_with_time_alone() -> None:
    reporter = Names().reporter
    reports = [reporter.report([], [], 0, True, now) for now in (0.0, 4.9, 5.0, 14.0, 1e6)]
    assert [report.beat for report in reports] == [0, 0, 1, 2, 200_000]
    assert reports[0].packed() == reports[1].packed() != reports[2].packed()


def test_an_engine_reports_requested_adapters(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        assert engine.report([], 0).tiers == {}
        missing = request("r0", [1], adapter="nobody")
        red = request("r1", [1, 2], adapter="red")
        await asyncio.gather(*(engine.generate(each, NOWHERE) for each in (missing, red)))
        reply = engine.report(await engine.adapter_views(), 5)
        assert red.adapter is not None
        assert reply.tiers == {adapter_hash(red.adapter): HoldingTier.DEVICE}
        assert (reply.load, reply.ready) == (5, True)

    play(root, story)


def test_an_engine_whose_ranks_are_rebuilt_is_not_ready(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        group.may_start.clear()
        group.kill(1)
        lost = asyncio.create_task(engine.generate(request("r", [1]), NOWHERE))
        while engine.report([], 0).ready:
            await engine.snapshot()
        assert not lost.done()
        group.may_start.set()
        await lost
        assert engine.report([], 0).ready

    play(root, story)

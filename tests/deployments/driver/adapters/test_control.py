"""An operator's commands on a real engine over fake ranks."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

from configs.runtime import RuntimeConfig
from configs.wire.adapters import AdapterReference, AdapterSource
from configs.wire.merging import MergeRule
from deployments.contract import (
    AdapterStatus,
    ErrorKind,
    Failed,
    ListAdapters,
    LoadAdapter,
    NameAdapter,
    PinAdapter,
    UnloadAdapter,
    UnnameAdapter,
    UnpinAdapter,
)
from deployments.driver.engine import DriverEngine
from deployments.engine_commands import EngineCommand
from tests.deployments.driver.fake_ranks import FakeGroup, continuation
from tests.deployments.driver.routing.stories import (
    NOWHERE,
    digest_of,
    play,
    request,
    together,
    tokens,
    until,
)
from tests.hub_server import HubServer


def local(name: str) -> AdapterReference:
    return AdapterReference(AdapterSource.LOCAL, name)


async def done(engine: DriverEngine, command: EngineCommand) -> AdapterStatus:
    report = await engine.adapters(command)
    assert report.failure is None, report.failure
    [status] = report.adapters
    return status


async def refused(engine: DriverEngine, command: EngineCommand) -> Failed:
    report = await engine.adapters(command)
    assert report.failure is not None
    return report.failure


async def settled(engine: DriverEngine, name: str, state: str) -> AdapterStatus:
    """Ask until the adapter is where it should come to be."""
    while True:
        status = await done(engine, ListAdapters(local(name)))
        if status.state == state:
            return status


def test_a_load_stages_without_a_request_and_reports_its_memory(root: Path) -> None:
    folder = root / "adapters" / "red"
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "rank_pattern": {"q": 24}}))

    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        status = await done(engine, LoadAdapter(local("red")))
        assert (status.state, status.rank, status.host_bytes) == ("host", 24, 100)
        assert status.bytes == (folder / "adapter_config.json").stat().st_size
        assert status.digest == digest_of(engine, "red")
        assert (status.num_requests, status.last_used, status.pinned) == (0, None, False)
        assert [list(runner.staged.values()) for runner in group.runners] == [[status.digest]] * 2
        again = await done(engine, LoadAdapter(local("red")))
        assert again == status

    play(root, story)


def test_a_pinned_load_comes_to_the_device_and_an_unload_takes_it_away(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        await done(engine, LoadAdapter(local("red"), pin=True))
        status = await settled(engine, "red", "device")
        assert status.pinned
        assert status.device_pages == 1
        await done(engine, UnloadAdapter(local("red")))
        status = await settled(engine, "red", "disk")
        assert (status.pinned, status.host_bytes, status.device_pages) == (False, 0, 0)
        while any(runner.staged for runner in group.runners):
            await engine.snapshot()

    play(root, story)


def test_an_unload_lets_running_and_waiting_requests_end(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        group.gate.clear()
        requests = await together(engine, [request(f"r{i}", [i], 12, "red") for i in range(12)])
        await until(engine, lambda snapshot: snapshot.running == 8)
        status = await done(engine, UnloadAdapter(local("red")))
        assert status.draining
        assert (status.running, status.waiting) == (8, 4)
        assert status.num_requests == 12
        group.gate.set()
        digest = digest_of(engine, "red")
        for i, answer in enumerate(await asyncio.gather(*requests)):
            assert tokens(answer) == [continuation(digest, [i], 12)]
        assert not (await settled(engine, "red", "disk")).draining

    play(root, story)


def test_pins_are_kept_until_they_are_removed(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        await done(engine, PinAdapter(local("red")))
        await settled(engine, "red", "device")
        for index in range(8):
            await engine.generate(request(f"r{index}", [1], 2, f"a{index}"), NOWHERE)
        assert (await done(engine, ListAdapters(local("red")))).state == "device"
        assert not (await done(engine, UnpinAdapter(local("red")))).pinned
        for index in range(8):
            await engine.generate(request(f"s{index}", [1], 2, f"a{index}"), NOWHERE)
        assert (await done(engine, ListAdapters(local("red")))).state != "device"

    play(root, story)


def test_access_is_checked_for_the_adapter_of_an_alias(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        await engine.reconfigure(RuntimeConfig(names={"free": "red"}))
        command = NameAdapter(local("given"), local("red"))
        assert (await engine.adapters(command)).failure is None

        async def ending(name: str, allowed: tuple[str, ...] | None) -> object:
            sent = replace(request(name, [1], 2, name), allowed=allowed)
            template = await engine.chat_template(local(name), None, allowed)
            [outcome] = (await engine.generate(sent, NOWHERE)).sequences
            failures = [one for one in (template, outcome.ending) if isinstance(one, Failed)]
            assert len(failures) in (0, 2), "a template is as closed as its adapter"
            return failures[-1].kind if failures else None

        for name in ("free", "given", "red"):
            assert await ending(name, ("local:red",)) is None
            assert await ending(name, ("hub:*", "local:r?d")) is None
            assert await ending(name, None) is None
            for others in (("local:free", "local:given", "local:blue"), ("hub:*",), ()):
                assert await ending(name, others) is ErrorKind.FORBIDDEN, (name, others)
        await engine.reconfigure(RuntimeConfig(names={"free": "red", "blue": "red"}))
        stands_for = {row.id: row.target for row in (await engine.describe()).adapters}
        names = {name: target for name, target in stands_for.items() if target}
        assert names == dict.fromkeys(("blue", "free", "given"), "local:red")
        assert "red" in stands_for
        await engine.reconfigure(RuntimeConfig(names={"free": "red"}))
        rule = MergeRule((1.0, 1.0))
        for parts, good in ((("free", "red"), True), (("red", "blue"), False)):
            merge = AdapterReference(
                AdapterSource.LOCAL, "m", parts=tuple(map(local, parts)), rule=rule
            )
            sent = replace(request("merge", [1], 2, None), adapter=merge, allowed=("local:red",))
            [outcome] = (await engine.generate(sent, NOWHERE)).sequences
            denied = isinstance(outcome.ending, Failed)
            assert denied != good

    play(root, story)


def test_what_the_config_pins_is_not_unloaded(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        await engine.reconfigure(RuntimeConfig(pinned_adapters=("red",)))
        failure = await refused(engine, UnloadAdapter(local("red")))
        assert failure.kind is ErrorKind.VALIDATION
        assert "user_config" in failure.message
        await done(engine, PinAdapter(local("red")))
        await done(engine, UnpinAdapter(local("red")))
        assert (await settled(engine, "red", "device")).pinned
        await engine.reconfigure(RuntimeConfig())
        await done(engine, UnloadAdapter(local("red")))
        await settled(engine, "red", "disk")

    play(root, story)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("missing", ErrorKind.ADAPTER_NOT_FOUND),
        ("../secret", ErrorKind.ADAPTER_NOT_FOUND),
        ("broken", ErrorKind.ADAPTER_UNSUPPORTED),
        ("crash", ErrorKind.ADAPTER_UNAVAILABLE),
    ],
)
def test_a_load_that_fails_says_why(root: Path, name: str, kind: ErrorKind) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        assert (await refused(engine, LoadAdapter(local(name)))).kind is kind
        assert (await done(engine, LoadAdapter(local("red")))).state == "host"

    play(root, story)


def test_a_load_that_a_rebuild_interrupts_ends_well(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        group.staging_gate.clear()
        loading = asyncio.create_task(engine.adapters(LoadAdapter(local("slow1"))))
        while not (await engine.adapter_views()):
            pass
        group.kill(0)
        group.staging_gate.set()
        report = await loading
        assert report.failure is None
        assert report.adapters[0].state == "host"

    assert play(root, story).starts == 2


def test_an_unload_ends_a_load_that_still_waits(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        loading = asyncio.create_task(engine.adapters(LoadAdapter(local("slow1"))))
        while not (await engine.adapter_views()):
            pass
        await done(engine, UnloadAdapter(local("slow1")))
        failure = (await loading).failure
        assert failure is not None
        assert "unloaded" in failure.message
        group.staging_gate.set()

    play(root, story)


def test_an_alias_serves_its_adapter_until_it_is_removed(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        name = NameAdapter(local("sql"), local("red"))
        status = await done(engine, name)
        assert (status.reference, status.target, status.state) == (
            local("sql"),
            local("red"),
            "host",
        )
        answer = await engine.generate(request("r", [3], 5, "sql"), NOWHERE)
        assert tokens(answer) == [continuation(digest_of(engine, "red"), [3], 5)]
        assert [record.adapter for record in engine.usage.drain_requests()] == ["red"]
        assert "already been loaded" in (await refused(engine, name)).message
        moved = NameAdapter(local("sql"), local("blue"), replace=True)
        await done(engine, moved)
        answer = await engine.generate(request("s", [3], 5, "sql"), NOWHERE)
        assert tokens(answer) == [continuation(digest_of(engine, "blue"), [3], 5)]
        unname = UnnameAdapter(local("sql"))
        assert (await engine.adapters(unname)).failure is None
        ending = (await engine.generate(request("t", [3], 5, "sql"), NOWHERE)).sequences[0].ending
        assert isinstance(ending, Failed)
        assert ending.kind is ErrorKind.ADAPTER_NOT_FOUND
        await settled(engine, "blue", "disk")
        assert (await refused(engine, unname)).kind is ErrorKind.ADAPTER_NOT_FOUND

    play(root, story)


def test_folders_are_named_only_under_the_roots(root: Path) -> None:
    inside = root / "adapters" / "red"
    (root / "adapters" / "link").symlink_to(root)

    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        def name(folder: Path | str) -> EngineCommand:
            return NameAdapter(local("x"), str(folder))

        outside = (root, "/etc", inside / ".." / ".." / "adapters", root / "adapters" / "link")
        for folder in (*outside, "/\0"):
            failure = await refused(engine, name(folder))
            assert failure.kind is ErrorKind.ADAPTER_NOT_FOUND
            assert "local_roots" in failure.message
        status = await done(engine, name(inside))
        assert status.target == local("red")

    play(root, story)


def test_aliases_of_the_config_cannot_be_changed_by_commands(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        await engine.reconfigure(RuntimeConfig(names={"sql": "local:red"}))
        answer = await engine.generate(request("r", [3], 5, "sql"), NOWHERE)
        assert tokens(answer) == [continuation(digest_of(engine, "red"), [3], 5)]
        taken = NameAdapter(local("sql"), local("blue"), replace=True)
        assert "user_config" in (await refused(engine, taken)).message
        await engine.reconfigure(RuntimeConfig())
        ending = (await engine.generate(request("s", [3], 5, "sql"), NOWHERE)).sequences[0].ending
        assert isinstance(ending, Failed)

    play(root, story)


def test_an_alias_of_the_config_comes_before_one_from_a_command(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        await done(engine, NameAdapter(local("sql"), local("blue")))
        await engine.reconfigure(RuntimeConfig(names={"sql": "local:red"}))
        answer = await engine.generate(request("r", [3], 5, "sql"), NOWHERE)
        assert tokens(answer) == [continuation(digest_of(engine, "red"), [3], 5)]
        assert (await done(engine, ListAdapters(local("sql")))).target == local("red")
        await engine.reconfigure(RuntimeConfig())
        answer = await engine.generate(request("s", [3], 5, "sql"), NOWHERE)
        assert tokens(answer) == [continuation(digest_of(engine, "blue"), [3], 5)]

    play(root, story)


def test_a_private_adapter_is_pinned_with_the_token_that_loads_it(root: Path) -> None:
    sql = AdapterReference(AdapterSource.HUB, "acme/sql")
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"\x02" + bytes(7) + b"{}"}
    with HubServer() as hub:
        hub.add("acme/sql", files, readers={"hf_good"})
        adapters = {"hub_endpoint": hub.url, "fetch": {"cache_dir": str(root / "cache")}}

        async def story(engine: DriverEngine, group: FakeGroup) -> None:
            load = LoadAdapter(sql, pin=True, api_token="hf_good")
            assert "hf_good" not in repr(load)
            assert (await done(engine, load)).pinned
            again = PinAdapter(sql)
            assert (await done(engine, again)).pinned, "it needs no right to stay"

        play(root, story, adapters=adapters)


def test_the_list_has_known_adapters_and_those_on_disk(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        await engine.generate(request("r", [1], 3, "red"), NOWHERE)
        report = await engine.adapters(ListAdapters())
        by_name = {status.reference.id: status for status in report.adapters}
        assert by_name["red"].state == "device"
        assert by_name["red"].num_requests == 1
        assert by_name["red"].last_used is not None
        assert by_name["blue"].state == "disk"
        assert by_name["blue"].digest is None
        assert (await engine.adapters(ListAdapters(local("nobody")))).adapters == []
        second = AdapterReference(AdapterSource.LOCAL, "blue", "v2")
        assert (await engine.adapters(ListAdapters(second))).adapters == []
        (root / "adapters/blue").rename(root / "adapters/blue@v2")
        [versioned] = (await engine.adapters(ListAdapters(second))).adapters
        assert versioned.state == "disk"

    play(root, story)


def test_shares_of_the_config_change_without_a_restart(root: Path) -> None:
    """Each request takes 60 steps, so the first has ended after 70, and the second has not."""

    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        one = {"adapters": {"red": {"max_concurrent": 1}}}
        await engine.reconfigure(RuntimeConfig.model_validate(one))
        group.gate.clear()
        requests = await together(engine, [request(f"r{i}", [i], 60, "red") for i in range(4)])
        await until(engine, lambda snapshot: (snapshot.running, snapshot.queued) == (1, 3))
        group.gate.let(70)
        most = 1
        while not any(task.done() for task in requests):
            most = max([most, *(view.running for view in await engine.adapter_views())])
        assert most == 1
        await until(engine, lambda snapshot: (snapshot.running, snapshot.queued) == (1, 2))
        await engine.reconfigure(RuntimeConfig())
        group.gate.let(10)
        await until(engine, lambda snapshot: snapshot.running == 3)
        group.gate.set()
        for i, answer in enumerate(await asyncio.gather(*requests)):
            assert tokens(answer) == [continuation(digest_of(engine, "red"), [i], 60)]

    assert play(root, story).starts == 1


def test_a_rate_wakes_an_idle_loop(root: Path) -> None:
    """All that waits is in debt: nothing but time goes on."""

    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        slow = {"base_model": {"tokens_per_second": 60}}
        await engine.reconfigure(RuntimeConfig.model_validate(slow))
        await engine.generate(request("first", [1] * 40, 30), NOWHERE)
        answer = await engine.generate(request("second", [4], 5), NOWHERE)
        assert tokens(answer) == [continuation("", [4], 5)]

    play(root, story)


def test_requests_and_loads_reach_the_metrics(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        await engine.generate(request("r", [1, 2], 5, "red", num=2), NOWHERE)
        await engine.generate(request("s", [1], 1), NOWHERE)
        await engine.generate(request("t", [1], 2, "broken"), NOWHERE)
        red, twin, base, broken = engine.usage.drain_requests()
        assert red == twin or red.adapter == twin.adapter == "red"
        assert (red.ok, red.prompt_tokens, red.generated_tokens) == (True, 2, 5)
        assert red.first_token_seconds is not None
        assert red.per_token_seconds is not None
        assert (base.adapter, base.per_token_seconds) == ("base", None)
        assert (broken.adapter, broken.ok, broken.first_token_seconds) == ("broken", False, None)
        assert engine.usage.drain_requests() == []
        reply = engine.usage.load_sums()
        stages = [record.stage for record in engine.usage.drain_loads()]
        assert {"fetch", "stage"} <= set(stages)
        assert {stage: sums.count for stage, sums in reply.items()} == Counter(stages)
        assert engine.usage.load_sums() == reply, "what was drained is in the sums"
        counts = (await engine.snapshot()).adapter_counts
        assert (counts.misses, counts.device_hits) == (3, 0)
        await engine.generate(request("u", [1], 1, "red"), NOWHERE)
        assert (await engine.snapshot()).adapter_counts.device_hits == 1

    play(root, story)

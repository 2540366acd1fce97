"""A merge is a name like any other: rights for each part, one content, versions, nothing left."""

import asyncio
import json
from pathlib import Path

import pytest

from configs.runtime import RuntimeConfig
from configs.wire.adapters import AdapterError, AdapterReference, AdapterRefusal, AdapterSource
from configs.wire.merging import MergeRule
from configs.wire.sampling import Sampling, Stopping
from configs.wire.templates import TemplateSource
from deployments.contract import (
    ErrorKind,
    Failed,
    GenerateRequest,
    ListAdapters,
    SequenceRequest,
)
from deployments.driver.adapters.directory import AdapterDirectory
from deployments.driver.engine import DriverEngine
from scheduler.events import AdapterUnloaded
from tests.deployments.driver.adapters.directory_stories import (
    patient_config,
    play,
    refusal,
    used,
    used_at_last,
)
from tests.deployments.driver.adapters.test_versions import rewrite
from tests.deployments.driver.fake_ranks import FakeGroup, continuation
from tests.deployments.driver.routing.stories import (
    NOWHERE,
    PATIENCE_S,
    digest_of,
    together,
    tokens,
    until,
)
from tests.deployments.driver.routing.stories import play as play_engine
from tests.hub_server import HubServer
from tests.sources.adapter_files import adapter_files, write_files

HALVES = MergeRule((0.5, 0.5))
SQL, CODE = (AdapterReference(AdapterSource.HUB, f"acme/{name}") for name in ("sql", "code"))


def merge(*parts: AdapterReference, rule: MergeRule = HALVES) -> AdapterReference:
    return AdapterReference(AdapterSource.LOCAL, ",".join(p.id for p in parts), None, parts, rule)


def local(*names: str, rule: MergeRule = HALVES) -> AdapterReference:
    return merge(*(AdapterReference(AdapterSource.LOCAL, name) for name in names), rule=rule)


def test_every_part_of_a_merge_needs_access(hub: HubServer, tmp_path: Path) -> None:
    hub.add("acme/sql", adapter_files(1.0), readers={"hf_both", "hf_sql"})
    hub.add("acme/code", adapter_files(2.0), readers={"hf_both", "hf_code"})

    async def story(directory: AdapterDirectory) -> None:
        both = merge(SQL, CODE)
        key = await directory.resolve(both, "hf_both")
        for token in (False, "hf_sql", "hf_code"):
            assert await refusal(directory, both, token) is AdapterRefusal.NOT_FOUND
        assert await used(directory, both, "hf_both") == key
        assert [part.name for part in directory.fetched(key).parts] == ["acme/sql", "acme/code"]
        assert len(hub.downloads()) == 4
        directory.release(key)
        assert set(directory.names()) == {SQL, CODE}, "merges are not listed"
        assert [row.id for row in await directory.listing()] == ["acme/code", "acme/sql"]

    play(patient_config(tmp_path, hub_endpoint=hub.url), story)


def test_parts_are_kept_while_the_merge_is_held(hub: HubServer, tmp_path: Path) -> None:
    for value, name in enumerate(("acme/sql", "acme/code", "acme/third")):
        hub.add(name, adapter_files(float(value)))
    size = sum(map(len, adapter_files().values()))
    fetch = {"cache_bytes": 2 * size + 10, "refusal_s": 0}
    third = AdapterReference(AdapterSource.HUB, "acme/third")

    async def story(directory: AdapterDirectory) -> None:
        key = await directory.resolve(merge(SQL, CODE), False)
        assert await refusal(directory, third) is AdapterRefusal.UNAVAILABLE
        folders = [Path(part.folder) for part in directory.fetched(key).parts]
        assert all(folder.exists() for folder in folders)
        directory.release(key)
        await used_at_last(directory, third)
        assert not all(folder.exists() for folder in folders)

    play(patient_config(tmp_path, fetch, hub_endpoint=hub.url), story)


def test_a_caller_that_leaves_or_a_failed_part_holds_nothing(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.add("acme/sql", adapter_files(1.0))
    write_files(tmp_path / "roots" / "red", adapter_files(2.0))
    config = patient_config(
        tmp_path, {"refusal_s": 0}, hub_endpoint=hub.url, local_roots=[str(tmp_path / "roots")]
    )
    red = AdapterReference(AdapterSource.LOCAL, "red")

    async def story(directory: AdapterDirectory) -> None:
        with pytest.raises(AdapterError, match="acme/code"):
            await directory.resolve(merge(red, CODE, red, rule=MergeRule((1, 1, 1))), False)
        hub.gate.clear()
        leaving = asyncio.create_task(directory.resolve(merge(red, SQL), False))
        assert await asyncio.to_thread(hub.file_requested.wait, PATIENCE_S)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        hub.gate.set()
        await used_at_last(directory, SQL)
        await asyncio.sleep(0)  # its fetch releases it after all callers hold it
        assert [known.holders for known in directory._known.values()] == [0, 0]

    play(config, story)


def test_merges_and_their_parts_are_forgotten_and_found_again(tmp_path: Path) -> None:
    for index in range(30):
        write_files(tmp_path / "roots" / f"a{index}", adapter_files(float(index)))
    config = patient_config(tmp_path, local_roots=[str(tmp_path / "roots")], max_known=4)

    async def story(directory: AdapterDirectory) -> None:
        first = await directory.resolve(local("a0", "a1"), False)
        digest = directory.fetched(first).digest
        idle = await used(directory, local("a2", "a3"))
        for index in range(4, 30, 2):
            await used(directory, local(f"a{index}", f"a{index + 1}"))
            await asyncio.sleep(0.01)
        assert len(directory._known) <= 20
        assert directory.fetched(first).digest == digest
        assert not directory.hold(idle), "forgotten, or a part of it was"
        again = await directory.resolve(local("a2", "a3"), False)
        assert [part.name for part in directory.fetched(again).parts] == ["a2", "a3"]
        for key in (first, again):
            directory.release(key)

    play(config, story)


def test_a_part_that_was_forgotten_has_another_key(tmp_path: Path) -> None:
    for index in range(2):
        write_files(tmp_path / "roots" / f"a{index}", adapter_files(float(index)))

    async def story(directory: AdapterDirectory) -> None:
        both = local("a0", "a1")
        key = await used(directory, both)
        part = directory.find(both.parts[0])
        assert part is not None
        directory._forget(part, directory._known[part])
        assert not directory.hold(key)
        assert await directory.resolve(both, False) == key
        assert [part.name for part in directory.fetched(key).parts] == ["a0", "a1"]
        directory.release(key)

    play(patient_config(tmp_path, local_roots=[str(tmp_path / "roots")]), story)


def ask(name: str, adapter: AdapterReference, count: int = 4) -> GenerateRequest:
    sequence = SequenceRequest([1, 2], Sampling(), Stopping(count))
    return GenerateRequest(name, [sequence], adapter)


def test_one_recipe_is_one_adapter_on_the_ranks(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        requests = [local("red", "blue"), local("red", "blue", rule=MergeRule((0.5, 0.6)))]
        answers = await asyncio.gather(
            *(engine.generate(ask(f"r{i}", requests[i % 2]), NOWHERE) for i in range(8))
        )
        parts = [digest_of(engine, name) for name in ("red", "blue")]
        digests = [one.rule.digest(parts) for one in requests if one.rule is not None]
        for i, answer in enumerate(answers):
            assert tokens(answer) == [continuation(digests[i % 2], [1, 2], 4)]
        for runner in group.runners:
            assert sorted(runner.staged.values()) == sorted(digests)
        assert await engine.chat_template(requests[0], None) == TemplateSource()

    play_engine(root, story)


def test_a_part_that_moves_makes_a_new_version_of_the_merge(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        both = local("red", "blue")
        await engine.reconfigure(RuntimeConfig(names={"alias": "red"}))
        named = local("alias", "blue")
        before = tokens(await engine.generate(ask("first", both), NOWHERE))
        assert tokens(await engine.generate(ask("named", named), NOWHERE)) == before
        rewrite(root, "red", "damaged")
        for name in ("second", "third"):
            assert tokens(await engine.generate(ask(name, both), NOWHERE)) == before
            await engine._adapters.settle()
        rewrite(root, "red", "new")
        await engine.generate(ask("fourth", both), NOWHERE)
        await engine._adapters.settle()
        digest = HALVES.digest([digest_of(engine, name) for name in ("red", "blue")])
        after = tokens(await engine.generate(ask("fifth", both), NOWHERE))
        assert after == [continuation(digest, [1, 2], 4)] != before

    play_engine(root, story)


def test_a_missing_part_is_refused_by_its_name(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        answer = await engine.generate(ask("r", local("red", "nobody")), NOWHERE)
        ending = answer.sequences[0].ending
        assert isinstance(ending, Failed)
        assert ending.kind is ErrorKind.ADAPTER_NOT_FOUND
        assert "'nobody'" in ending.message

    play_engine(root, story)


def test_a_parts_cap_holds_over_its_merges(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        one = {"adapters": {"red": {"max_concurrent": 1}}}
        await engine.reconfigure(RuntimeConfig.model_validate(one))
        recipes = [local("red", "blue", rule=MergeRule((0.5, weight))) for weight in (1, 2)]
        red = AdapterReference(AdapterSource.LOCAL, "red")
        names = [*recipes, red, local("red", "red")]
        group.gate.clear()
        requests = await together(engine, [ask(f"r{i}", name, 30) for i, name in enumerate(names)])
        await until(engine, lambda snapshot: (snapshot.running, snapshot.queued) == (1, 3))
        group.gate.set()
        most = 1
        while not all(task.done() for task in requests):
            most = max(most, sum(view.running for view in await engine.adapter_views()))
        assert most == 1
        for answer in await asyncio.gather(*requests):
            tokens(answer)

    play_engine(root, story)


def test_merges_are_listed_while_the_ranks_have_them(root: Path) -> None:
    for name, rank in (("red", 8), ("blue", 24)):
        config = {"name": name, "r": rank}
        (root / "adapters" / name / "adapter_config.json").write_text(json.dumps(config))
    everything = ListAdapters()

    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        both = local("red", "blue")
        await engine.generate(ask("r", both), NOWHERE)
        replies = {
            status.reference: status for status in (await engine.adapters(everything)).adapters
        }
        row = replies[both]
        assert (row.state, row.rank, row.bytes, row.num_requests) == ("device", 24, 0, 1)
        assert row.digest == HALVES.digest([digest_of(engine, name) for name in ("red", "blue")])
        assert replies[both.parts[0]].state == "disk", "a part alone is not staged"
        key = engine._directory.find(both)
        assert key is not None
        unload = AdapterUnloaded(key)
        engine._handle.post(lambda scheduler, now: scheduler.handle_adapter_event(unload))
        while key in {view.key for view in await engine.adapter_views()}:
            pass
        assert both not in {s.reference for s in (await engine.adapters(everything)).adapters}

    play_engine(root, story)

"""Local adapters whose files are slow, hang or change: no other waits, the last version serves."""

import asyncio
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.wire.adapters import AdapterError, AdapterReference, AdapterRefusal, AdapterSource
from deployments.contract import (
    Failed,
    ListAdapters,
    UnloadAdapter,
)
from deployments.driver.adapters.directory import AdapterDirectory
from deployments.driver.engine import DriverEngine
from sources.adapters import AdapterSources
from sources.base import AdapterFolder
from sources.files import content_digest
from tests.deployments.driver.adapters.test_versions import ask, rewrite
from tests.deployments.driver.fake_ranks import FakeGroup, continuation
from tests.deployments.driver.routing.stories import (
    NOWHERE,
    PATIENCE_S,
    config,
    digest_of,
    play,
    request,
    tokens,
)
from tests.sources.adapter_files import adapter_files, adapters_config, write_files

SOON_S = 0.05


def adapters(root: Path, look_timeout_s: float = SOON_S) -> dict[str, Any]:
    """The section of an engine's config."""
    plain = config(root).adapters.model_dump(mode="json", exclude_unset=True)
    return {"adapters": {**plain, "look_timeout_s": look_timeout_s}}


class Gate:
    """A call that waits while its gate is shut, for the names that it is shut for."""

    def __init__(
        self, call: Callable[..., Any], name_of: Callable[..., str], shut: set[str]
    ) -> None:
        self.call, self.name_of, self.shut = call, name_of, shut
        self.opened = threading.Event()
        self.num_waiting = 0

    def __call__(self, *arguments: Any) -> Any:
        if self.name_of(*arguments) in self.shut:
            self.num_waiting += 1
            self.opened.wait()
        return self.call(*arguments)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what a thread does."""
    for _ in range(10**9):
        if condition():
            return
        await asyncio.sleep(0.001)


def gate_looks(monkeypatch: pytest.MonkeyPatch, shut: set[str]) -> Gate:
    look = AdapterSources.resolve
    gate = Gate(look, lambda store, reference, token: reference.id, shut)
    monkeypatch.setattr(AdapterSources, "resolve", lambda *arguments: gate(*arguments))
    return gate


def gate_hashing(monkeypatch: pytest.MonkeyPatch, shut: set[str]) -> Gate:
    gate = Gate(content_digest, lambda folder: folder.folder.name, shut)
    monkeypatch.setattr("sources.adapters.content_digest", gate)
    return gate


def failure(completion: Any) -> Failed:
    ending = completion.sequences[0].ending
    assert isinstance(ending, Failed), ending
    return ending


def test_lookups_do_not_wait_for_hashing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight large cold folders, of which four are hashed at once; a resident one is requested."""
    cold = [f"cold{i}" for i in range(8)]
    for name in cold:
        write_files(root / "adapters" / name, {"adapter_config.json": name.encode()})
    # What was written just now is hashed again: it may be written within the clock's tick.
    for path in (root / "adapters" / "red").iterdir():
        os.utime(path, (1, 1))

    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        await ask(engine, "red", "first")
        gate = gate_hashing(monkeypatch, set(cold))
        waiting = [asyncio.create_task(ask(engine, name, name)) for name in cold]
        await until(lambda: gate.num_waiting == 4)
        assert await ask(engine, "red", "second") == continuation(digest_of(engine, "red"), [1], 3)
        assert gate.num_waiting == 4, "one more is not begun: the disk would only seek"
        gate.opened.set()
        await asyncio.gather(*waiting)

    play(root, story)


def test_the_last_version_serves_after_an_overdue_lookup(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        await ask(engine, "red", "first")
        expected = continuation(digest_of(engine, "red"), [1], 3)
        gate = gate_looks(monkeypatch, {"red"})
        for index in range(3):
            assert await ask(engine, "red", f"h{index}") == expected
        assert gate.num_waiting == 1, "a lookup that hangs is not started again"
        assert engine.num_overdue == 3
        await ask(engine, "blue", "other")
        gate.opened.set()

    play(root, story, **adapters(root))


def test_without_a_version_in_memory_requests_wait_for_the_lookup(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files would have to be read, on the same mount, by the ranks."""

    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        await ask(engine, "red", "first")
        red = AdapterReference(AdapterSource.LOCAL, "red")
        assert (await engine.adapters(UnloadAdapter(red))).failure is None
        while any(runner.staged for runner in group.runners):
            await engine.snapshot()
        gate = gate_looks(monkeypatch, {"red"})
        sent = asyncio.create_task(ask(engine, "red", "second"))
        await until(lambda: bool(gate.num_waiting))
        await asyncio.sleep(2 * SOON_S)
        assert not sent.done()
        gate.opened.set()
        assert await sent
        assert not engine.num_overdue

    play(root, story, **adapters(root))


def test_hashing_a_new_version_does_not_delay_the_old_one(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        await ask(engine, "red", "first")
        old = continuation(digest_of(engine, "red"), [1], 3)
        gate = gate_hashing(monkeypatch, {"red"})
        for content in ("new", "newer", "newest"):
            rewrite(root, "red", content)
            assert await ask(engine, "red", content) == old
        assert gate.num_waiting == 1, "one version at a time"
        gate.opened.set()
        reference = AdapterReference(AdapterSource.LOCAL, "red")
        before = engine._adapters.serving(reference)
        while engine._adapters.serving(reference) == before:
            await ask(engine, "red", "again")
            await engine._adapters.settle()
        expected = continuation(digest_of(engine, "red"), [1], 3)
        assert await ask(engine, "red", "after") == expected != old

    play(root, story, **adapters(root))


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "adapter_model.safetensors")


def half(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 12)


@pytest.mark.parametrize("damage", [pipe, half])
def test_a_version_that_cannot_be_read_does_not_replace_one_that_is(
    root: Path, damage: Callable[[Path], None]
) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        await ask(engine, "red", "first")
        old = continuation(digest_of(engine, "red"), [1], 3)
        damage(root / "adapters" / "red")
        assert await ask(engine, "red", "second") == old
        damage(write_files(root / "adapters" / "cold", {"adapter_config.json": b"{}"}))
        fault = failure(await engine.generate(request("cold", [1], 3, "cold"), NOWHERE))
        assert "adapter_model.safetensors" in fault.message
        assert fault.kind.value == AdapterRefusal.UNSUPPORTED.value

    play(root, story)


def test_a_version_that_is_gone_or_forbidden_is_not_served(root: Path, tmp_path: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        folder = root / "adapters" / "red"
        await ask(engine, "red", "first")
        (folder / "adapter_model.safetensors").symlink_to("/etc/hostname")
        fault = failure(await engine.generate(request("a", [1], 3, "red"), NOWHERE))
        assert fault.kind.value == AdapterRefusal.FORBIDDEN.value
        folder.rename(tmp_path / "gone")
        fault = failure(await engine.generate(request("b", [1], 3, "red"), NOWHERE))
        assert fault.kind.value == AdapterRefusal.NOT_FOUND.value

    play(root, story)


def test_pipes_delay_no_request(root: Path) -> None:
    """Each would hold a thread until a writer comes."""

    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        for index in range(20):
            folder = write_files(
                root / "adapters" / f"p{index}", {"adapter_config.json": json.dumps({}).encode()}
            )
            pipe(folder)
            sent = request(folder.name, [1], 3, folder.name)
            fault = failure(await engine.generate(sent, NOWHERE))
            assert "no regular file" in fault.message
        assert await ask(engine, "red", "other")

    play(root, story)


def test_lists_do_not_wait_for_roots_that_hang(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        listed = [row.id for row in (await engine.describe()).adapters]
        assert "red" in listed
        gate = Gate(AdapterSources.known_local, lambda store: "", {""})
        monkeypatch.setattr(AdapterSources, "known_local", lambda store: gate(store))
        for _ in range(3):
            assert [row.id for row in (await engine.describe()).adapters] == listed
        report = await engine.adapters(ListAdapters())
        assert {status.reference.id for status in report.adapters} >= {"red", "blue"}
        assert gate.num_waiting == 1
        gate.opened.set()

    play(root, story, **adapters(root))


def test_a_template_of_files_that_hang_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        red = AdapterReference(AdapterSource.LOCAL, "red")
        opened = threading.Event()
        monkeypatch.setattr(
            "deployments.driver.adapters.lifecycle.read_template", lambda folder: opened.wait()
        )
        reply = await engine.chat_template(red, None)
        assert isinstance(reply, Failed)
        assert "could not be read within" in reply.message
        opened.set()

    play(root, story, **adapters(root))


def test_files_that_change_while_they_are_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = adapters_config(tmp_path, local_roots=[str(tmp_path / "roots")])
    folder = write_files(tmp_path / "roots" / "red", adapter_files())

    def hashed(found: AdapterFolder) -> str:
        answer = content_digest(found)
        write_files(folder, adapter_files(2.0, more=b""))
        os.utime(folder / "adapter_model.safetensors", ns=(0, 1))
        return answer

    monkeypatch.setattr("sources.adapters.content_digest", hashed)

    async def story() -> None:
        directory = AdapterDirectory(AdapterSources(settings), settings)
        with pytest.raises(AdapterError, match="its files change: try again"):
            await directory.resolve(AdapterReference(AdapterSource.LOCAL, "red"), False)
        directory.close()

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def test_the_last_answer_of_requests_is_whole(root: Path) -> None:
    """What serves while a look is overdue is held like any other version."""

    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        answer = await engine.generate(request("r", [1], 3, "red"), NOWHERE)
        assert len(tokens(answer)[0]) == 3
        engine._directory.check()

    play(root, story, **adapters(root))

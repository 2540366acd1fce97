"""The directory with a local hub: versions, one download, files in use, bounded memory."""

import asyncio
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.wire.adapters import (
    AdapterKey,
    AdapterReference,
    AdapterRefusal,
    AdapterSource,
)
from deployments.driver.adapters.directory import AdapterDirectory
from tests.deployments.driver.adapters.directory_stories import (
    LINGER_S,
    SQL,
    is_on_disk,
    pass_by,
    patient_config,
    play,
    refusal,
    used,
    used_at_last,
)
from tests.deployments.driver.routing.stories import PATIENCE_S
from tests.hub_server import HubServer
from tests.sources.adapter_files import adapter_files, write_files


def test_many_callers_share_a_lookup_and_a_download_and_may_leave(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.add("acme/sql", adapter_files(), readers={"hf_0", "hf_1"})
    hub.gate.clear()

    async def story(directory: AdapterDirectory) -> None:
        requests = [
            asyncio.create_task(directory.resolve(SQL, f"hf_{index % 2}")) for index in range(20)
        ]
        assert await asyncio.to_thread(hub.file_requested.wait, PATIENCE_S)
        for task in requests[:10]:
            task.cancel()
        hub.gate.set()
        keys = await asyncio.gather(*requests[10:])
        assert len(set(keys)) == 1
        assert hub.looks() == 2
        assert len(hub.downloads()) == 2
        for key in keys:
            directory.release(key)

    play(patient_config(tmp_path, hub_endpoint=hub.url), story)


def test_a_slow_download_delays_only_its_own_requests(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("acme/sql", adapter_files())
    write_files(tmp_path / "roots" / "red", adapter_files(2.0))
    hub.gate.clear()
    limit = PATIENCE_S / 3
    config = patient_config(
        tmp_path,
        {"refusal_s": 0},
        hub_endpoint=hub.url,
        fetch_timeout_s=limit,
        local_roots=[str(tmp_path / "roots")],
    )

    async def story(directory: AdapterDirectory) -> None:
        slow = asyncio.create_task(refusal(directory, SQL))
        assert await asyncio.to_thread(hub.file_requested.wait, PATIENCE_S)
        await used(directory, AdapterReference(AdapterSource.LOCAL, "red"))
        assert not slow.done()
        pass_by(monkeypatch, 1.1 * limit)
        assert await slow is AdapterRefusal.UNAVAILABLE
        hub.gate.set()
        await used_at_last(directory, SQL)  # the download went on
        assert len(hub.downloads()) == 2

    play(config, story)


def test_a_name_moves_and_equal_bytes_keep_their_key(hub: HubServer, tmp_path: Path) -> None:
    repository = hub.add("acme/sql", adapter_files(1.0))
    older = AdapterReference(AdapterSource.HUB, "acme/sql", repository.sha)
    write_files(tmp_path / "roots" / "copy", adapter_files(1.0))
    config = patient_config(
        tmp_path, {"recheck_s": 0}, hub_endpoint=hub.url, local_roots=[str(tmp_path / "roots")]
    )

    async def story(directory: AdapterDirectory) -> None:
        first = await used(directory, SQL)
        repository.files = adapter_files(2.0)
        second = await used(directory, SQL)
        assert second != first
        assert await used(directory, older) == first, "rolled back to the same prefix cache"
        assert await used(directory, AdapterReference(AdapterSource.LOCAL, "copy")) == first

    play(config, story)


def test_a_rewritten_folder_is_new_and_an_old_time_does_not_fool_it(tmp_path: Path) -> None:
    red = AdapterReference(AdapterSource.LOCAL, "red")
    folder = tmp_path / "roots" / "red"
    folder.mkdir(parents=True)

    async def story(directory: AdapterDirectory) -> None:
        keys = []
        for value in (1.0, 2.0, 1.0):
            write_files(folder, adapter_files(value))
            keys.append(await used(directory, red))
        assert keys[0] == keys[2] != keys[1]

    play(patient_config(tmp_path, local_roots=[str(tmp_path / "roots")]), story)


def test_files_are_kept_while_a_holder_has_them(hub: HubServer, tmp_path: Path) -> None:
    for name, value in (("acme/a", 1.0), ("acme/b", 2.0)):
        hub.add(name, adapter_files(value))
    size = sum(map(len, adapter_files().values()))
    config = patient_config(
        tmp_path, {"cache_bytes": size + 10, "refusal_s": 0}, hub_endpoint=hub.url
    )
    a, b = (AdapterReference(AdapterSource.HUB, f"acme/{name}") for name in "ab")

    async def story(directory: AdapterDirectory) -> None:
        key = await directory.resolve(a, False)
        assert await refusal(directory, b) is AdapterRefusal.UNAVAILABLE
        assert is_on_disk(directory, key)
        directory.release(key)
        await used_at_last(directory, b)  # as soon as the other was let go
        assert not is_on_disk(directory, key)
        assert await used_at_last(directory, a) == key, "brought again, the same content"

    play(config, story)


def test_files_stay_for_all_callers_even_if_the_event_loop_is_late(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The linger time is over before the waiting caller resumes."""
    for name, value in (("acme/a", 1.0), ("acme/b", 2.0)):
        hub.add(name, adapter_files(value))
    size = sum(map(len, adapter_files().values()))
    config = patient_config(
        tmp_path, {"cache_bytes": size + 10, "refusal_s": 0}, hub_endpoint=hub.url
    )
    a, b = (AdapterReference(AdapterSource.HUB, f"acme/{name}") for name in "ab")

    async def story(directory: AdapterDirectory) -> None:
        register = directory._register

        def be_late(*brought: Any) -> AdapterKey:
            key = register(*brought)
            pass_by(monkeypatch, 2 * LINGER_S)
            return key

        monkeypatch.setattr(directory, "_register", be_late)
        key = await directory.resolve(a, False)
        assert await refusal(directory, b) is AdapterRefusal.UNAVAILABLE
        assert is_on_disk(directory, key)
        directory.release(key)
        await used_at_last(directory, b)

    play(config, story)


def test_unused_adapters_are_forgotten_beyond_the_bound(tmp_path: Path) -> None:
    for index in range(60):
        write_files(tmp_path / "roots" / f"a{index}", adapter_files(float(index)))
    config = patient_config(tmp_path, local_roots=[str(tmp_path / "roots")], max_known=10)

    async def story(directory: AdapterDirectory) -> None:
        held = await directory.resolve(AdapterReference(AdapterSource.LOCAL, "a0"), False)
        for index in range(60):
            await used(directory, AdapterReference(AdapterSource.LOCAL, f"a{index}"))
            await asyncio.sleep(0.005)
        assert len(directory._known) <= 20
        assert directory.fetched(held).name == "a0"
        directory.release(held)

    directory = play(config, story)
    assert len(directory._references) <= 20


def test_a_lookup_of_a_known_adapter_uses_no_thread(hub: HubServer, tmp_path: Path) -> None:
    """A hot adapter of the hub is resolved on the event loop alone."""
    hub.add("acme/sql", adapter_files())

    async def story(directory: AdapterDirectory) -> None:
        key = await directory.resolve(SQL, False)
        lookups = directory.lookups
        for calls in (lookups._looking, lookups._reading, lookups._downloading):
            calls.close()
        assert await used(directory, SQL) == key
        directory.release(key)

    play(patient_config(tmp_path, hub_endpoint=hub.url), story)


def test_a_local_revision_is_listed_by_the_name_that_finds_it(tmp_path: Path) -> None:
    write_files(tmp_path / "roots" / "red@v1", adapter_files())
    name = AdapterReference(AdapterSource.LOCAL, "red", "v1")

    async def story(directory: AdapterDirectory) -> None:
        before = [row.id for row in await directory.listing()]
        await used(directory, name)
        assert [row.id for row in await directory.listing()] == before == ["red@v1"]

    play(patient_config(tmp_path, local_roots=[str(tmp_path / "roots")]), story)


def _time_of_centuries(root: Path) -> None:
    # Only file systems in memory keep such a time.
    os.utime(root / "red" / "adapter_model.safetensors", ns=(0, 2**62 * 10**9))


def _path_that_is_no_text(root: Path) -> None:
    real = root / os.fsdecode(b"\xff")
    (root / "red").rename(real)
    (root / "red").symlink_to(real)


@pytest.mark.parametrize("spoil", [_path_that_is_no_text, _time_of_centuries])
def test_what_no_message_holds_is_refused(spoil: Callable[[Path], None]) -> None:
    """The loop would end as it sends the adapter to the ranks, and all requests with it."""

    async def story(directory: AdapterDirectory) -> None:
        red = AdapterReference(AdapterSource.LOCAL, "red")
        assert await refusal(directory, red) is AdapterRefusal.UNSUPPORTED

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        root = Path(folder)
        write_files(root / "red", adapter_files())
        spoil(root)
        play(patient_config(root, local_roots=[folder]), story)

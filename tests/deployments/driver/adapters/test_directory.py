"""The directory against a hub on this machine: rights, versions, one download, bounded memory."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from configs.adapters import AdaptersConfig
from configs.wire.adapters import (
    AdapterError,
    AdapterKey,
    AdapterReference,
    AdapterRefusal,
    AdapterSource,
)
from configs.wire.merging import MergeRule
from deployments.driver.adapters.directory import AdapterDirectory
from sources.adapters import AdapterSources
from sources.base import Token
from tests.deployments.driver.routing.stories import PATIENCE_S
from tests.hub_server import HubServer
from tests.sources.adapter_files import adapter_files, adapters_config, write_files

LINGER_S = 0.02
SQL = AdapterReference(AdapterSource.HUB, "acme/sql")
Story = Callable[[AdapterDirectory], Awaitable[None]]


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


def patient_config(
    root: Path, fetch: Mapping[str, object] | None = None, **others: object
) -> AdaptersConfig:
    """No answer comes too late, or grows old, unless a test wants it so."""
    limits = ("connect_timeout_s", "read_timeout_s", "recheck_s", "refusal_s")
    patient = dict.fromkeys(limits, PATIENCE_S)
    return adapters_config(root, {**patient, **(fetch or {})}, **others)


def pass_by(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let time pass on the event loop's clock."""
    loop = asyncio.get_running_loop()
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + seconds)


def play(config: AdaptersConfig, story: Story) -> AdapterDirectory:
    """Run a story; afterwards all maps must agree and no file be kept without a holder."""

    async def act() -> AdapterDirectory:
        directory = AdapterDirectory(AdapterSources(config), config, linger_s=LINGER_S)
        await story(directory)
        directory.check()
        directory.close()
        return directory

    directory = asyncio.run(asyncio.wait_for(act(), PATIENCE_S))
    directory._sources.cache.check()
    return directory


async def used(
    directory: AdapterDirectory, reference: AdapterReference, token: Token = False
) -> AdapterKey:
    """Resolve, and hold the key no longer."""
    key = await directory.resolve(reference, token)
    directory.release(key)
    return key


def is_on_disk(directory: AdapterDirectory, key: AdapterKey) -> bool:
    return Path(directory.fetched(key).folder).exists()


async def used_at_last(directory: AdapterDirectory, reference: AdapterReference) -> AdapterKey:
    """Try until it is to be had."""
    while True:
        try:
            return await used(directory, reference)
        except AdapterError:
            await asyncio.sleep(0.01)


async def refusal(
    directory: AdapterDirectory, reference: AdapterReference, token: Token = False
) -> AdapterRefusal:
    with pytest.raises(AdapterError) as caught:
        await directory.resolve(reference, token)
    return caught.value.refusal


def test_a_cached_private_adapter_still_needs_access(hub: HubServer, tmp_path: Path) -> None:
    hub.add("acme/sql", adapter_files(), readers={"hf_good", "hf_also"})

    async def story(directory: AdapterDirectory) -> None:
        key = await directory.resolve(SQL, "hf_good")
        for token in (False, "hf_bad"):
            assert await refusal(directory, SQL, token) is AdapterRefusal.NOT_FOUND
        assert await used(directory, SQL, "hf_also") == key
        assert len(hub.downloads()) == 2
        directory.release(key)

    play(patient_config(tmp_path, hub_endpoint=hub.url), story)


def test_a_revoked_access_ends_with_the_next_lookup(hub: HubServer, tmp_path: Path) -> None:
    repository = hub.add("acme/sql", adapter_files(), readers={"hf_good"})

    async def story(directory: AdapterDirectory) -> None:
        await used(directory, SQL, "hf_good")
        repository.readers = set()
        assert await refusal(directory, SQL, "hf_good") is AdapterRefusal.NOT_FOUND

    play(patient_config(tmp_path, {"recheck_s": 0}, hub_endpoint=hub.url), story)


def test_replies_are_reused_and_refusals_repeated(hub: HubServer, tmp_path: Path) -> None:
    hub.add("acme/sql", adapter_files())

    async def story(directory: AdapterDirectory) -> None:
        missing = AdapterReference(AdapterSource.HUB, "acme/missing")
        for _ in range(5):
            await used(directory, SQL)
            assert await refusal(directory, missing) is AdapterRefusal.NOT_FOUND
        assert hub.looks() == 2

    play(patient_config(tmp_path, hub_endpoint=hub.url), story)


def test_an_unreachable_source_serves_only_recently_confirmed_callers(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.add("acme/sql", adapter_files(), readers={"hf_good", "hf_late"})
    fetch = {"recheck_s": 0, "refusal_s": 0, "attempts": 1}

    async def story(directory: AdapterDirectory) -> None:
        key = await used(directory, SQL, "hf_good")
        hub.faults = [503] * 1000
        assert await used(directory, SQL, "hf_good") == key
        assert await refusal(directory, SQL, "hf_late") is AdapterRefusal.UNAVAILABLE
        hub.faults = []
        assert await used(directory, SQL, "hf_late") == key

    play(patient_config(tmp_path, fetch, hub_endpoint=hub.url), story)


def test_an_unreachable_source_without_grace_serves_no_caller(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.add("acme/sql", adapter_files())
    fetch = {"recheck_s": 0, "grace_s": 0, "attempts": 1}

    async def story(directory: AdapterDirectory) -> None:
        await used(directory, SQL)
        hub.faults = [503] * 1000
        assert await refusal(directory, SQL) is AdapterRefusal.UNAVAILABLE

    play(patient_config(tmp_path, fetch, hub_endpoint=hub.url), story)


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


@pytest.mark.parametrize("fault", ["404", "403", "500", "gone", "cut", "header", "large"])
def test_a_token_never_reaches_logs_or_messages(
    hub: HubServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    secret = "hf_secretTokenOfTheCaller"
    readers = {"404": set[str](), "403": {secret}}.get(fault, {secret})
    files = adapter_files()
    if fault == "header":
        files["adapter_model.safetensors"] = (10 * 2**30).to_bytes(8, "little")
    hub.add("acme/sql", files, readers=readers, gated=fault == "403")
    if fault == "403":
        hub.faults = [403] * 9
    if fault == "500":
        hub.faults = [500] * 9
    if fault == "cut":
        hub.cuts = [3] + [0] * 20
    limits = {"max_file_bytes": 10} if fault == "large" else {}
    url = "http://127.0.0.1:9" if fault == "gone" else hub.url
    config = patient_config(tmp_path, {"attempts": 2}, hub_endpoint=url, **limits)
    messages: list[str] = []

    async def story(directory: AdapterDirectory) -> None:
        with pytest.raises(AdapterError) as caught:
            await directory.resolve(SQL, secret)
        error: BaseException | None = caught.value
        while error is not None:
            messages.extend((str(error), repr(error)))
            error = error.__cause__ or error.__context__
        assert secret not in repr(vars(directory))

    with caplog.at_level(logging.DEBUG):
        play(config, story)
    assert messages
    replies = [*messages, *(record.getMessage() for record in caplog.records), caplog.text]
    assert not [text for text in replies if secret in text]


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


def test_the_refusal_of_one_callers_download_is_not_anothers(
    hub: HubServer, tmp_path: Path
) -> None:
    """Nor the operator's, though all of them come without a token of the hub."""
    hub.add("acme/sql", adapter_files())
    hub.add("acme/code", adapter_files(2.0))
    code = AdapterReference(AdapterSource.HUB, "acme/code")

    async def story(directory: AdapterDirectory) -> None:
        directory.release(await directory.resolve(SQL, False, payer="team-a"))
        for _ in range(2):
            with pytest.raises(AdapterError) as caught:
                await directory.resolve(code, False, payer="team-a")
            assert caught.value.refusal is AdapterRefusal.QUOTA
        both = AdapterReference(
            AdapterSource.HUB, "both", parts=(SQL, code), rule=MergeRule((1.0, 1.0))
        )
        with pytest.raises(AdapterError) as caught:
            await directory.resolve(both, False, payer="team-a")
        assert caught.value.refusal is AdapterRefusal.QUOTA
        directory.release(await directory.resolve(code, False, payer="team-b"))

    play(patient_config(tmp_path, {"download_bytes_per_hour": 1}, hub_endpoint=hub.url), story)

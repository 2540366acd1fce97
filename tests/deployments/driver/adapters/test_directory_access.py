"""The directory with a local hub: callers' access, tokens, refusals."""

import asyncio
import logging
from pathlib import Path

import pytest

from configs.wire.adapters import (
    AdapterError,
    AdapterReference,
    AdapterRefusal,
    AdapterSource,
)
from configs.wire.merging import MergeRule
from deployments.driver.adapters.directory import AdapterDirectory
from tests.deployments.driver.adapters.directory_stories import (
    SQL,
    patient_config,
    play,
    refusal,
    used,
)
from tests.deployments.driver.adapters.test_lookups import gate_looks, until
from tests.hub_server import HubServer
from tests.sources.adapter_files import adapter_files


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


def test_names_that_do_not_exist_delay_no_known_adapter(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a flood of new names, those whose callers have left are not looked up."""
    hub.add("acme/sql", adapter_files())
    missing = [AdapterReference(AdapterSource.HUB, f"acme/missing{i}") for i in range(64)]
    gate = gate_looks(monkeypatch, {reference.id for reference in missing})

    async def story(directory: AdapterDirectory) -> None:
        await used(directory, SQL)
        flood = [asyncio.create_task(refusal(directory, each)) for each in missing]
        await until(lambda: gate.num_waiting > 0)
        await used(directory, SQL)
        looks = hub.looks()
        waiting = gate.num_waiting
        for task in flood[32:]:
            task.cancel()
        gate.opened.set()
        ends = await asyncio.gather(*flood, return_exceptions=True)
        assert set(ends[:32]) == {AdapterRefusal.NOT_FOUND}
        assert waiting <= 32
        assert hub.looks() - looks == 32

    play(patient_config(tmp_path, {"recheck_s": 0}, hub_endpoint=hub.url), story)

"""HubSource against a local hub: access, sizes, transient faults, partial files, one download."""

import os
import subprocess
import sys
import threading
import time
from email.utils import formatdate
from pathlib import Path

import pytest

from configs.wire.adapters import AdapterError, AdapterReference, AdapterRefusal, AdapterSource
from sources.adapters import AdapterSources
from sources.base import Unreachable
from tests.hub_server import HubServer
from tests.sources.adapter_files import (
    adapter_files,
    fetch,
    left_over,
    refusal,
    sources,
    write_files,
)

ROOT = Path(__file__).resolve().parents[2]
SQL = AdapterReference(AdapterSource.HUB, "acme/sql")


@pytest.fixture
def store(hub: HubServer, tmp_path: Path) -> AdapterSources:
    return sources(tmp_path, hub_endpoint=hub.url)


def read(folder: Path) -> dict[str, bytes]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def test_only_the_adapters_own_files_are_downloaded_once(
    hub: HubServer, store: AdapterSources, tmp_path: Path
) -> None:
    files = adapter_files(chat_template__jinja=b"{{ messages }}")
    files["additional_chat_templates/tool_use.jinja"] = b"{{ tools }}"
    junk = {
        "deep/x.jinja": b"x",
        "additional_chat_templates/deep/x.jinja": b"x",
        "adapter_model/x.safetensors": b"x",
        "optimizer.pt": b"x" * 99,
        "adapter_model.bin": b"pickle",
        "deep/adapter_model.x": b"x",
    }
    hub.add("acme/sql", {**files, **junk})
    first = fetch(store, SQL)
    assert read(first.folder) == files
    assert fetch(store, SQL).folder == first.folder
    assert sorted(hub.downloads()) == sorted(Path(name).name for name in files)
    assert not left_over(tmp_path)
    store.release(first)
    store.cache.check()


def test_a_branch_that_moves_is_found_and_the_older_commit_stays(
    hub: HubServer, store: AdapterSources
) -> None:
    repository = hub.add("acme/sql", adapter_files(1.0))
    older, old = repository.sha, fetch(store, SQL)
    repository.files = adapter_files(2.0)
    assert read(fetch(store, SQL).folder) == adapter_files(2.0)
    rolled_back = AdapterReference(AdapterSource.HUB, "acme/sql", older)
    assert fetch(store, rolled_back).folder == old.folder
    missing = AdapterReference(AdapterSource.HUB, "acme/sql", "nowhere")
    assert refusal(store, missing) is AdapterRefusal.NOT_FOUND


@pytest.mark.parametrize("gated", [False, True])
def test_a_private_adapter_is_for_callers_that_may_read_it(
    hub: HubServer, store: AdapterSources, gated: bool
) -> None:
    hub.add("acme/sql", adapter_files(), readers={"hf_good"}, gated=gated)
    found = store.resolve(SQL, "hf_good")
    assert not found.open_to_all
    store.fetch(found, "hf_good")
    for token in (False, "hf_bad"):
        said = refusal(store, SQL, token)
        assert said is (AdapterRefusal.FORBIDDEN if gated else AdapterRefusal.NOT_FOUND)


@pytest.mark.parametrize("own", [None, "hf_own"])
def test_the_servers_token_is_sent_where_it_has_one(
    hub: HubServer, store: AdapterSources, monkeypatch: pytest.MonkeyPatch, own: str | None
) -> None:
    monkeypatch.setattr("sources.hub.get_token", lambda: own)
    hub.add("acme/sql", adapter_files())
    store.fetch(store.resolve(SQL, True), True)
    hub.add("acme/secret", adapter_files(2.0), readers={"hf_own"})
    secret = AdapterReference(AdapterSource.HUB, "acme/secret")
    if own is None:
        assert refusal(store, secret, True) is AdapterRefusal.NOT_FOUND
    else:
        store.fetch(store.resolve(secret, True), True)


@pytest.mark.parametrize("token", ["hf secret", "hf_secret\nX: y", "hf_sécret", "x" * 5000])
def test_an_odd_token_is_refused_without_being_quoted(store: AdapterSources, token: str) -> None:
    with pytest.raises(AdapterError) as caught:
        store.resolve(SQL, token)
    assert caught.value.refusal is AdapterRefusal.FORBIDDEN
    assert token not in caught.value.message
    assert token not in repr(caught.value.__context__)


def test_too_large_is_refused_before_any_download(hub: HubServer, tmp_path: Path) -> None:
    hub.add("acme/sql", adapter_files())
    store = sources(tmp_path, hub_endpoint=hub.url, max_file_bytes=50)
    assert refusal(store, SQL) is AdapterRefusal.TOO_LARGE
    assert not hub.downloads()


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_what_is_no_adapter_is_refused_before_any_download(
    hub: HubServer, store: AdapterSources, missing: str
) -> None:
    files = {**adapter_files(), "adapter_model.bin": b"a pickle"}
    del files[missing]
    hub.add("acme/sql", files)
    expected = {"adapter_config.json": AdapterRefusal.NOT_FOUND}
    assert refusal(store, SQL) is expected.get(missing, AdapterRefusal.UNSUPPORTED)
    assert not hub.downloads()


@pytest.mark.parametrize("name", ["not a name", "http://evil/acme/sql", "../acme", "a/b/c", ""])
def test_odd_ids_are_not_found_without_a_call(
    hub: HubServer, store: AdapterSources, name: str
) -> None:
    reference = AdapterReference(AdapterSource.HUB, name)
    assert refusal(store, reference) is AdapterRefusal.NOT_FOUND
    assert not hub.requests


def test_faults_that_pass_are_waited_out(hub: HubServer, store: AdapterSources) -> None:
    hub.add("acme/sql", adapter_files())
    hub.faults = [500, 429]
    found = store.resolve(SQL, False)
    hub.faults = [503, 502]
    assert read(store.fetch(found, False).folder) == adapter_files()


def test_a_hub_that_stays_broken_is_called_a_limited_number_of_times(
    hub: HubServer, store: AdapterSources
) -> None:
    hub.faults = [500] * 10
    with pytest.raises(Unreachable):
        store.resolve(SQL, False)
    assert len(hub.requests) == 4
    hub.faults = [403] * 10
    assert refusal(store, SQL) is AdapterRefusal.FORBIDDEN
    assert len(hub.requests) == 5, "a refused call is not repeated"


@pytest.mark.parametrize(
    ("status", "expected"), [(404, "NOT_FOUND"), (410, "NOT_FOUND"), (403, "FORBIDDEN")]
)
def test_a_status_alone_says_why_an_adapter_is_refused(
    hub: HubServer, store: AdapterSources, status: int, expected: str
) -> None:
    hub.add("acme/sql", adapter_files())
    hub.faults = [status]
    assert refusal(store, SQL) is AdapterRefusal[expected]


def test_other_statuses_blame_no_token(
    hub: HubServer, store: AdapterSources, tmp_path: Path
) -> None:
    hub.add("acme/sql", adapter_files())
    hub.faults = [418]
    with pytest.raises(Unreachable, match="answer 418"):
        store.resolve(SQL, False)
    hub.faults = [429] * 4
    with pytest.raises(Unreachable, match="answer 429 after 4 attempts"):
        store.resolve(SQL, False)
    found = store.resolve(SQL, False)
    hub.faults = [416]
    with pytest.raises(AdapterError, match=r"from the hub: try again \(answer 416\)") as raised:
        store.fetch(found, False)
    assert raised.value.refusal is AdapterRefusal.UNAVAILABLE
    assert not left_over(tmp_path), "or each further try would ask for the same bytes"
    hub.faults = [503] * 4
    with pytest.raises(AdapterError, match="broke off: answer 503"):
        store.fetch(found, False)


def test_too_few_bytes_are_told_as_such(hub: HubServer, store: AdapterSources) -> None:
    repository = hub.add("acme/sql", adapter_files())
    found = store.resolve(SQL, False)
    repository.commits[repository.sha]["adapter_config.json"] = b"{"
    with pytest.raises(AdapterError, match="broke off: fewer bytes came than"):
        store.fetch(found, False)


def test_bytes_of_the_announced_size_that_are_others_are_downloaded_again(
    hub: HubServer, store: AdapterSources, tmp_path: Path
) -> None:
    repository = hub.add("acme/sql", adapter_files())
    found = store.resolve(SQL, False)
    there = repository.commits[repository.sha]
    good = there["adapter_model.safetensors"]
    damaged = good[:-1] + b"\x00"
    there["adapter_model.safetensors"] = damaged
    with pytest.raises(AdapterError, match="broke off: other bytes came than"):
        store.fetch(found, False)
    assert len(hub.downloads()) == 1 + 4
    # A whole file of an attempt that was interrupted before it was looked at.
    hub.cuts = [20, 0]
    impatient = sources(tmp_path, hub_endpoint=hub.url, fetch={"attempts": 1})
    with pytest.raises(AdapterError, match="broke off"):
        impatient.fetch(found, False)
    (partial,) = tmp_path.glob("cache/partial/*/adapter_model.safetensors.part")
    partial.write_bytes(damaged)
    there["adapter_model.safetensors"] = good
    assert read(store.fetch(found, False).folder) == adapter_files()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Retry-After": "1"}, 503),
        ({"RateLimit": '"api";r=0;t=1'}, 429),
        ({"Retry-After": ""}, 429),
    ],
)
def test_a_hub_is_left_alone_for_as_long_as_it_asks(
    hub: HubServer, store: AdapterSources, headers: dict[str, str], status: int
) -> None:
    hub.add("acme/sql", adapter_files())
    if headers == {"Retry-After": ""}:  # A date is the other form.
        headers = {"Retry-After": formatdate(time.time() + 2, usegmt=True)}
    hub.faults, hub.fault_headers = [status], headers
    began = time.monotonic()
    store.resolve(SQL, False)
    assert time.monotonic() - began > 0.9
    # The hub says when its limit ends with every reply.
    hub.faults, hub.fault_headers = [503], {"RateLimit": '"api";r=9;t=300'}
    store.resolve(SQL, False)


@pytest.mark.parametrize("header", ["Retry-After", "RateLimit"])
def test_a_hub_that_asks_for_minutes_is_called_once(
    hub: HubServer, store: AdapterSources, header: str
) -> None:
    hub.add("acme/sql", adapter_files())
    hub.faults = [429] * 4
    hub.fault_headers = {header: "300" if header == "Retry-After" else '"api";r=0;t=300'}
    with pytest.raises(Unreachable, match="answer 429, to be tried again after 300 s"):
        store.resolve(SQL, False)
    assert len(hub.requests) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>sign in</html>",
        b'{"id": "acme/sql", "sha": ',
        b"[]",
        b"null",
        b"{}",
        b'{"id": "acme/sql", "sha": null, "siblings": []}',
        b'{"id": "a/b", "sha": "1", "siblings": [{"rfilename": "adapter_config.json"}]}',
        b'{"id": "a", "sha": "1", "siblings": [{"rfilename": "adapter_config.json", "size": ""}]}',
    ],
)
def test_an_answer_that_describes_nothing_is_none(
    hub: HubServer, store: AdapterSources, answer: bytes
) -> None:
    hub.add("acme/sql", adapter_files())
    hub.descriptions = [answer]
    with pytest.raises(Unreachable, match="its answer"):
        store.resolve(SQL, False)
    fetch(store, SQL)


def test_a_broken_download_goes_on_where_it_broke_off(
    hub: HubServer, store: AdapterSources, tmp_path: Path
) -> None:
    files = adapter_files(tokenizer_config__json=b"{}" + b" " * 5000)
    hub.add("acme/sql", files)
    hub.cuts = [10, 15]
    assert read(fetch(store, SQL).folder) == files
    assert hub.resumed == [10, 25]
    assert not left_over(tmp_path)


def test_a_partial_file_is_kept_for_the_next_try(
    hub: HubServer, store: AdapterSources, tmp_path: Path
) -> None:
    hub.add("acme/sql", adapter_files())
    found = store.resolve(SQL, False)
    hub.cuts = [20, 0]
    impatient = sources(tmp_path, hub_endpoint=hub.url, fetch={"attempts": 1})
    with pytest.raises(AdapterError, match="broke off"):
        impatient.fetch(found, False)
    assert left_over(tmp_path)
    assert read(fetch(store, SQL).folder) == adapter_files()
    assert hub.resumed == [20, 20]
    assert not left_over(tmp_path)


def test_a_slow_hub_is_given_up(hub: HubServer, store: AdapterSources, tmp_path: Path) -> None:
    hub.add("acme/sql", adapter_files())
    found = store.resolve(SQL, False)
    hub.gate.clear()
    fetch = {"read_timeout_s": 0.1, "attempts": 2}
    impatient = sources(tmp_path, hub_endpoint=hub.url, fetch=fetch)
    with pytest.raises(AdapterError, match="broke off: ReadTimeout") as raised:
        impatient.fetch(found, False)
    assert raised.value.refusal is AdapterRefusal.UNAVAILABLE
    hub.await_downloads(2)
    assert len(hub.downloads()) == 2


def test_a_hub_that_is_not_there_is_out_of_reach(tmp_path: Path) -> None:
    store = sources(tmp_path, hub_endpoint="http://127.0.0.1:9")
    with pytest.raises(Unreachable):
        store.resolve(SQL, False)


def test_many_at_once_share_one_download(hub: HubServer, store: AdapterSources) -> None:
    hub.add("acme/sql", adapter_files())
    found = store.resolve(SQL, False)
    hub.gate.clear()
    brought: list[Path] = []
    threads = [
        threading.Thread(target=lambda: brought.append(store.fetch(found, False).folder))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    hub.gate.set()
    for thread in threads:
        thread.join()
    assert len(set(brought)) == 1
    assert len(brought) == 8
    assert len(hub.downloads()) == 2


def test_what_the_hubs_own_cache_has_is_not_downloaded_again(
    hub: HubServer, tmp_path: Path
) -> None:
    """In a process of its own, for the hub's client reads its environment when it is imported."""
    sha = hub.add("acme/sql", adapter_files(), readers={"hf_good"}).sha
    cached = tmp_path / "hub" / "models--acme--sql"
    write_files(cached / "snapshots" / sha, adapter_files())
    write_files(cached / "refs", {"main": sha.encode()})
    script = f"""
import os
from pathlib import Path
from configs.wire.adapters import AdapterError, AdapterReference, AdapterRefusal, AdapterSource
from configs.adapters import AdaptersConfig
from sources.adapters import AdapterSources

store = AdapterSources(AdaptersConfig(hub_endpoint={hub.url!r}))

def look(name, token=False):
    try:
        return store.resolve(AdapterReference(AdapterSource.HUB, name), token)
    except AdapterError as error:
        return error.refusal

if os.environ.get("HF_HUB_OFFLINE"):
    found = look("acme/sql")
    assert look("acme/other") is look("not a name") is AdapterRefusal.NOT_FOUND
else:
    found = look("acme/sql", "hf_good")
    assert look("acme/sql") is AdapterRefusal.NOT_FOUND, "cached, but not for all callers"
assert store.fetch(found, False).folder.name == {sha!r}, found
"""
    for offline in ({}, {"HF_HUB_OFFLINE": "1"}):
        environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), **offline}
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True
        )
        assert done.returncode == 0, done.stderr.decode()
    assert not hub.downloads()


def test_a_server_that_breaks_off_for_ever_is_given_up(
    hub: HubServer, store: AdapterSources
) -> None:
    hub.add("acme/sql", adapter_files())
    hub.cuts = [20, *[0] * 50]
    assert refusal(store, SQL) is AdapterRefusal.UNAVAILABLE
    assert len(hub.downloads()) == 1 + 4

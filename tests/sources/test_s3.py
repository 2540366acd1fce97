"""Against a real S3 server process (moto's): roots are walls, ETags are versions, faults pass."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.adapters import S3Config
from configs.wire.adapters import AdapterError, AdapterReference, AdapterRefusal, AdapterSource
from sources.adapters import AdapterSources
from sources.base import Unreachable
from sources.catalogue import CatalogueListing
from tests.s3_server import FaultyS3
from tests.sources.adapter_files import (
    adapter_files,
    fetch,
    left_over,
    refusal,
    sources,
)


def put(bucket: Any, prefix: str, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        bucket.put_object(Key=f"{prefix}/{name}", Body=content)


def store(tmp_path: Path, endpoint: str, *roots: str, **others: Any) -> AdapterSources:
    s3 = {"roots": roots, "endpoint_url": endpoint, "region": "us-east-1"}
    return sources(tmp_path, s3=s3, **others)


def s3(name: str, revision: str | None = None) -> AdapterReference:
    return AdapterReference(AdapterSource.S3, name, revision)


def read(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_ids_are_found_under_the_roots_by_each_spelling(
    bucket: Any, endpoint: str, tmp_path: Path
) -> None:
    put(bucket, "team/sql", {**adapter_files(), "notes.txt": b"junk", "deep/adapter_model.x": b""})
    found = store(tmp_path, endpoint, f"s3://{bucket.name}/team/")
    whole = f"{bucket.name}/team/sql"
    folders = {fetch(found, s3(n)).folder for n in ("sql", whole, f"s3://{whole}", f"{whole}/")}
    assert len(folders) == 1
    assert read(folders.pop()) == adapter_files()
    assert not left_over(tmp_path)


def test_a_prefix_is_a_catalogue(bucket: Any, endpoint: str, tmp_path: Path) -> None:
    location = f"s3://{bucket.name}/team"
    found = store(tmp_path, endpoint, location, catalogue={"location": location})
    assert found.catalogue() == CatalogueListing()
    put(bucket, "team/sql", adapter_files())
    put(bucket, "team/notes", {"README.md": b"no adapter"})
    put(bucket, "other/poet", adapter_files())
    pins = b"adapters:\n  sql: {pinned: true}\n  gone: {pinned: true}\n  far: {adapter: hub:a/b}\n"
    put(bucket, "team", {"catalogue.yaml": pins})
    first = found.catalogue()
    assert {name: (each.adapter, each.pinned) for name, each in first.entries.items()} == {
        "sql": (f"{location}/sql", True),
        "far": ("hub:a/b", False),
    }
    put(bucket, "team/sql", {"adapter_config.json": b'{"r": 4}'})
    second = found.catalogue()
    assert second.versions.keys() == first.versions.keys() == {"sql"}
    assert second.versions != first.versions
    with pytest.raises(ValueError, match="must lie under"):
        store(tmp_path, endpoint, location, catalogue={"location": f"s3://{bucket.name}/other"})


@pytest.mark.parametrize("name", ["sql/../../other", "..", "sql//x", "missing", "", "./sql"])
def test_what_no_root_holds_is_not_found(
    bucket: Any, endpoint: str, tmp_path: Path, name: str
) -> None:
    put(bucket, "team/sql", adapter_files())
    put(bucket, "other", adapter_files())
    said = refusal(store(tmp_path, endpoint, f"{bucket.name}/team"), s3(name))
    assert said is AdapterRefusal.NOT_FOUND


def test_another_bucket_is_not_opened_by_its_address(
    bucket: Any, endpoint: str, tmp_path: Path
) -> None:
    put(bucket, "other", adapter_files())
    found = store(tmp_path, endpoint, f"{bucket.name}/team")
    assert refusal(found, s3(f"s3://{bucket.name}/other")) is AdapterRefusal.FORBIDDEN
    assert refusal(found, s3(f"s3://{bucket.name}/team2/x")) is AdapterRefusal.FORBIDDEN
    missing = store(tmp_path, endpoint, "no-such-bucket")
    assert refusal(missing, s3("sql")) is AdapterRefusal.NOT_FOUND


def test_new_bytes_are_a_new_version_and_a_revision_a_prefix(
    bucket: Any, endpoint: str, tmp_path: Path
) -> None:
    put(bucket, "sql", adapter_files(1.0))
    put(bucket, "sql@v1", adapter_files(3.0))
    found = store(tmp_path, endpoint, bucket.name)
    old = found.resolve(s3("sql"), False)
    first = found.fetch(old, False)
    put(bucket, "sql", adapter_files(2.0))
    assert read(fetch(found, s3("sql")).folder) == adapter_files(2.0)
    assert found.fetch(old, False).folder == first.folder
    assert read(fetch(found, s3("sql", "v1")).folder) == adapter_files(3.0)


def test_a_file_that_changed_since_the_look_is_not_mixed_in(
    bucket: Any, endpoint: str, tmp_path: Path
) -> None:
    put(bucket, "sql", adapter_files(1.0))
    found = store(tmp_path, endpoint, bucket.name)
    old = found.resolve(s3("sql"), False)
    put(bucket, "sql", adapter_files(2.0))
    with pytest.raises(AdapterError, match="it changed while it was read"):
        found.fetch(old, False)
    assert not left_over(tmp_path)


def test_too_large_is_refused_before_any_download(
    bucket: Any, endpoint: str, tmp_path: Path
) -> None:
    put(bucket, "sql", adapter_files())
    found = store(tmp_path, endpoint, bucket.name, max_file_bytes=50)
    assert refusal(found, s3("sql")) is AdapterRefusal.TOO_LARGE


@pytest.fixture
def faulty(endpoint: str) -> Iterator[FaultyS3]:
    with FaultyS3(endpoint) as server:
        yield server


def test_broken_downloads_go_on_and_faults_are_waited_out(
    bucket: Any, faulty: FaultyS3, tmp_path: Path
) -> None:
    files = {**adapter_files(), "adapter_config.json": b"{" + b" " * 200_000}
    put(bucket, "sql", files)
    found = store(tmp_path, faulty.url, bucket.name, fetch={"attempts": 2})
    faulty.faults, faulty.cuts = [503], [70_000, 70_000]
    assert read(fetch(found, s3("sql")).folder) == files
    assert [ranged for ranged in faulty.ranges if ranged] == ["bytes=70000-", "bytes=140000-"]
    assert not left_over(tmp_path)


def test_a_service_that_stays_broken_is_out_of_reach(
    bucket: Any, faulty: FaultyS3, tmp_path: Path
) -> None:
    found = store(tmp_path, faulty.url, bucket.name, fetch={"attempts": 2})
    faulty.faults = [500] * 9
    with pytest.raises(Unreachable):
        found.resolve(s3("sql"), False)
    assert len(faulty.ranges) == 2
    faulty.faults = [403] * 9
    assert refusal(found, s3("sql")) is AdapterRefusal.FORBIDDEN
    assert len(faulty.ranges) == 3
    faulty.faults = []
    put(bucket, "sql", adapter_files())
    there = found.resolve(s3("sql"), False)
    faulty.ranges, faulty.faults = [], [503] * 9
    with pytest.raises(AdapterError, match="s3 answered 503"):
        found.fetch(there, False)
    assert len(faulty.ranges) == 2, "a file is not requested more often than a listing"
    gone = store(tmp_path, "http://127.0.0.1:9", bucket.name, fetch={"attempts": 1})
    with pytest.raises(Unreachable):
        gone.resolve(s3("sql"), False)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"<html>maintenance</html>",
        b"<ListBucketResult><Name>x</Name><Contents><Key>sql/adapter_config.json</Key>"
        b"<Size>2</Size></Contents></ListBucketResult>",
        b"<ListBucketResult><Name>x</Name><Contents><Key>sql/adapter_config.json</Key>"
        b"<ETag>t</ETag><Size>much</Size></Contents></ListBucketResult>",
    ],
)
def test_an_answer_that_lists_nothing_is_none(
    bucket: Any, faulty: FaultyS3, tmp_path: Path, answer: bytes
) -> None:
    location = f"s3://{bucket.name}"
    found = store(tmp_path, faulty.url, location, catalogue={"location": location})
    put(bucket, "sql", adapter_files())
    faulty.listings = [answer]
    with pytest.raises(Unreachable, match="its answer is no listing"):
        found.resolve(s3("sql"), False)
    faulty.listings = [answer]
    with pytest.raises(Unreachable, match="its answer is no listing"):
        found.catalogue()
    assert found.catalogue().entries.keys() == {"sql"}


def test_a_slow_service_is_given_up(bucket: Any, faulty: FaultyS3, tmp_path: Path) -> None:
    put(bucket, "sql", adapter_files())
    found = store(tmp_path, faulty.url, bucket.name).resolve(s3("sql"), False)
    faulty.gate.clear()
    fetch = {"read_timeout_s": 0.1, "attempts": 2}
    impatient = store(tmp_path, faulty.url, bucket.name, fetch=fetch)
    with pytest.raises(AdapterError, match="s3 gave no answer") as raised:
        impatient.fetch(found, False)
    assert raised.value.refusal is AdapterRefusal.UNAVAILABLE


def test_a_service_that_breaks_off_for_ever_is_given_up(
    bucket: Any, faulty: FaultyS3, tmp_path: Path
) -> None:
    put(bucket, "sql", adapter_files())
    found = store(tmp_path, faulty.url, bucket.name, fetch={"attempts": 2})
    faulty.cuts = [20, *[0] * 50]
    assert refusal(found, s3("sql")) is AdapterRefusal.UNAVAILABLE
    faulty.cuts = []
    assert read(fetch(found, s3("sql")).folder) == adapter_files()
    assert "bytes=20-" in faulty.ranges, "a partial file is continued"
    assert not left_over(tmp_path)


def test_without_credentials_the_refusal_says_so(
    bucket: Any, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    found = store(tmp_path, endpoint, bucket.name)
    with pytest.raises(AdapterError, match="no credentials for s3"):
        fetch(found, s3("sql"))


def test_without_boto3_the_start_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(ImportError, match=r"pip install loray\[s3\]"):
        store(tmp_path, "http://127.0.0.1:9", "bucket")


@pytest.mark.parametrize("roots", [(), ("",), ("s3://",)])
def test_roots_name_buckets(roots: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="at least one root"):
        S3Config(roots=roots)

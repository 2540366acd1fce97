"""Names become folders: roots are walls, sizes are bounded, damaged files are refused at once."""

import hashlib
import os
import time
from pathlib import Path

import pytest

from configs.wire.adapters import AdapterError, AdapterReference, AdapterRefusal, AdapterSource
from sources.base import AdapterFolder
from sources.files import content_digest, fingerprint
from tests.sources.adapter_files import (
    adapter_files,
    fetch,
    refusal,
    sources,
    write_files,
)


def write(folder: Path, value: float = 1.0) -> Path:
    return write_files(folder, adapter_files(value))


def local(name: str, revision: str | None = None) -> AdapterReference:
    return AdapterReference(AdapterSource.LOCAL, name, revision)


def test_a_local_adapter_is_found_under_its_root(tmp_path: Path) -> None:
    folder = write(tmp_path / "team" / "red")
    found = fetch(sources(tmp_path, local_roots=[str(tmp_path)]), local("team/red"))
    assert found.folder == folder
    assert [name for name, _, _ in found.fingerprint] == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_heads_beside_an_adapter_are_part_of_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "red")
    (folder / "config.json").write_text("{}")
    assert len(fingerprint(folder)) == 2, "a config alone says nothing of heads"
    digests = []
    for content in (b"one", b"two"):
        (folder / "medusa_lm_head.safetensors").write_bytes(content)
        files = fingerprint(folder)
        digests.append(content_digest(AdapterFolder(folder, files, "")))
    assert [name for name, _, _ in files][2:] == ["medusa_lm_head.safetensors", "config.json"]
    assert digests[0] != digests[1]


def test_a_folder_whose_name_is_no_text_is_not_listed(tmp_path: Path) -> None:
    write(tmp_path / "red")
    write(tmp_path / os.fsdecode(b"blue\xff"))
    assert sources(tmp_path, local_roots=[str(tmp_path)]).known_local() == ["red"]


@pytest.mark.parametrize(
    "name", [b"adapter_model\xff.safetensors", b"additional_chat_templates/\xff.jinja"]
)
def test_a_file_whose_name_is_no_text_is_refused(tmp_path: Path, name: bytes) -> None:
    folder = write(tmp_path / "red")
    (folder / "additional_chat_templates").mkdir()
    (folder / os.fsdecode(name)).write_bytes(adapter_files()["adapter_model.safetensors"])
    store = sources(tmp_path, local_roots=[str(tmp_path)])
    assert refusal(store, local("red")) is AdapterRefusal.UNSUPPORTED


def test_other_bytes_of_the_same_size_and_time_are_another_adapter(tmp_path: Path) -> None:
    """As archives write them that set all times to one."""
    store = sources(tmp_path, local_roots=[str(tmp_path)])
    found = []
    for value in (1.0, 2.0):
        for path in write(tmp_path / "red", value).iterdir():
            os.utime(path, (1, 1))
        found.append(fetch(store, local("red")))
    assert found[0].fingerprint == found[1].fingerprint
    assert found[0].origin != found[1].origin


def test_times_in_the_future_do_not_make_a_folder_young(tmp_path: Path) -> None:
    """Each look at a young folder reads and hashes its files."""
    store = sources(tmp_path, local_roots=[str(tmp_path)])
    for path in write(tmp_path / "red").iterdir():
        os.utime(path, (4102444800, 4102444800))
    time.sleep(0.2)  # Longer than a tick of the file system's clock.
    one, two = (store.resolve(local("red"), False).origin for _ in range(2))
    assert one == two


def test_a_name_in_several_roots_is_listed_once(tmp_path: Path) -> None:
    for root in ("one", "two"):
        write(tmp_path / root / "red")
    roots = [str(tmp_path / root) for root in ("one", "two", "one")]
    store = sources(tmp_path, local_roots=roots)
    assert store.known_local() == ["red"]
    assert fetch(store, local("red")).folder == tmp_path / "one" / "red"


@pytest.mark.parametrize(
    "name", ["../outside", "red/../../outside", "link", "missing", "/etc", "ü" * 200]
)
def test_nothing_outside_the_roots_is_read(tmp_path: Path, name: str) -> None:
    outside = write(tmp_path / "outside")
    root = tmp_path / "root"
    write(root / "red")
    (root / "link").symlink_to(outside)
    store = sources(tmp_path, local_roots=[str(root)])
    assert refusal(store, local(name)) is AdapterRefusal.NOT_FOUND


def test_a_link_to_a_file_outside_is_refused_and_one_inside_is_not(tmp_path: Path) -> None:
    root = tmp_path / "root"
    weights = write(root / "blobs") / "adapter_model.safetensors"
    for name in ("inside", "outside"):
        (write(root / name) / "adapter_model.safetensors").unlink()
    (root / "inside" / "adapter_model.safetensors").symlink_to(weights)
    secret = write(tmp_path / "secret") / "adapter_model.safetensors"
    (root / "outside" / "adapter_model.safetensors").symlink_to(secret)
    store = sources(tmp_path, local_roots=[str(root)])
    assert fetch(store, local("inside")).folder == root / "inside"
    assert refusal(store, local("outside")) is AdapterRefusal.FORBIDDEN


def test_a_revision_is_a_folder_of_its_own(tmp_path: Path) -> None:
    write(tmp_path / "red")
    older = write(tmp_path / "red@v1", 2.0)
    store = sources(tmp_path, local_roots=[str(tmp_path)])
    assert fetch(store, local("red", "v1")).folder == older
    assert refusal(store, local("red", "v2")) is AdapterRefusal.NOT_FOUND


def test_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    write(tmp_path / "red")
    store = sources(tmp_path, local_roots=[str(tmp_path)], max_file_bytes=5)
    assert refusal(store, local("red")) is AdapterRefusal.TOO_LARGE


@pytest.mark.parametrize(
    "weights",
    [
        (10 * 2**30).to_bytes(8, "little") + b"{}",
        (2**63).to_bytes(8, "little") * 9,
        b"short",
        b"",
    ],
    ids=["10 GB header", "absurd", "truncated length", "empty"],
)
def test_a_header_longer_than_its_file_is_refused_unread(tmp_path: Path, weights: bytes) -> None:
    (write(tmp_path / "red") / "adapter_model.safetensors").write_bytes(weights)
    store = sources(tmp_path, local_roots=[str(tmp_path)])
    assert refusal(store, local("red")) is AdapterRefusal.UNSUPPORTED


def test_s3_is_refused_by_name_when_it_is_not_configured(tmp_path: Path) -> None:
    reference = AdapterReference(AdapterSource.S3, "bucket/red")
    assert refusal(sources(tmp_path), reference) is AdapterRefusal.UNSUPPORTED


def test_a_root_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="local_roots"):
        sources(tmp_path, local_roots=[str(tmp_path / "missing")])


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    store = sources(tmp_path, local_roots=[str(tmp_path)])
    write(tmp_path / "red")
    write(tmp_path / "same")
    write(tmp_path / "other", 2.0)
    (write(tmp_path / "chat") / "chat_template.jinja").write_text("{{ messages }}")
    names = ("red", "same", "other", "chat")
    red, same, other, chat = (content_digest(fetch(store, local(name))) for name in names)
    assert red == same
    assert len({red, other, chat}) == 3


def test_the_digest_of_a_large_file_is_that_of_all_its_pieces(tmp_path: Path) -> None:
    """Threads hash them, and the result has their order."""
    folder = write(tmp_path / "red")
    path = folder / "adapter_model.safetensors"
    whole = bytearray(os.urandom(6 * 2**20 + 5))
    changed = bytearray(whole)
    changed[-1] ^= 1
    swapped = whole[2**20 : 2**21] + whole[: 2**20] + whole[2**21 :]
    found = []
    for content in (whole, changed, swapped, whole):
        path.write_bytes(content)
        files = AdapterFolder(folder, fingerprint(folder), "")
        found.append(content_digest(files))
    assert found[0] == found[3]
    assert len(set(found)) == 3
    digest = hashlib.blake2b(digest_size=20)
    for name, size, _ in files.fingerprint:
        read = (folder / name).read_bytes()
        digest.update(f"{name}:{size}\n".encode())
        for first in range(0, size, 2**20):
            digest.update(hashlib.sha256(read[first : first + 2**20]).digest())
    assert found[0] == digest.hexdigest()


def test_adapters_under_the_roots_are_listed(tmp_path: Path) -> None:
    write(tmp_path / "red")
    write(tmp_path / "blue")
    (tmp_path / "not-an-adapter").mkdir()
    assert sources(tmp_path, local_roots=[str(tmp_path)]).known_local() == ["blue", "red"]


def test_links_that_lead_to_each_other_are_no_adapter(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    folder = write(tmp_path / "red")
    (folder / "README.md").symlink_to("README.md")
    store = sources(tmp_path, local_roots=[str(tmp_path)])
    assert refusal(store, local("one")) is AdapterRefusal.NOT_FOUND
    assert store.local_reference(str(tmp_path / "one")) == local("one")
    assert store.known_local() == ["red"]
    assert fetch(store, local("red")).folder == folder


def test_a_root_in_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = write(tmp_path / "adapters" / "red")
    assert fetch(sources(tmp_path, local_roots=["~/adapters"]), local("red")).folder == folder


def test_a_link_that_leads_out_since_the_look(tmp_path: Path) -> None:
    """It is judged by what was opened, not by a path that may lead elsewhere by then."""
    own = write_files(tmp_path / "root" / "red", adapter_files())
    other = write_files(tmp_path / "other", adapter_files(2.0))
    store = sources(tmp_path, local_roots=[str(tmp_path / "root")])
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        found = store.resolve(local("red"), False)
        (own / name).unlink()
        (own / name).symlink_to(other / name)
        with pytest.raises(AdapterError, match=f"{name} is a link to a file outside") as raised:
            store.digest(store.fetch(found, False), "red")
        assert raised.value.refusal is AdapterRefusal.FORBIDDEN
        (own / name).unlink()
        (own / name).write_bytes((other / name).read_bytes())


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_what_is_no_regular_file_is_refused(tmp_path: Path, name: str) -> None:
    folder = write_files(tmp_path / "red", adapter_files())
    store = sources(tmp_path, local_roots=[str(tmp_path)])
    found = store.resolve(local("red"), False)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(AdapterError, match=f"{name} is no regular file") as raised:
        store.fetch(found, False)
    assert raised.value.refusal is AdapterRefusal.UNSUPPORTED
    assert refusal(store, local("red")) in (AdapterRefusal.UNSUPPORTED, AdapterRefusal.NOT_FOUND)

"""Names become folders: roots are walls, sizes are bounded, the hub's cache serves offline."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.adapters import AdapterError, AdapterReference, AdapterRefusal, AdapterSource
from configs.engine import AdaptersConfig
from configs.model import ModelConfig
from sharding.sources import AdapterSources, ModelNotFound, content_digest, fetch_model

ROOT = Path(__file__).resolve().parents[2]


def write(folder: Path, content: str = "{}") -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(content)
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    return folder


def sources(root: Path, **changes: object) -> AdapterSources:
    return AdapterSources(AdaptersConfig.model_validate({"local_roots": [str(root)], **changes}))


def local(name: str) -> AdapterReference:
    return AdapterReference(AdapterSource.LOCAL, name)


def refusal(store: AdapterSources, reference: AdapterReference) -> AdapterRefusal:
    with pytest.raises(AdapterError) as caught:
        store.fetch(reference, False)
    assert reference.id[:20] in caught.value.message
    return caught.value.refusal


def test_a_local_adapter_is_found_under_its_root(tmp_path: Path) -> None:
    folder = write(tmp_path / "team" / "red")
    found = sources(tmp_path).fetch(local("team/red"), False)
    assert found.folder == folder
    assert [name for name, _, _ in found.fingerprint] == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


@pytest.mark.parametrize("name", ["../outside", "red/../../outside", "link", "nobody", "/etc"])
def test_nothing_outside_the_roots_is_read(tmp_path: Path, name: str) -> None:
    outside = write(tmp_path / "outside")
    root = tmp_path / "root"
    write(root / "red")
    (root / "link").symlink_to(outside)
    assert refusal(sources(root), local(name)) is AdapterRefusal.NOT_FOUND


def test_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    write(tmp_path / "red")
    store = sources(tmp_path, max_file_bytes=5)
    assert refusal(store, local("red")) is AdapterRefusal.TOO_LARGE


def test_s3_is_refused_by_name(tmp_path: Path) -> None:
    reference = AdapterReference(AdapterSource.S3, "bucket/red")
    assert refusal(sources(tmp_path), reference) is AdapterRefusal.UNSUPPORTED


def test_a_root_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="local_roots"):
        sources(tmp_path / "missing")


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    store = sources(tmp_path)
    write(tmp_path / "red")
    write(tmp_path / "same")
    write(tmp_path / "other", '{"r": 8}')
    red, same, other = (
        content_digest(store.fetch(local(name), False)) for name in ("red", "same", "other")
    )
    assert red == same != other


def test_adapters_under_the_roots_are_listed(tmp_path: Path) -> None:
    write(tmp_path / "red")
    write(tmp_path / "blue")
    (tmp_path / "not-an-adapter").mkdir()
    assert sources(tmp_path).known_local() == ["blue", "red"]


def test_the_hubs_cache_serves_without_a_network(tmp_path: Path) -> None:
    """In a process of its own, for the hub's client reads its environment when it is imported."""
    revision = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "hub" / "models--acme--sql"
    write(cached / "snapshots" / revision)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(revision)
    script = (
        "from tests.sharding.test_sources import *\n"
        f"store = sources(Path({str(tmp_path)!r}))\n"
        "found = store.fetch(AdapterReference(AdapterSource.HUB, 'acme/sql'), False)\n"
        f"assert found.folder.name == {revision!r}, found\n"
        "for name in ('acme/other', 'not a name'):\n"
        "    reference = AdapterReference(AdapterSource.HUB, name)\n"
        "    assert refusal(store, reference) is AdapterRefusal.NOT_FOUND\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


def test_the_demo_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (fetch_model(ModelConfig(id="configs/demo/model")) / "config.json").is_file()


def test_a_model_that_is_nowhere_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFound, match="Give a folder's path, or a hub id"):
        fetch_model(ModelConfig(id="not a model at all"))

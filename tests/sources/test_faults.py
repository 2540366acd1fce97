"""The same faults at every source: pickles that are bombs, files that lie, a disk that is full."""

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from configs.wire.adapters import AdapterError, AdapterReference, AdapterRefusal, AdapterSource
from sources.adapters import AdapterSources
from tests.hub_server import HubServer
from tests.sources.adapter_files import (
    adapter_files,
    fetch,
    left_over,
    refusal,
    sources,
    write_files,
)
from tests.sources.test_cache import small_files

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
UNSUPPORTED = AdapterRefusal.UNSUPPORTED


@dataclass
class FaultySource:
    """A source that an adapter can be put into, and the config that has a server read there."""

    root: Path
    reference: AdapterReference
    put: Callable[[dict[str, bytes]], object]
    config: dict[str, Any]

    def store(self, **others: Any) -> AdapterSources:
        return sources(self.root, **self.config, **others)


@pytest.fixture
def hub(tmp_path: Path, hub: HubServer) -> FaultySource:
    reference = AdapterReference(AdapterSource.HUB, "acme/sql")
    put = partial(hub.add, "acme/sql")
    return FaultySource(tmp_path, reference, put, {"hub_endpoint": hub.url})


@pytest.fixture
def s3(tmp_path: Path, endpoint: str, bucket: Any) -> FaultySource:
    def put(files: dict[str, bytes]) -> None:
        for name, content in files.items():
            bucket.put_object(Key=f"sql/{name}", Body=content)

    config = {"roots": [bucket.name], "endpoint_url": endpoint, "region": "us-east-1"}
    return FaultySource(tmp_path, AdapterReference(AdapterSource.S3, "sql"), put, {"s3": config})


@pytest.fixture
def local(tmp_path: Path) -> FaultySource:
    root = tmp_path / "roots"
    root.mkdir()

    def put(files: dict[str, bytes]) -> None:
        for path in write_files(root / "sql", files).iterdir():
            os.utime(path, (1, 1))  # else it counts as one that may still be written

    reference = AdapterReference(AdapterSource.LOCAL, "sql")
    return FaultySource(tmp_path, reference, put, {"local_roots": [str(root)]})


@pytest.fixture(params=["hub", "s3", "local"])
def source(request: pytest.FixtureRequest) -> FaultySource:
    found: FaultySource = request.getfixturevalue(request.param)
    return found


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.system, (f"touch {self.trace}",)


def pickled(folder: Path, content: object) -> dict[str, bytes]:
    """An adapter as PEFT saved it of old."""
    torch.save(content, folder / "saved")
    return {CONFIG: adapter_files()[CONFIG], PICKLE: (folder / "saved").read_bytes()}


def tensors() -> dict[str, torch.Tensor]:
    return load(adapter_files()[WEIGHTS])


@pytest.mark.parametrize("kind", ["code", "raw code", "not tensors", "huge view", "truncated"])
def test_a_bomb_is_refused_and_does_not_go_off(source: FaultySource, kind: str) -> None:
    trace = source.root / "went-off"
    bombs: dict[str, object] = {
        "code": {**tensors(), "x": Bomb(trace)},
        "not tensors": {"x": [1, 2]},
        "huge view": {"x": torch.ones(1).expand(10**12)},
    }
    files = pickled(source.root, bombs.get(kind, tensors()))
    if kind == "raw code":
        files[PICKLE] = pickle.dumps(Bomb(trace))
    elif kind == "truncated":
        files[PICKLE] = files[PICKLE][:-100]
    source.put(files)
    assert refusal(source.store(allow_pickle=True), source.reference) is UNSUPPORTED
    assert not trace.exists()
    assert not left_over(source.root)
    # Without that setting it is not even looked at: refused here, or by the ranks' reader.
    strict = source.store()
    if source.reference.source is AdapterSource.LOCAL:
        assert not (fetch(strict, source.reference).folder / WEIGHTS).exists()
    else:
        assert refusal(strict, source.reference) is UNSUPPORTED


@pytest.mark.parametrize("weights", [
    (10 * 2**30).to_bytes(8, "little") + b"{}", adapter_files()[WEIGHTS][:40], b"short", b"",
], ids=["10 GB header", "truncated file", "truncated length", "empty"])  # fmt: skip
def test_a_file_with_a_wrong_size_is_refused_unread(source: FaultySource, weights: bytes) -> None:
    source.put({**adapter_files(), WEIGHTS: weights})
    store = source.store()
    for _ in range(2):
        assert refusal(store, source.reference) is UNSUPPORTED
    assert not left_over(source.root)
    source.put(adapter_files())
    assert refusal_or_none(store, source.reference) is None, "a good version is served at once"


def refusal_or_none(store: AdapterSources, reference: AdapterReference) -> AdapterRefusal | None:
    try:
        store.release(fetch(store, reference))
    except AdapterError as error:
        return error.refusal
    return None


def test_a_full_disk_refuses_the_newcomer_and_leaves_nothing(source: FaultySource) -> None:
    """Local adapters take room only where a pickle is made into safetensors."""
    large = {"x": torch.ones(64, 64)}
    if source.reference.source is AdapterSource.LOCAL:
        source.put(pickled(source.root, large))
    else:
        source.put({**adapter_files(), "tokenizer_config.json": b"{}" + b" " * 5000})
    store = source.store(allow_pickle=True)
    found = store.resolve(source.reference, False)
    with (
        small_files(),
        pytest.raises(AdapterError, match=r"the disk is full.*cache_bytes") as raised,
    ):
        store.fetch(found, False)
    assert raised.value.refusal is AdapterRefusal.UNAVAILABLE
    assert not left_over(source.root)
    assert refusal_or_none(store, source.reference) is None, "and when there is room again"
    store.cache.check()


def test_what_is_larger_than_the_whole_cache_is_refused_with_the_setting(
    source: FaultySource,
) -> None:
    content = pickled(source.root, tensors())
    source.put(content)
    store = source.store(allow_pickle=True, fetch={"cache_bytes": 100})
    with pytest.raises(AdapterError, match="cache_bytes") as raised:
        fetch(store, source.reference)
    assert raised.value.refusal is AdapterRefusal.UNAVAILABLE
    assert not left_over(source.root)


@pytest.mark.parametrize("name", [CONFIG, "tokenizer_config.json", "chat_template.jinja"])
def test_a_text_over_the_limit_is_refused_before_it_is_parsed(
    source: FaultySource, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sources.base.MAX_TEXT_BYTES", 1000)
    source.put({**adapter_files(), name: b" " * 1001})
    with pytest.raises(AdapterError, match=name) as raised:
        fetch(source.store(), source.reference)
    assert raised.value.refusal is AdapterRefusal.TOO_LARGE
    assert not list(source.root.glob("cache/*"))


def test_more_bytes_than_the_limit_are_refused_before_they_are_downloaded(
    source: FaultySource,
) -> None:
    source.put(adapter_files())
    store = source.store(max_file_bytes=50)
    assert refusal(store, source.reference) is AdapterRefusal.TOO_LARGE
    assert not list(source.root.glob("cache/*"))


@pytest.mark.parametrize("source", ["hub", "s3"])
def test_a_cache_that_cannot_be_used_is_named_by_its_setting(
    request: pytest.FixtureRequest, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    at: FaultySource = request.getfixturevalue(source)
    at.put(adapter_files())
    file = at.root / "taken"
    file.write_text("no folder")
    store = sources(at.root, fetch={"cache_dir": str(file)}, **at.config)
    with pytest.raises(AdapterError) as refused:
        fetch(store, at.reference)
    assert refused.value.refusal is AdapterRefusal.UNAVAILABLE
    assert "adapters.fetch.cache_dir" in str(refused.value)
    assert str(file) not in str(refused.value), "clients need not know the server's folders"
    assert str(file) in caplog.text

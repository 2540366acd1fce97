"""Pickles: refused unless they may be read, then read as tensors alone, never run."""

import os
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file

from configs.wire.adapters import AdapterError, AdapterReference, AdapterRefusal, AdapterSource
from tests.hub_server import HubServer
from tests.sources.adapter_files import (
    adapter_files,
    fetch,
    left_over,
    refusal,
    sources,
    write_files,
)

RED = AdapterReference(AdapterSource.LOCAL, "red")
SQL = AdapterReference(AdapterSource.HUB, "acme/sql")


def pickled(folder: Path) -> dict[str, torch.Tensor]:
    """An adapter as PEFT saved it of old; returns its tensors."""
    files = adapter_files()
    tensors = load(files.pop("adapter_model.safetensors"))
    write_files(folder, files)
    torch.save(tensors, folder / "adapter_model.bin")
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    return tensors


def test_a_pickle_is_read_only_where_it_may_be(tmp_path: Path) -> None:
    tensors = pickled(tmp_path / "red")
    store = sources(tmp_path, local_roots=[str(tmp_path)], allow_pickle=True)
    found = fetch(store, RED)
    assert found.folder != tmp_path / "red", "the operator's folder is not ours to write to"
    read = load_file(found.folder / "adapter_model.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    assert fetch(store, RED).folder == found.folder
    strict = sources(tmp_path, local_roots=[str(tmp_path)])
    assert fetch(strict, RED).folder == tmp_path / "red", "the ranks refuse it with their reason"


def test_a_downloaded_pickle_is_not_kept(tmp_path: Path) -> None:
    tensors = pickled(tmp_path / "red")
    files = {path.name: path.read_bytes() for path in (tmp_path / "red").iterdir()}
    with HubServer() as hub:
        hub.add("acme/sql", files)
        assert refusal(sources(tmp_path, hub_endpoint=hub.url), SQL) is AdapterRefusal.UNSUPPORTED
        assert not hub.downloads()
        store = sources(tmp_path, hub_endpoint=hub.url, allow_pickle=True)
        folder = fetch(store, SQL).folder
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert load_file(folder / "adapter_model.safetensors").keys() == tensors.keys()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.ones(2, 6, device="meta"), "has no values"),
        (lambda: torch.eye(6).to_sparse(), "is not a dense tensor"),
        (lambda: torch.zeros(2, 6, dtype=torch.int8), "has type torch.int8"),
        (lambda: torch.zeros(2, 6, dtype=torch.complex128), "is not a dense tensor"),
        (lambda: torch.ones(1, 1).expand(2**20, 2**10), "larger than the file"),
    ],
)
def test_tensors_that_no_adapter_has_are_refused(
    tmp_path: Path, make: Callable[[], torch.Tensor], message: str
) -> None:
    pickled(tmp_path / "red")
    torch.save({"a": make()}, tmp_path / "red" / "adapter_model.bin")
    store = sources(tmp_path, local_roots=[str(tmp_path)], allow_pickle=True)
    with pytest.raises(AdapterError, match=message) as raised:
        fetch(store, RED)
    assert raised.value.refusal is AdapterRefusal.UNSUPPORTED
    assert not left_over(tmp_path)


@pytest.mark.parametrize(
    ("part", "compression", "message"),
    [
        ("data.pkl", zipfile.ZIP_DEFLATED, "data.pkl is compressed"),
        ("version", zipfile.ZIP_DEFLATED, "version is compressed"),
        ("data.pkl", zipfile.ZIP_STORED, "data.pkl has 8388609 bytes"),
    ],
)
def test_parts_that_take_far_more_memory_than_a_real_one_are_refused(
    tmp_path: Path, part: str, compression: int, message: str
) -> None:
    """torch reads them whole, and finds them by names in any case."""
    pickled(tmp_path / "red")
    path = tmp_path / "red" / "adapter_model.bin"
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            folder, _, plain = name.rpartition("/")
            if plain != part:
                archive.writestr(name, content)
            elif compression == zipfile.ZIP_DEFLATED:
                archive.writestr(name, content, compression)
            else:
                archive.writestr(f"{folder}/{plain.upper()}", content.ljust(2**23 + 1, b"\0"))
    os.utime(path, (1, 1))
    store = sources(tmp_path, local_roots=[str(tmp_path)], allow_pickle=True)
    with pytest.raises(AdapterError, match=message) as raised:
        fetch(store, RED)
    assert raised.value.refusal is AdapterRefusal.UNSUPPORTED


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (bytearray(8), "calls __builtin__.bytearray"),
        (Counter("a"), "calls collections.Counter"),
        ({1, 2}, "calls __builtin__.set"),
    ],
)
def test_calls_that_no_tensor_needs_are_refused(
    tmp_path: Path, value: object, message: str
) -> None:
    """torch's reader of tensors alone would call them: `bytearray` with any number of bytes."""
    pickled(tmp_path / "red")
    path = tmp_path / "red" / "adapter_model.bin"
    torch.save({"a": value}, path)
    os.utime(path, (1, 1))
    store = sources(tmp_path, local_roots=[str(tmp_path)], allow_pickle=True)
    with pytest.raises(AdapterError, match=message) as raised:
        fetch(store, RED)
    assert raised.value.refusal is AdapterRefusal.UNSUPPORTED


def test_a_few_bytes_ask_for_no_memory(tmp_path: Path) -> None:
    """A description that would have 2^40 bytes allocated, and one of very many operations."""
    pickled(tmp_path / "red")
    path = tmp_path / "red" / "adapter_model.bin"
    torch.save({"a": bytearray(8)}, path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    large = b"c__builtin__\nbytearray\n\x8a\x06\0\0\0\0\0\x01\x85R"
    cases = (
        (large, r"calls __builtin__\.bytearray"),
        (b"}" * 2**22, "more than 2097152 operations"),
    )
    for operations, message in cases:
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in parts.items():
                is_description = name.endswith("data.pkl")
                archive.writestr(
                    name, b"\x80\x02" + operations + b"." if is_description else content
                )
        os.utime(path, (1, 1))
        store = sources(tmp_path, local_roots=[str(tmp_path)], allow_pickle=True)
        with pytest.raises(AdapterError, match=message):
            fetch(store, RED)


def test_parameters_and_plain_mappings_are_read(tmp_path: Path) -> None:
    tensors = pickled(tmp_path / "red")
    own = OrderedDict((name, torch.nn.Parameter(t)) for name, t in tensors.items())
    path = tmp_path / "red" / "adapter_model.bin"
    torch.save(own, path)
    os.utime(path, (1, 1))
    found = fetch(sources(tmp_path, local_roots=[str(tmp_path)], allow_pickle=True), RED)
    read = load_file(found.folder / "adapter_model.safetensors")
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_a_link_that_leads_out_since_the_look(tmp_path: Path) -> None:
    """For every file and either format: it is judged by what was opened."""
    pickled(tmp_path / "roots" / "red")
    pickled(tmp_path / "other")
    for name in ("adapter_model.bin", "adapter_config.json"):
        store = sources(tmp_path, local_roots=[str(tmp_path / "roots")], allow_pickle=True)
        found = store.resolve(RED, False)
        path = tmp_path / "roots" / "red" / name
        path.unlink()
        path.symlink_to(tmp_path / "other" / name)
        with pytest.raises(AdapterError, match=f"{name} is a link to a file outside") as raised:
            store.fetch(found, False)
        assert raised.value.refusal is AdapterRefusal.FORBIDDEN
        path.unlink()
        path.write_bytes((tmp_path / "other" / name).read_bytes())

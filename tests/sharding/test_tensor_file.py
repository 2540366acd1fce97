"""The format beside the library that defines it, and files that are damaged or written to."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save, save_file

from configs.reading import DamagedFile, FileChanged
from sharding import tensor_file
from sharding.tensor_file import TensorFile


@pytest.fixture(params=[2**25, 0], ids=["at once", "one by one"])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "WHOLE_BYTES", request.param)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_those_of_the_library(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "some.safetensors"
    tensors = {f"layer.{i}": torch.randn(i + 1, 3).to(dtype) for i in range(5)}
    more = {"other": torch.randn(2, 2), "none": torch.zeros(0, 4), "one": torch.tensor(7.0)}
    save_file({**tensors, **more}, path, metadata={"format": "pt", "dtype": "a word"})
    file = TensorFile(path)
    expected = load_file(path)
    assert file.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(file.get_tensor(key), tensor)
        assert file.get_tensor(key).dtype is tensor.dtype
        assert file.shape(key) == tensor.shape
    with safe_open(path, framework="pt") as theirs:
        for key in tensors:
            other, height = theirs.get_slice(key), file.shape(key)[0]
            assert (file.dtype(key), list(file.shape(key))) == (
                other.get_dtype(),
                other.get_shape(),
            )
            first, stop = min(1, height), min(3, height)
            assert torch.equal(file.rows(key, first, stop), other[1:3])


@pytest.mark.usefixtures("at_once")
def test_stacks(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    tensors = {f"t{i}": torch.randn(2, 3) for i in range(4)}
    save_file({**tensors, "half": torch.ones(2, 3).half()}, path)
    file = TensorFile(path)
    assert torch.equal(file.stack(["t2", "t0"]), torch.stack([tensors["t2"], tensors["t0"]]))
    mixed = file.stack(["t1", "half"])
    assert torch.equal(mixed, torch.stack([tensors["t1"], torch.ones(2, 3)]))


def test_stacks_of_several_types_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    tensors = {f"{i}.{name}": torch.randn(size) for i in range(12) for name, size in SIZES.items()}
    tensors = {key: t.to(TYPES[key.split(".")[1]]) for key, t in tensors.items()}
    save_file(tensors, path)
    orders = {"b": [3, 1, 11, 2], "a": [*range(12)], "d": [5], "c": [0, 0, 10]}
    wanted = [[f"{i}.{name}" for i in order] for name, order in orders.items()]
    found = TensorFile(path).stacks(wanted)
    for keys, stack in zip(wanted, found.stacks, strict=True):
        assert stack.dtype is tensors[keys[0]].dtype
        assert torch.equal(stack, torch.stack([tensors[key] for key in keys]))
    numbers = sorted(number for flat in found.flat for number in flat.double().tolist())
    assert numbers == sorted(torch.cat([s.flatten().double() for s in found.stacks]).tolist())


SIZES = {"a": (3, 5), "b": (4,), "c": (2, 0), "d": (7, 1)}
TYPES = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float64, "d": torch.bfloat16}


@pytest.mark.usefixtures("at_once")
def test_a_file_with_unaligned_tensors(tmp_path: Path) -> None:
    """The format requires no alignment; other writers order tensors otherwise."""
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(4).bfloat16()}
    data = [t.view(-1).view(torch.uint8).numpy().tobytes() for t in tensors.values()]
    entries = {
        "odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "a": {"dtype": "F32", "shape": [3, 5], "data_offsets": [3, 63]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [63, 71]},
    }
    path = write(tmp_path, json.dumps(entries).encode(), b"odd" + b"".join(data))
    file = TensorFile(path)
    for key, tensor in tensors.items():
        assert torch.equal(file.get_tensor(key), load_file(path)[key])
        assert torch.equal(file.get_tensor(key), tensor)


def write(folder: Path, header: bytes, data: bytes) -> Path:
    path = folder / "some.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def entry(*offsets: int, **changed: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": offsets, **changed}


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b"[" * 100_000,
        b'{"a": 1}',
        {"a": entry(0, 4)},
        {"a": entry(0, 16)},
        {"a": entry(0, 8)},
        {"a": entry(8, 16)},
        {"a": entry(0, 8), "b": entry(0, 8)},
        {"a": entry(0, 8), "b": entry(4, 12)},
        {"a": entry(0, 16, shape=[-4])},
        {"a": entry(0, 16, shape=[2**40] * 17)},
        {"a": entry(0, 16, dtype="F128")},
        {"a": entry(0, 16, dtype="F4", shape=[31])},
        {"a": entry(0, 8), "b": entry(8, 24, shape=[4])},
    ],
)
def test_what_the_library_refuses_is_refused(tmp_path: Path, header: Any) -> None:
    """The second tensor of the last header would lie beyond the file's end."""
    plain = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = write(tmp_path, plain, bytes(16))
    with pytest.raises(SafetensorError), safe_open(path, framework="pt"):
        pass
    with pytest.raises(DamagedFile, match=r"some\.safetensors"):
        TensorFile(path)


@pytest.mark.parametrize("size", [0, 7, 8, 60, -1])
def test_a_truncated_file(tmp_path: Path, size: int) -> None:
    data = save({"a": torch.ones(40)})
    (tmp_path / "half.safetensors").write_bytes(data[:size])
    with pytest.raises(DamagedFile, match=r"half\.safetensors"):
        TensorFile(tmp_path / "half.safetensors")


@pytest.mark.usefixtures("at_once")
def test_a_file_that_is_cut_short_while_it_is_read(tmp_path: Path) -> None:
    """Of a mapped file the process would die (SIGBUS)."""
    path = tmp_path / "some.safetensors"
    save_file({"a": torch.ones(2**16), "b": torch.ones(2**16)}, path)
    file = TensorFile(path)
    os.truncate(path, 4096)
    with pytest.raises(FileChanged, match="ended early"):
        file.get_tensor("b")


@pytest.mark.usefixtures("at_once")
def test_what_was_read_stays(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    save_file({"a": torch.ones(2**16)}, path)
    tensor = TensorFile(path).get_tensor("a")
    path.write_bytes(b"")
    assert tensor.sum() == 2**16


def test_no_file_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    save_file({"a": torch.ones(2**16)}, path)
    file = TensorFile(path)
    kept = [file.get_tensor("a"), file.stack(["a"])]
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert all(tensor.sum() == 2**16 for tensor in kept)

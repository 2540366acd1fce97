from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from modeling.adapters.tensor_file import TensorFile


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_those_of_the_library(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "some.safetensors"
    tensors = {f"layer.{i}": torch.randn(i + 1, 3).to(dtype) for i in range(5)}
    save_file({**tensors, "other": torch.randn(2, 2), "none": torch.zeros(0, 4)}, path)
    file = TensorFile(path)
    for key, tensor in load_file(path).items():
        assert torch.equal(file.get(key), tensor)
        assert file.get(key).dtype is tensor.dtype


def test_a_file_that_aligns_nothing(tmp_path: Path) -> None:
    """The format does not ask for alignment; other writers pad the header otherwise."""
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(4).bfloat16()}
    data = save(tensors)
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip() + b" " * 3
    header += b" " * (len(header) % 2 == 0)
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    assert (8 + len(header)) % 2, "every tensor starts at an odd byte"
    file = TensorFile(path)
    for key, tensor in tensors.items():
        assert torch.equal(file.get(key), load_file(path)[key])
        assert torch.equal(file.get(key), tensor)


def test_reading_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    save_file({"a": torch.ones(4)}, path)
    before = path.read_bytes()
    TensorFile(path).get("a").zero_()
    assert path.read_bytes() == before

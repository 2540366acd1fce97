"""Lazy reading by slices, its byte count, and its refusals; the made-up source."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sharding.checkpoint import CheckpointError, DummySource, SafetensorsCheckpoint
from sharding.slicing import Segments, whole

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    matrix = torch.arange(48, dtype=torch.float32).view(8, 6)
    save_file({"m": matrix, "v": torch.arange(8).half()}, tmp_path / "model.safetensors")
    return tmp_path


def test_names_shapes_and_types_without_reading(folder: Path) -> None:
    checkpoint = SafetensorsCheckpoint(folder)
    assert checkpoint.names() == {"m", "v"}
    assert (checkpoint.shape("m"), checkpoint.shape("v")) == ((8, 6), (8,))
    assert (checkpoint.dtype("m"), checkpoint.dtype("v")) == (torch.float32, torch.float16)
    assert checkpoint.bytes_read == 0


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (whole(8), whole(6)),
        (((2, 4),), whole(6)),
        (whole(8), ((3, 6),)),
        (((6, 8), (0, 2)), ((0, 1), (4, 6))),
        (((8, 8),), whole(6)),
    ],
)
def test_reads_the_cut_and_counts_only_its_bytes(
    folder: Path, rows: Segments, columns: Segments
) -> None:
    checkpoint = SafetensorsCheckpoint(folder)
    got = checkpoint.read("m", (8, 6), (rows, columns))
    whole_matrix = torch.arange(48, dtype=torch.float32).view(8, 6)
    pick_rows = [i for start, stop in rows for i in range(start, stop)]
    pick_columns = [i for start, stop in columns for i in range(start, stop)]
    assert torch.equal(got, whole_matrix[pick_rows][:, pick_columns])
    assert checkpoint.bytes_read == 4 * len(pick_rows) * len(pick_columns)


def test_a_missing_tensor_and_another_shape_are_named(folder: Path) -> None:
    checkpoint = SafetensorsCheckpoint(folder)
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.norm\.weight'"):
        checkpoint.read("model.norm.weight", (8,), (whole(8),))
    with pytest.raises(CheckpointError, match=r"'m' has shape \(8, 6\), the model needs \(6, 8\)"):
        checkpoint.read("m", (6, 8), (whole(6), whole(8)))


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    save_file({"q": torch.zeros(4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="'q' is stored as I8"):
        SafetensorsCheckpoint(tmp_path).read("q", (4,), (whole(4),))


def test_shards_are_found_by_the_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert checkpoint.names() == {"a", "b"}
    assert checkpoint.read("b", (3,), (whole(3),)).tolist() == [0, 0, 0]
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks two\.safetensors"):
        SafetensorsCheckpoint(tmp_path)


def test_a_folder_without_safetensors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lacks model\.safetensors: only safetensors"):
        SafetensorsCheckpoint(tmp_path)


def test_dummy_values_depend_on_name_and_cut_alone() -> None:
    one, two = (DummySource(CPU, torch.bfloat16) for _ in range(2))
    cut = (((0, 64),), whole(32))
    first = one.read("a.weight", (128, 32), cut)
    one.read("b.weight", (128, 32), cut)
    assert first.shape == (64, 32)
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, two.read("a.weight", (128, 32), cut))
    assert not torch.equal(first, two.read("b.weight", (128, 32), cut))
    assert 0.015 < first.float().std().item() < 0.025
    assert one.read("norm.weight", (4,), (whole(4),)).tolist() == [1, 1, 1, 1]
    assert one.read("a.bias", (4,), (whole(4),)).tolist() == [0, 0, 0, 0]

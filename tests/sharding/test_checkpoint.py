"""Lazy reading by slices, its byte count, and its refusals; the made-up source."""

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sharding.checkpoint import (
    Checkpoint,
    CheckpointError,
    DummySource,
    PickledCheckpoint,
    SafetensorsCheckpoint,
    open_checkpoint,
)
from sharding.slicing import Segments, whole

CPU = torch.device("cpu")


def _write_safetensors(tensors: dict[str, Any], folder: Path) -> Checkpoint:
    save_file(tensors, folder / "model.safetensors")
    return SafetensorsCheckpoint(folder)


def _write_pickle(tensors: dict[str, Any], folder: Path) -> Checkpoint:
    torch.save(tensors, folder / "pytorch_model.bin")
    return PickledCheckpoint(folder)


Write = Callable[[dict[str, Any], Path], Checkpoint]


@pytest.fixture(params=[_write_safetensors, _write_pickle], ids=["safetensors", "pickle"])
def write(request: pytest.FixtureRequest) -> Write:
    write: Write = request.param
    return write


@pytest.fixture
def checkpoint(tmp_path: Path, write: Write) -> Checkpoint:
    matrix = torch.arange(48, dtype=torch.float32).view(8, 6)
    return write({"m": matrix, "v": torch.arange(8).half()}, tmp_path)


def test_names_shapes_and_types_without_reading(checkpoint: Checkpoint) -> None:
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
    checkpoint: Checkpoint, rows: Segments, columns: Segments
) -> None:
    got = checkpoint.read("m", (8, 6), (rows, columns))
    whole_matrix = torch.arange(48, dtype=torch.float32).view(8, 6)
    pick_rows = [i for start, stop in rows for i in range(start, stop)]
    pick_columns = [i for start, stop in columns for i in range(start, stop)]
    assert torch.equal(got, whole_matrix[pick_rows][:, pick_columns])
    assert checkpoint.bytes_read == 4 * len(pick_rows) * len(pick_columns)


def test_a_missing_tensor_and_another_shape_are_named(checkpoint: Checkpoint) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.norm\.weight'"):
        checkpoint.read("model.norm.weight", (8,), (whole(8),))
    with pytest.raises(CheckpointError, match=r"'m' has shape \(8, 6\), the model needs \(6, 8\)"):
        checkpoint.read("m", (6, 8), (whole(6), whole(8)))


def test_integer_weights_are_refused(tmp_path: Path, write: Write) -> None:
    checkpoint = write({"q": torch.zeros(4, dtype=torch.int8)}, tmp_path)
    with pytest.raises(CheckpointError, match=r"'q' is stored as (I8|torch\.int8)"):
        checkpoint.read("q", (4,), (whole(4),))


def write_shards(folder: Path, suffix: str, save: Callable[[dict[str, Any], Path], Any]) -> None:
    save({"a": torch.ones(2)}, folder / f"one.{suffix}")
    save({"b": torch.zeros(3)}, folder / f"two.{suffix}")
    name = "model.safetensors" if suffix == "safetensors" else "pytorch_model.bin"
    index = {"weight_map": {"a": f"one.{suffix}", "b": f"two.{suffix}"}}
    (folder / f"{name}.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(("suffix", "save"), [("safetensors", save_file), ("bin", torch.save)])
def test_shards_are_found_by_the_index(tmp_path: Path, suffix: str, save: Any) -> None:
    write_shards(tmp_path, suffix, save)
    checkpoint = open_checkpoint(tmp_path, allow_pickle=True)
    assert checkpoint.names() == {"a", "b"}
    assert checkpoint.read("b", (3,), (whole(3),)).tolist() == [0, 0, 0]
    (tmp_path / f"two.{suffix}").unlink()
    with pytest.raises(CheckpointError, match=rf"lacks two\.{suffix}"):
        open_checkpoint(tmp_path, allow_pickle=True)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    for allow_pickle in (False, True):
        with pytest.raises(CheckpointError, match=r"lacks model\.safetensors: only safetensors"):
            open_checkpoint(tmp_path, allow_pickle)


def test_pickles_are_opened_only_when_allowed(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"set model\.allow_pickle to true"):
        open_checkpoint(tmp_path, allow_pickle=False)
    assert isinstance(open_checkpoint(tmp_path, allow_pickle=True), PickledCheckpoint)


def test_safetensors_are_preferred(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path, allow_pickle=True).names() == {"a"}


class Command:
    """What a hostile pickle would run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("code of a pickle was run",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": Command()}, "cannot be read as tensors alone"),
        ({"a": torch.ones(2), "step": 7}, "holds more than named tensors"),
        ([torch.ones(2)], "holds more than named tensors"),
    ],
)
def test_a_pickle_may_hold_tensors_alone(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=message):
        PickledCheckpoint(tmp_path)


@pytest.mark.parametrize("old", [True, False])
def test_files_of_another_format(tmp_path: Path, old: bool) -> None:
    path = tmp_path / "pytorch_model.bin"
    if old:
        torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    else:
        path.write_bytes(pickle.dumps({"a": 1})[:-1])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin cannot be read.*safetensors"):
        PickledCheckpoint(tmp_path)


def test_what_was_read_does_not_hold_the_file(tmp_path: Path) -> None:
    checkpoint = _write_pickle({"a": torch.arange(6.0).view(3, 2)}, tmp_path)
    rows = checkpoint.read("a", (3, 2), (((1, 2),), whole(2)))
    assert rows.untyped_storage().nbytes() == rows.nbytes == 8


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


def test_a_single_file_goes_before_an_index(tmp_path: Path, write: Write) -> None:
    """As transformers has it: the index left by a model saved in shards is ignored."""
    suffix = "safetensors" if write is _write_safetensors else "bin"
    write_shards(tmp_path, suffix, save_file if suffix == "safetensors" else torch.save)
    assert write({"new": torch.ones(2)}, tmp_path).names() == {"new"}
    for name in ("one", "two"):
        (tmp_path / f"{name}.{suffix}").unlink()
    assert open_checkpoint(tmp_path, allow_pickle=True).names() == {"new"}


def test_an_index_of_missing_shards_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, "safetensors", save_file)
    (tmp_path / "one.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks one\.safetensors, which model\.safe.* names"):
        open_checkpoint(tmp_path, allow_pickle=False)


@pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_an_index_that_is_not_valid(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="is not an index of shards"):
        open_checkpoint(tmp_path, allow_pickle=False)


@pytest.mark.parametrize("size", [0, 4096])
def test_a_file_that_is_written_over_while_it_is_loaded(
    tmp_path: Path, write: Write, size: int
) -> None:
    """Of a mapped file the rank would die (SIGBUS), or serve a mixture."""
    checkpoint = write({"a": torch.ones(2**15, 2)}, tmp_path)
    (path,) = tmp_path.iterdir()
    os.truncate(path, size)
    with pytest.raises(CheckpointError, match=r"'a' cannot be read: .* ended early"):
        checkpoint.read("a", (2**15, 2), (whole(2**15), whole(2)))


def test_tensors_are_not_the_file(tmp_path: Path, write: Write) -> None:
    checkpoint = write({"a": torch.ones(2**15, 2)}, tmp_path)
    (path,) = tmp_path.iterdir()
    tensor = checkpoint.read("a", (2**15, 2), (whole(2**15), whole(2)))
    assert str(path) not in Path("/proc/self/maps").read_text()
    path.write_bytes(b"")
    assert tensor.sum() == 2**16


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.ones(2, device="meta"), "'a' has no values"),
        (lambda: torch.eye(3).to_sparse(), "'a' is not a dense tensor"),
        (lambda: torch._neg_view(torch.ones(2)), "'a' is not a dense tensor"),
        (lambda: torch.eye(3).to_sparse_csr(), "tensors alone"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_tensors_without_plain_values_are_refused(
    tmp_path: Path, make: Callable[[], torch.Tensor], message: str
) -> None:
    torch.save({"a": make()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=message):
        PickledCheckpoint(tmp_path)


def test_views_of_one_storage(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    tensors = {"t": base.t(), "part": base[1:3, 2:5], "wide": base[0].expand(5, 6), "base": base}
    checkpoint = _write_pickle(tensors, tmp_path)
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        cut = (((1, 2), (0, 1)), ((1, 3),))
        expected = tensor[[1, 0], 1:3]
        assert torch.equal(checkpoint.read(name, shape, cut), expected)


@pytest.mark.parametrize(
    ("compression", "fault"),
    [
        (zipfile.ZIP_DEFLATED, r"its x/data\.pkl is compressed"),
        (zipfile.ZIP_STORED, r"its data\.pkl has 134217728 bytes"),
    ],
)
def test_a_description_that_is_too_large(tmp_path: Path, compression: int, fault: str) -> None:
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w", compression) as archive:
        archive.writestr("x/data.pkl", bytes(2**27))
    with pytest.raises(CheckpointError, match=fault):
        PickledCheckpoint(tmp_path)


@pytest.mark.parametrize("name", ["../other.safetensors", "a/../../other.safetensors", "/dev/zero"])
def test_shards_stay_in_their_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "other.safetensors")
    index = json.dumps({"weight_map": {"a": name}})
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"outside of its folder|lacks"):
        open_checkpoint(folder, allow_pickle=False)


def test_a_missing_tensor_is_shown_what_there_is(tmp_path: Path) -> None:
    def missing(*names: str) -> str:
        save_file({name: torch.ones(2) for name in names}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError) as raised:
            open_checkpoint(tmp_path, allow_pickle=False).shape("lm_head.weight")
        return str(raised.value)

    assert "it has _orig_mod.lm_head.weight, ...: complete or rename" in missing(
        "_orig_mod.lm_head.weight"
    )
    assert "it has lm_head.qweight: of quantised weights those of linear maps inside" in missing(
        "a.weight", "lm_head.qweight"
    )

"""Cuts of tensors read by position, in one block and in many, beside the same cuts by torch."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from configs.reading import FileChanged, RegularFile
from sharding import extents
from sharding.extents import Extent, read_cut, read_cut_into, read_whole
from sharding.slicing import Segments, whole

BEGIN = 13
"""No multiple of anything."""


def cut_by_torch(tensor: Tensor, cut: tuple[Segments, ...]) -> Tensor:
    for dim, segments in enumerate(cut):
        tensor = torch.cat([tensor.narrow(dim, a, b - a) for a, b in segments], dim)
    return tensor


def written(path: Path, tensor: Tensor) -> tuple[RegularFile, Extent]:
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    path.write_bytes(b"?" * BEGIN + data + b"?" * 5)
    return RegularFile(path), Extent(BEGIN, tensor.dtype, tuple(tensor.shape))


@pytest.fixture(params=[2**24, 64], ids=["one block", "many blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extents, "BLOCK_BYTES", request.param)


CUTS: list[tuple[Segments, ...]] = [
    (whole(12), whole(6), whole(4)),
    (((3, 7),), whole(6), whole(4)),
    (((8, 12), (0, 3)), ((1, 2), (4, 6)), ((3, 4), (0, 1))),
    (whole(12), ((2, 5),), whole(4)),
    (((5, 6),), ((5, 6),), ((3, 4),)),
    (((5, 5),), whole(6), whole(4)),
    (whole(12), ((0, 0),), whole(4)),
]


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8])
@pytest.mark.parametrize("cut", CUTS)
def test_cuts_are_those_of_torch(
    tmp_path: Path, dtype: torch.dtype, cut: tuple[Segments, ...]
) -> None:
    tensor = (torch.arange(12 * 6 * 4) % 251).view(12, 6, 4).to(dtype)
    file, extent = written(tmp_path / "file", tensor)
    got = read_cut(file, extent, cut)
    assert got.dtype is dtype
    assert torch.equal(got, cut_by_torch(tensor, cut))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("shape", [(), (1,), (7,), (40, 3), (0, 3)])
def test_whole_tensors_of_any_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    assert torch.equal(read_whole(*written(tmp_path / "file", tensor)), tensor)


def test_memory_of_the_caller(tmp_path: Path) -> None:
    tensor = torch.randn(4, 3)
    file, extent = written(tmp_path / "file", tensor)
    out = torch.zeros(2, 2, 2)
    read_cut_into(out[1], file, extent, (((1, 3),), ((0, 2),)))
    assert torch.equal(out, torch.stack([torch.zeros(2, 2), tensor[1:3, :2]]))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("size", [0, BEGIN, 300])
def test_a_file_that_shrinks_is_noticed(tmp_path: Path, size: int) -> None:
    file, extent = written(tmp_path / "file", torch.zeros(30, 4))
    os.truncate(tmp_path / "file", size)
    with pytest.raises(FileChanged, match="file ended early"):
        read_whole(file, extent)


def test_a_file_of_other_bytes_is_noticed(tmp_path: Path) -> None:
    file, extent = written(tmp_path / "file", torch.zeros(30, 4))
    os.utime(tmp_path / "file", ns=(0, 7))
    with pytest.raises(FileChanged, match="file was changed"):
        read_whole(file, extent)

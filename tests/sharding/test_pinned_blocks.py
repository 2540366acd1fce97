"""Blocks between file and device: lent in order, and never rewritten before their copy is done."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from configs.reading import FileChanged, RegularFile
from sharding import extents
from sharding.extents import Extent, read_cut, read_cut_into
from sharding.pinned_blocks import CopyEnd, PinnedBlocks
from sharding.slicing import Segments, whole

BLOCK = 256
"""Bytes."""


class LateCopy:
    """A copy that happens when it is waited for, as on a device that is far behind."""

    def __init__(self, target: Tensor, host: Tensor) -> None:
        self.target, self.host = target, host
        self.is_done = False

    def synchronize(self) -> None:
        if not self.is_done:
            self.target.copy_(self.host)
            self.is_done = True


class LateBlocks(PinnedBlocks):
    """copies: all that were queued, in order."""

    def __init__(self, count: int) -> None:
        super().__init__(count, BLOCK, None)
        self.copies: list[LateCopy] = []

    def start_copy(self, target: Tensor, host: Tensor) -> CopyEnd | None:
        self.copies.append(LateCopy(target, host))
        return self.copies[-1]

    def finish(self) -> None:
        for copy in self.copies:
            copy.synchronize()


def written(path: Path, tensor: Tensor) -> tuple[RegularFile, Extent]:
    path.write_bytes(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return RegularFile(path), Extent(0, tensor.dtype, tuple(tensor.shape))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extents, "BLOCK_BYTES", BLOCK)


@pytest.mark.parametrize("count", [1, 2, 6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "cut",
    [(whole(300), whole(16)), (((7, 90), (200, 299)), whole(16)), (whole(300), ((2, 5), (9, 16)))],
)
def test_a_device_that_is_behind_gets_every_byte(
    tmp_path: Path, cut: tuple[Segments, ...], dtype: torch.dtype, count: int
) -> None:
    tensor = torch.arange(300 * 16).remainder(251).view(300, 16).to(dtype)
    file, extent = written(tmp_path / "file", tensor)
    blocks = LateBlocks(count)
    expected = read_cut(file, extent, cut)
    out = torch.zeros_like(expected)
    read_cut_into(out, file, extent, cut, blocks)
    assert len(blocks.copies) > count
    blocks.finish()
    assert torch.equal(out, expected)


def test_inference_tensors_are_written_by_other_threads(tmp_path: Path) -> None:
    file, extent = written(tmp_path / "file", torch.arange(300 * 16.0).view(300, 16))
    with torch.inference_mode():
        out = torch.zeros(300, 16)
        read_cut_into(out, file, extent, (whole(300), whole(16)), PinnedBlocks(3, BLOCK, None))
    assert torch.equal(out, torch.arange(300 * 16.0).view(300, 16))


def test_blocks_are_lent_in_order() -> None:
    blocks = LateBlocks(3)
    target = torch.zeros(7, 4)
    for row in target:
        with blocks.block_for(row) as host:
            host.fill_(1)
    starts = [copy.host.data_ptr() for copy in blocks.copies]
    assert len(set(starts)) == 3
    assert starts[3:] == starts[:4]
    # A block that is lent again was waited for; the last three are still under way.
    assert [copy.is_done for copy in blocks.copies] == [True] * 4 + [False] * 3


def test_a_reader_without_a_free_block_waits() -> None:
    blocks = LateBlocks(1)
    target = torch.zeros(2, 4)

    def second() -> None:
        with blocks.block_for(target[1]) as host:
            host.fill_(2)

    with ThreadPoolExecutor(1) as pool:
        with blocks.block_for(target[0]) as host:
            waiting = pool.submit(second)
            host.fill_(1)
            assert not waiting.done()
        waiting.result(timeout=10)
    blocks.finish()
    assert target[:, 0].tolist() == [1, 2]


def test_a_block_of_a_failed_read_is_free_again_and_not_copied(tmp_path: Path) -> None:
    file, extent = written(tmp_path / "file", torch.zeros(300, 16))
    (tmp_path / "file").write_bytes(b"")
    blocks = LateBlocks(2)
    with pytest.raises(FileChanged, match="file ended early"):
        read_cut_into(torch.zeros(300, 16), file, extent, (whole(300), whole(16)), blocks)
    assert not blocks.copies
    with blocks.block_for(torch.zeros(4)), blocks.block_for(torch.zeros(4)):
        pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "cut", [(whole(300), whole(16)), (((9, 280),), ((2, 5),)), ((), whole(16))]
)
@pytest.mark.parametrize("block_bytes", [8, BLOCK, 2**20])
def test_a_gpu_gets_every_byte(
    tmp_path: Path,
    cut: tuple[Segments, ...],
    block_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    extents._pinned_blocks.cache_clear()
    monkeypatch.setattr(extents, "BLOCK_BYTES", block_bytes)
    tensor = torch.randn(300, 16)
    file, extent = written(tmp_path / "file", tensor)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        found = read_cut(file, extent, cut, torch.device("cuda"))
    torch.cuda.synchronize()
    assert torch.equal(found.cpu(), read_cut(file, extent, cut))
    extents._pinned_blocks.cache_clear()

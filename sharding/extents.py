"""Tensors as they lie in a file, read by position straight into the memory that keeps them."""

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from configs.reading import RegularFile
from sharding.pinned_blocks import PinnedBlocks
from sharding.slicing import Segments, whole, width

BLOCK_BYTES = 2**24
"""What one thread reads at once; also the memory for each read of rows that are cut."""

_READERS = 4
_PINNED_BLOCKS = 6
"""Blocks between file and GPU (96 MiB): one for each reader, and two that are being copied."""

CPU = torch.device("cpu")

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Extent:
    """A row-major tensor of a file, from byte `begin` on."""

    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first dimension."""
        return prod(self.shape[1:]) * self.dtype.itemsize


@dataclass(frozen=True)
class _Block:
    """Rows first .. first + count - 1 of the file's tensor, which go to row `target`."""

    first: int
    count: int
    target: int


def read_whole(file: RegularFile, extent: Extent) -> Tensor:
    """The whole tensor in memory of its own."""
    return read_cut(file, extent, tuple(whole(size) for size in extent.shape))


def read_cut(
    file: RegularFile, extent: Extent, cut: tuple[Segments, ...], device: torch.device = CPU
) -> Tensor:
    """The segments of each dimension, concatenated, in memory of their own on `device`.

    Large pieces are read by several threads. Whole rows go where they stay; of rows that are cut
    one block at a time is read and the rest of it thrown away. On a GPU, the last copies may still
    be queued on the current stream. FileChanged if the file was written to meanwhile.
    """
    sizes = tuple(width(segments) for segments in cut)
    if 0 in sizes:
        return torch.empty(sizes, dtype=extent.dtype, device=device)
    if device.type == "cuda" and extent.row_bytes <= BLOCK_BYTES:
        out = torch.empty(sizes, dtype=extent.dtype, device=device)
        read_cut_into(out, file, extent, cut, _pinned_blocks(torch.cuda.current_stream(device)))
        return out
    # NumPy asks for huge pages, which are several times as fast to fill for the first time.
    memory = np.empty(prod(sizes) * extent.dtype.itemsize, np.uint8)
    out = torch.from_numpy(memory).view(extent.dtype).view(sizes)
    read_cut_into(out, file, extent, cut)
    return out.to(device)


def read_cut_into(
    out: Tensor,
    file: RegularFile,
    extent: Extent,
    cut: tuple[Segments, ...],
    through: PinnedBlocks | None = None,
) -> None:
    """As read_cut, into contiguous memory of the cut's shape and the tensor's type.

    through: blocks of BLOCK_BYTES for memory that only a device can write to; None on a CPU. A row
    of the tensor must fit into one.
    """
    if not out.numel():
        return
    if not cut:
        out, extent, cut = out.view(1), Extent(extent.begin, extent.dtype, (1,)), (whole(1),)
    # NumPy has no bfloat16, but bytes are moved as they are.
    words = out.view(_WORDS[extent.dtype.itemsize])
    blocks = list(_blocks(extent, cut[0]))

    def read(block: _Block) -> None:
        target = words[block.target : block.target + block.count]
        if through is None:
            _read_block(target.numpy(), file, extent, cut[1:], block)
            return
        with through.block_for(target) as host:
            _read_block(host.numpy(), file, extent, cut[1:], block)

    if len(blocks) == 1:
        read(blocks[0])
    else:
        for _ in _readers().map(read, blocks):
            pass
    file.check_unchanged()


def _blocks(extent: Extent, rows: Segments) -> Iterator[_Block]:
    most = max(1, BLOCK_BYTES // extent.row_bytes)
    target = 0
    for start, stop in rows:
        for first in range(start, stop, most):
            count = min(most, stop - first)
            yield _Block(first, count, target)
            target += count


def _read_block(
    target: npt.NDArray[np.generic],
    file: RegularFile,
    extent: Extent,
    columns: tuple[Segments, ...],
    block: _Block,
) -> None:
    sizes = extent.shape[1:]
    offset = extent.begin + block.first * extent.row_bytes
    if columns == tuple(whole(size) for size in sizes):
        file.read_into(_as_bytes(target), offset)
        return
    rows = np.empty((block.count, *sizes), target.dtype)
    file.read_into(_as_bytes(rows), offset)
    for places in itertools.product(*map(_places, columns)):
        source, kept = zip(*places, strict=True)
        target[:, *kept] = rows[:, *source]


def _places(segments: Segments) -> list[tuple[slice, slice]]:
    """Where each segment of a dimension lies in the file's tensor, and where in the cut."""
    places, target = [], 0
    for start, stop in segments:
        places.append((slice(start, stop), slice(target, target + stop - start)))
        target += stop - start
    return places


def _as_bytes(array: npt.NDArray[np.generic]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


@cache
def _pinned_blocks(stream: torch.cuda.Stream) -> PinnedBlocks:
    return PinnedBlocks(_PINNED_BLOCKS, BLOCK_BYTES, stream)


@cache
def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1), thread_name_prefix="weights")

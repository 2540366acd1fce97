"""Read tensors by position, from a file directly into the memory that keeps them."""

import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from math import prod
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from configs.reading import RegularFile
from sharding.pinned_blocks import PinnedBlocks
from sharding.slicing import Segments, whole, width

BLOCK_BYTES = 2**24
"""Bytes that one thread reads at once; rows that are cut by columns are first read to as many."""

GAP_BYTES = 2**19
"""Bytes between two pieces that are read too: threads that share an interpreter wait longer for
their turn after each call than such a read takes."""

_READERS = 4
_PINNED_BLOCKS = 6
"""Blocks between file and GPU (96 MiB): one for each reader, and two that are being copied."""

CPU = torch.device("cpu")

Scratch = npt.NDArray[np.uint8]
"""Memory that is used for one read after the other: new memory costs a fault for each page."""

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
    """Read the whole tensor into new memory."""
    return read_cut(file, extent, tuple(whole(size) for size in extent.shape))


class Stacks(NamedTuple):
    """Tensors of one type and shape behind each other, [count, *shape] each; and all numbers.

    flat: those of each type, [numbers], of which the stacks may be views.
    """

    stacks: list[Tensor]
    flat: list[Tensor]


def read_stacks(
    file: RegularFile, stacks: Sequence[Sequence[Extent]], scratch: Scratch | None = None
) -> Stacks:
    """Read whole tensors; those of a stack have one type and shape.

    scratch: bytes that take them, if there are enough; None: new memory.

    What lies one after the other in the file is one call, however it is spread over the stacks: a
    thread waits for the interpreter after each call, and longest where many others read.
    """
    targets: list[tuple[int, memoryview]] = []
    found, flat = dict[int, Tensor](), list[Tensor]()
    left = np.empty(0, np.uint8) if scratch is None else scratch
    # Wide numbers first: so all begin at multiples of their size.
    types = sorted({stack[0].dtype for stack in stacks}, key=lambda each: -each.itemsize)
    for dtype in types:
        own = {i: stack for i, stack in enumerate(stacks) if stack[0].dtype is dtype}
        extents = [extent for stack in own.values() for extent in stack]
        ends = [*itertools.accumulate(extent.nbytes for extent in extents)]
        if ends[-1] > len(left):
            left = np.empty(ends[-1], np.uint8)
        memory, left = left[: ends[-1]].view(f"i{dtype.itemsize}"), left[ends[-1] :]
        flat.append(torch.from_numpy(memory).view(dtype))
        data = _as_bytes(memory)
        starts = zip(extents, itertools.pairwise((0, *ends)), strict=True)
        targets += ((extent.begin, data[first:stop]) for extent, (first, stop) in starts)
        sizes = [len(stack) * prod(stack[0].shape) for stack in own.values()]
        parts = torch.split(flat[-1], sizes)
        for (index, stack), part in zip(own.items(), parts, strict=True):
            found[index] = part.view(len(stack), *stack[0].shape)
    read_pieces(file, targets)
    return Stacks([found[index] for index in range(len(stacks))], flat)


def read_pieces(file: RegularFile, targets: Sequence[tuple[int, memoryview]]) -> None:
    """Read into buffers, each from a byte of the file on; FileChanged if it was written to.

    What lies near each other in the file is one call, and what lies between is read for nothing.
    """
    unwanted = np.empty(GAP_BYTES, np.uint8).data
    for begin, buffers in _near(targets, unwanted):
        file.scatter(buffers, begin)
    file.check_unchanged()


def _near(
    targets: Sequence[tuple[int, memoryview]], unwanted: memoryview
) -> Iterator[tuple[int, list[memoryview]]]:
    """Yield what one call reads: its first byte, and the buffers that take it.

    unwanted: takes all that lies between two targets, if it is as long.
    """
    begin, end, buffers, most = 0, 0, list[memoryview](), len(unwanted)
    for first, buffer in sorted(targets, key=itemgetter(0)):
        between = first - end
        if not buffers or not 0 <= between <= most:
            if buffers:
                yield begin, buffers
            begin, buffers = first, []
        elif between:
            buffers.append(unwanted[:between])
        buffers.append(buffer)
        end = first + len(buffer)
    yield begin, buffers


def read_cut(
    file: RegularFile, extent: Extent, cut: tuple[Segments, ...], device: torch.device = CPU
) -> Tensor:
    """Read the segments of each dimension, concatenated, into new memory on `device`.

    Several threads read large tensors, block by block. Whole rows are read to where they stay;
    rows that are cut by columns are read whole, and the rest is dropped. On a GPU the last copies
    may still be queued on the current stream. FileChanged if the file was written to meanwhile.
    """
    sizes = tuple(width(segments) for segments in cut)
    if 0 in sizes:
        return torch.empty(sizes, dtype=extent.dtype, device=device)
    if device.type == "cuda" and extent.row_bytes <= BLOCK_BYTES:
        out = torch.empty(sizes, dtype=extent.dtype, device=device)
        read_cut_into(out, file, extent, cut, _pinned_blocks(torch.cuda.current_stream(device)))
        return out
    # NumPy requests huge pages: the first write to them is several times as fast.
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
    """Read a cut into contiguous memory of its shape and the tensor's type.

    through: blocks of BLOCK_BYTES if `out` is on a GPU, None on a CPU. A row must fit into a block.
    """
    if not out.numel():
        return
    if not cut:
        out, extent, cut = out.view(1), Extent(extent.begin, extent.dtype, (1,)), (whole(1),)
    # NumPy has no bfloat16; integers of the same width hold the same bytes.
    words = out.view(_WORDS[extent.dtype.itemsize])
    # Whole rows, so that each block goes to one contiguous part of `out`.
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
    # After the last byte: a file that was written to in between may have given a mix.
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
    # A row cut by columns is read whole: one read of a block is faster than one for each row.
    rows = np.empty((block.count, *sizes), target.dtype)
    file.read_into(_as_bytes(rows), offset)
    for ranges in itertools.product(*map(_ranges, columns)):
        source, kept = zip(*ranges, strict=True)
        target[:, *kept] = rows[:, *source]


def _ranges(segments: Segments) -> list[tuple[slice, slice]]:
    """Return each segment's indices in the file's tensor and in the cut."""
    ranges, target = [], 0
    for start, stop in segments:
        ranges.append((slice(start, stop), slice(target, target + stop - start)))
        target += stop - start
    return ranges


def _as_bytes(array: npt.NDArray[np.generic]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


@cache
def _pinned_blocks(stream: torch.cuda.Stream) -> PinnedBlocks:
    return PinnedBlocks(_PINNED_BLOCKS, BLOCK_BYTES, stream)


@cache
def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1), thread_name_prefix="weights")

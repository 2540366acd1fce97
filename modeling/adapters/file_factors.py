"""Factors that go from an adapter's file into the pinned pool without a copy between, for GPUs.

A lies in a file as its pages want it, or each of its rows does where ranks share its columns. B,
[out, r], lies transposed: the pages of a layer take its numbers as the file has them, and the GPU
scales and transposes them when the adapter is loaded.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from modeling.adapters.host_pages import PAGE_ROWS, HostMatrix, HostPage
from modeling.adapters.merge import OpenAdapter
from modeling.adapters.peft.adapter import PeftAdapter, reading
from modeling.adapters.projection import Projection, ProjectionKind
from modeling.adapters.ranges import are_within, ranged_stacks
from sharding.tensor_file import STORED_TYPES

Piece = tuple[str, int, memoryview]
"""A tensor's name, its first byte that is wanted, and the memory that takes it and the next."""

LOAD_BYTES = 2**24
"""Of B's numbers that a load transposes at a time, or those of one layer."""


class FileB(NamedTuple):
    """B of a projection as a file has it: [out, rank] in each layer, without its scaling."""

    rank: int
    scale: float


@dataclass(frozen=True)
class FileFactors:
    """The factors of an adapter that are read from its file into pages.

    dtype: the pools'.
    modules: their paths, by the index of their projection.
    of_b: one rank and scaling for each projection.
    """

    adapter: PeftAdapter
    dtype: torch.dtype
    modules: Mapping[int, Sequence[str]]
    of_b: Mapping[int, FileB]

    def read_into(
        self, pages: Sequence[Sequence[HostPage]], memory: Sequence[Tensor]
    ) -> PeftAdapter:
        """Fill pages, which are zero elsewhere; returns the adapter without what was read.

        pages: of all projections. memory: what holds them all, in few tensors. Refuses values that
        are not finite, or would not be when they are scaled.
        """
        with reading():
            self.adapter.file.read_pieces(self._pieces(pages))
        filled = (matrix for i in self.modules for page in pages[i] for matrix in (page.a, page.bt))
        names = [name for own in self.modules.values() for name in own]
        # Values that stay finite when a load scales them. Each look takes the interpreter from
        # threads that stage others, so few are tried first. Between pages and behind them, the
        # memory holds whatever it held before.
        largest = max(1.0, *(abs(b.scale) for b in self.of_b.values()))
        most = torch.finfo(self.dtype).max / largest
        if not are_within(memory, most) and not are_within(
            (part for matrix in filled for part in matrix.ranges), most
        ):
            for _ in ranged_stacks(self.adapter, self.adapter.projections, self.dtype):
                pass
        return self.adapter.without({*names})

    def _pieces(self, pages: Sequence[Sequence[HostPage]]) -> Iterator[Piece]:
        for index, names in self.modules.items():
            projection, rank = self.adapter.projections[index], self.of_b[index].rank
            ((first, _),) = projection.outputs
            layers = {self.adapter.modules[name].layer: self.adapter.names(name) for name in names}
            a = {layer: keys.a for layer, keys in layers.items()}
            b = {layer: keys.b for layer, keys in layers.items()}
            for number, page in enumerate(pages[index]):
                if projection.cuts_inputs:
                    yield from _row_pieces(page.a, a, rank, number, projection)
                else:
                    yield from _pieces(page.a, a, rank, number, 0)
                yield from _pieces(page.bt, b, rank, number, first * rank)


def find_in_file(adapter: OpenAdapter, dtype: torch.dtype) -> FileFactors | None:
    """Return the factors that lie in the file as the pools want them; None without any.

    dtype: the pools'. Of a projection, this rank's outputs and inputs are one range each, and all
    of its layers have one rank and one scaling.
    """
    if not isinstance(adapter, PeftAdapter) or adapter.is_scaled or adapter.is_biased:
        return None
    modules: dict[int, list[str]] = {}
    for name, position in adapter.modules.items():
        modules.setdefault(position.projection, []).append(name)
    of_b = {}
    for index, names in modules.items():
        kinds = {FileB(adapter.plan.rank_of(name), adapter.plan.scaling_of(name)) for name in names}
        if (
            len(kinds) == 1
            and _is_cut_once(adapter.projections[index])
            and all(_lies_plain(adapter, name, dtype) for name in names)
        ):
            of_b[index] = kinds.pop()
    if not of_b:
        return None
    return FileFactors(adapter, dtype, {index: modules[index] for index in of_b}, of_b)


class FileBLoads:
    """Transposes and scales B of staged adapters on the device; one load after the other."""

    def __init__(
        self,
        projections: Sequence[Projection],
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate the memory of a load: twice LOAD_BYTES, or two layers' pages."""
        pages = -(-max_rank // PAGE_ROWS)
        linear = [p.local_outputs for p in projections if p.kind is ProjectionKind.LINEAR]
        size = max(LOAD_BYTES // dtype.itemsize, pages * PAGE_ROWS * max(linear, default=0))
        # One memory for all: loads follow each other on their stream.
        self._memory = torch.empty(2, size if linear else 0, dtype=dtype, device=device)

    def load(self, b: FileB, pages: Sequence[HostMatrix], pool: Sequence[Tensor]) -> None:
        """Queue copies of B from host pages to those of a pool, [layers, 8, width] each."""
        num_layers, _, width = pool[0].shape
        own = PAGE_ROWS * width
        step = self._memory.shape[1] // (len(pages) * own)
        for first in range(0, num_layers, step):
            count = min(step, num_layers - first)
            size = (len(pages), count, own)
            read, joined = (part[: size[0] * size[1] * own] for part in self._memory)
            for page, part in zip(pages, read.view(size), strict=True):
                page.copy_to(part.view(-1, width), first * PAGE_ROWS)
            joined.view(count, len(pages), own).copy_(read.view(size).transpose(0, 1))
            rows = joined.view(count, -1)[:, : b.rank * width].view(count, width, b.rank)
            if b.scale != 1.0:
                rows.mul_(b.scale)
            for number, target in enumerate(pool):
                layers = target if count == num_layers else target[first : first + count]
                columns = rows[..., number * PAGE_ROWS : (number + 1) * PAGE_ROWS]
                filled = columns.shape[2]
                if filled < PAGE_ROWS:
                    layers[:, filled:].zero_()
                    layers = layers[:, :filled]
                layers.copy_(columns.transpose(1, 2))


def _is_cut_once(projection: Projection) -> bool:
    """Return whether this rank's columns of A, and its rows of B, follow each other."""
    return (
        projection.kind is ProjectionKind.LINEAR
        and len(projection.inputs) == 1
        and len(projection.outputs) == 1
        and projection.local_inputs > 0
        and projection.local_outputs > 0
    )


def _lies_plain(adapter: PeftAdapter, name: str, dtype: torch.dtype) -> bool:
    """Return whether a module's tensors are A and B in the pools' type."""
    keys = adapter.names(name)
    if keys.flipped or keys.part is not None:
        return False
    return all(STORED_TYPES.get(adapter.file.dtype(key)) is dtype for key in (keys.a, keys.b))


def _pieces(
    matrix: HostMatrix, keys: Mapping[int, str], rank: int, number: int, begin: int
) -> Iterator[Piece]:
    """Yield what fills the number-th page of a projection.

    keys: of tensors, by their layer. begin: the first of a tensor's numbers that is this rank's.
    """
    memory, row_bytes = matrix.data, matrix.row_bytes
    per_number = matrix.ranges[0].itemsize
    done = number * PAGE_ROWS * row_bytes
    for layer, key in keys.items():
        row = layer * PAGE_ROWS
        left = min(PAGE_ROWS * row_bytes, rank * row_bytes - done)
        at = begin * per_number + done
        part = bisect_right(matrix.firsts, row) - 1
        start = (row - matrix.firsts[part]) * row_bytes
        while left > 0:  # The page of a layer may lie in several pieces of the pool.
            target = memory[part][start : start + left]
            yield key, at, target
            at, left = at + len(target), left - len(target)
            part, start = part + 1, 0


def _row_pieces(
    matrix: HostMatrix, keys: Mapping[int, str], rank: int, number: int, projection: Projection
) -> Iterator[Piece]:
    """Yield what fills the number-th page of A, of which this rank has some columns."""
    memory, ((first, _),) = matrix.data, projection.inputs
    per_number, width = matrix.ranges[0].itemsize, projection.in_features
    row_bytes = matrix.row_bytes
    count, stride = min(PAGE_ROWS, rank - number * PAGE_ROWS), width * per_number
    begin = number * PAGE_ROWS * stride + first * per_number
    for layer, key in keys.items():
        for row in range(count):
            target = layer * PAGE_ROWS + row
            part = bisect_right(matrix.firsts, target) - 1
            start = (target - matrix.firsts[part]) * row_bytes
            yield key, begin + row * stride, memory[part][start : start + row_bytes]

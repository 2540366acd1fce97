"""HostAdapterCache: a rank's staged adapters in the pinned pool, laid out as the device's pools.

A page of a projection has two matrices, A and Bt, each [layers * 8, width]. An adapter's matrices
follow each other through its pieces of the pool in whole rows. So a matrix is one contiguous row
range, or one for each piece that it crosses; each row range is one copy to the device. B that is
read from its file directly (`file_factors.py`) lies otherwise in the same pages.
"""

import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from configs.wire.adapters import (
    AdapterDeferred,
    AdapterError,
    AdapterKey,
    AdapterRefusal,
    AdapterShape,
    FetchedAdapter,
)
from modeling.adapters.chunk_layout import ChunkLayout, RowRange, lay_out
from modeling.adapters.expert_pages import ExpertPages
from modeling.adapters.file_factors import FileB, find_in_file
from modeling.adapters.host_pages import PAGE_ROWS, HostMatrix, HostPage, write_row
from modeling.adapters.merge import OpenAdapter, open_fetched
from modeling.adapters.output_rows import OutputRows, added_bias, output_rows, page_counts
from modeling.adapters.peft.adapter import PART_BYTES
from modeling.adapters.peft.recipes import Recipes
from modeling.adapters.pinned_pool import PinnedPool
from modeling.adapters.pool_sizes import chunk_size
from modeling.adapters.projection import (
    BaseLinear,
    BaseRows,
    ModulePosition,
    Projection,
    ProjectionKind,
    select_columns,
)
from modeling.adapters.ranges import ranged_matrices, ranged_stacks, rounded
from modeling.adapters.row_norms import RowNorms, SummedRows
from modeling.adapters.stacks import LoraStack
from modeling.transfer import DeviceEvent
from sharding.extents import Scratch
from sources.files import fingerprint

_SETTINGS = {
    ProjectionKind.EMBEDDING: "vocabulary_pages",
    ProjectionKind.HEAD: "vocabulary_pages",
    ProjectionKind.WHOLE_LINEAR: "whole_linears",
    ProjectionKind.DRAFT_HEADS: "draft_heads",
    ProjectionKind.EXPERTS: "expert_pages",
}
"""Which setting gives a pool its pages, where that is not device_pages."""

_KEPT_BYTES = 31 * 2**20
"""A block of it has glibc keep up to 62 MiB of freed memory; blocks over 32 MiB have no effect."""


@dataclass(frozen=True)
class StagedAdapter:
    """An adapter in host memory.

    pages: for each projection; those of a map of experts are as one.
    ranks: the true ones, int32 [projections, layers]; 0 where a layer is not adapted.
    chunks: of the pinned pool, in pieces.
    shape: pages and bytes, as the driver counts them.
    output_rows: for each projection, rows of Bt behind all LoRA rank rows.
    experts: pages of maps of experts, by their projection.
    file_b: the projections with Bt's pages that hold B as it lies in the file.
    """

    pages: tuple[tuple[HostPage, ...], ...]
    ranks: Tensor
    chunks: list[range]
    shape: AdapterShape
    output_rows: tuple[OutputRows, ...]
    experts: Mapping[int, ExpertPages] = field(default_factory=dict)
    file_b: Mapping[int, FileB] = field(default_factory=dict)


@dataclass(frozen=True)
class HostCacheSize:
    """Limits of staged adapters.

    pages: pages of each projection's pool on the device.
    max_rank: the largest rank that is served.
    host_bytes: bytes of the pinned pool.
    """

    pages: tuple[int, ...]
    max_rank: int
    host_bytes: int


class HostAdapterCache:
    """Staged adapters of one rank; several threads may stage, beside steps and loads."""

    def __init__(
        self,
        projections: Sequence[Projection],
        size: HostCacheSize,
        dtype: torch.dtype,
        pinned: bool,
        base: Mapping[str, BaseRows] = MappingProxyType({}),
        base_linears: Mapping[ModulePosition, BaseLinear] = MappingProxyType({}),
        direct_reads: bool | None = None,
    ) -> None:
        """Allocate the pool.

        pinned: for copies to a CUDA device. base: as in `open_adapter`. base_linears: as in
        `RowNorms`. direct_reads: read plain factors from files to where they stay, and leave it to
        loads to transpose B; None: as `pinned`.
        """
        _keep_freed_memory()
        self._base = base
        self._base_linears = base_linears
        self._norms = RowNorms(projections, base_linears)
        self._recipes = Recipes()
        self._own = threading.local()
        self._projections = tuple(projections)
        self._size = size
        self._dtype = dtype
        self.direct_reads = pinned if direct_reads is None else direct_reads
        self._num_rank_pools = max((p.num_ranked for p in self._projections), default=0)
        chunk_bytes = chunk_size(self._projections, dtype)
        self.pool = PinnedPool(size.host_bytes // chunk_bytes, chunk_bytes, pinned)
        self._staged: dict[AdapterKey, StagedAdapter] = {}
        # Reads that may still be kept, each an object of its own. A drop removes them all, so a
        # read that began before it is discarded even if the adapter is staged anew meanwhile.
        self._reads: dict[AdapterKey, list[object]] = {}
        self._lock = threading.Lock()

    @property
    def capacity_bytes(self) -> int:
        """Return the bytes of the pinned pool."""
        return self.pool.num_chunks * self.pool.chunk_bytes

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the pinned pool that are taken."""
        return self.pool.num_taken * self.pool.chunk_bytes

    def stage(self, adapter: FetchedAdapter) -> AdapterShape:
        """Read, check and cut an adapter, and keep it until `drop`.

        Raises AdapterError when it cannot be served exactly or can never fit, AdapterDeferred
        when the pool has no room for it now, AdapterNeedsSums when ranks must add norms first.
        """
        read = object()
        with self._lock:
            staged = self._staged.get(adapter.key)
            if staged is not None:
                return staged.shape
            self._reads.setdefault(adapter.key, []).append(read)
        try:
            staged = self._read(adapter)
        except BaseException:
            with self._lock:
                self._end_read(adapter.key, read)
            raise
        return self._keep(adapter, read, staged)

    def find(self, key: AdapterKey) -> StagedAdapter:
        """Return a staged adapter."""
        with self._lock:
            staged = self._staged.get(key)
        assert staged is not None, f"adapter {key} is loaded but was never staged"
        return staged

    def drop(self, key: AdapterKey, after: DeviceEvent | None = None) -> None:
        """Remove an adapter, staged or being read; its memory is free once `after` has passed."""
        with self._lock:
            staged = self._staged.pop(key, None)
            self._reads.pop(key, None)
        if staged is not None:
            self.pool.free(staged.chunks, after)

    def check(self) -> None:
        """Assert that the pool holds the staged adapters alone; not while one is read."""
        with self._lock:
            chunks = [piece for staged in self._staged.values() for piece in staged.chunks]
            assert not self._reads, self._reads
        self.pool.check(chunks)

    def _keep(self, adapter: FetchedAdapter, read: object, staged: StagedAdapter) -> AdapterShape:
        """Keep an adapter, unless it was dropped or another thread staged it meanwhile."""
        with self._lock:
            first = self._staged.get(adapter.key)
            wanted = self._end_read(adapter.key, read)
            if first is None and wanted:
                self._staged[adapter.key] = staged
                return staged.shape
        self.pool.free(staged.chunks)
        if first is not None:
            return first.shape
        raise AdapterError(
            AdapterRefusal.UNAVAILABLE, f"adapter {adapter.name!r} was dropped while it was read"
        )

    def _end_read(self, key: AdapterKey, read: object) -> bool:
        """Record the end of a thread's read; returns False if the adapter was dropped meanwhile.

        The caller holds the lock.
        """
        reads = self._reads.get(key, [])
        wanted = read in reads
        if wanted:
            reads.remove(read)
        if not reads:
            self._reads.pop(key, None)
        return wanted

    def _read(self, adapter: FetchedAdapter) -> StagedAdapter:
        most = self._size.max_rank
        opened = open_fetched(adapter, self._projections, most, self._base, self._recipes)
        numbers = [[0] * self._num_rank_pools for _ in self._projections]
        for position, rank in opened.ranks.items():
            numbers[position.projection][position.layer] = rank
        ranks = torch.tensor(numbers, dtype=torch.int32)
        largest: list[int] = ranks.amax(1).tolist()
        rows = output_rows(self._projections, largest, opened.is_scaled, opened.is_biased)
        # Checked before memory is allocated: shapes come from the header, so refusing is cheap.
        num_pages = page_counts(largest, rows, opened.expert_pages)
        num_chunks = self._layout(num_pages, itertools.repeat(1)).num_pieces
        shape = AdapterShape(num_pages, num_chunks * self.pool.chunk_bytes)
        self._check_fits(shape)
        if opened.is_scaled and not adapter.row_sums:
            self._norms.check_sums(opened.stacks())
        chunks = self.pool.allocate(num_chunks)
        if chunks is None:
            raise AdapterDeferred(shape)
        try:
            pages = self._pages(num_pages, chunks)
            self._zero(pages, numbers)
            factors = find_in_file(opened, self._dtype) if self.direct_reads else None
            if factors is not None:
                opened = factors.read_into(pages, self.pool.numbers(chunks, self._dtype))
            self._write(opened, pages, rows, SummedRows(adapter.row_sums))
            # After the last read, so that no later write can have been missed.
            _check_unchanged(adapter)
        except BaseException:
            self.pool.free(chunks)
            raise
        file_b = {} if factors is None else factors.of_b
        return StagedAdapter(pages, ranks, chunks, shape, rows, opened.expert_pages, file_b)

    def _check_fits(self, shape: AdapterShape) -> None:
        """Refuse an adapter that would not fit into empty pools."""
        needs = zip(self._projections, shape.num_pages, self._size.pages, strict=True)
        for projection, count, most in needs:
            if count > most:
                setting = _SETTINGS.get(projection.kind, "device_pages")
                if projection.experts:
                    setting += f" to {-(-count // projection.experts.most)}"
                raise AdapterError(
                    AdapterRefusal.TOO_LARGE,
                    f"the adapter needs {count} pages of {projection.name}, this server's pool "
                    f"has {most}: raise adapters.{setting}, or train with a smaller r",
                )
        if shape.host_bytes > self.capacity_bytes:
            raise AdapterError(
                AdapterRefusal.TOO_LARGE,
                f"the adapter takes {shape.host_bytes} bytes on this rank, the host tier has "
                f"{self.capacity_bytes}: raise adapters.host_bytes",
            )

    def _layout(self, num_pages: Sequence[int], pieces: Iterable[int]) -> ChunkLayout:
        """Lay out an adapter's pages; pieces: how many chunks each has."""
        matrices = []
        for projection, count in zip(self._projections, num_pages, strict=True):
            pages, rows = _host_pages(projection, count)
            matrices += [(rows, projection.local_inputs), (rows, projection.local_outputs)] * pages
        chunk = self.pool.chunk_bytes // self._dtype.itemsize
        return lay_out(matrices, (count * chunk for count in pieces))

    def _pages(
        self, num_pages: Sequence[int], chunks: Sequence[range]
    ) -> tuple[tuple[HostPage, ...], ...]:
        layout = self._layout(num_pages, map(len, chunks))
        matrices = (self._matrix(ranges, chunks) for ranges in layout.matrices)
        return tuple(
            tuple(
                HostPage(next(matrices), next(matrices)) for _ in range(_host_pages(own, count)[0])
            )
            for own, count in zip(self._projections, num_pages, strict=True)
        )

    def _matrix(self, ranges: Sequence[RowRange], chunks: Sequence[range]) -> HostMatrix:
        size, rows = self._dtype.itemsize, [part.shape[0] for part in ranges]
        views = [(chunks[part.piece], part.offset * size, part.shape) for part in ranges]
        return HostMatrix(
            tuple(self.pool.rows(*view, self._dtype) for view in views),
            (0, *itertools.accumulate(rows))[: len(rows)],
            tuple(self.pool.data(piece, at, prod(shape) * size) for piece, at, shape in views),
        )

    def _zero(self, pages: Sequence[Sequence[HostPage]], ranks: Sequence[Sequence[int]]) -> None:
        """Set to zero what no module may write: other layers, rows beyond a true rank."""
        for projection, own, of_layers in zip(self._projections, pages, ranks, strict=True):
            full = len(own) * PAGE_ROWS
            is_linear = projection.kind is ProjectionKind.LINEAR
            if is_linear and min(of_layers[: projection.num_ranked]) == full:
                continue  # All of its rows are written.
            for matrix in (matrix for page in own for matrix in (page.a, page.bt)):
                matrix.zero()

    def _write(
        self,
        adapter: OpenAdapter,
        pages: tuple[tuple[HostPage, ...], ...],
        output_rows: Sequence[OutputRows],
        sums: SummedRows,
    ) -> None:
        """Read an adapter's modules into its pages, cut to this rank."""
        for stack in ranged_stacks(adapter, self._projections, self._dtype, self._scratch()):
            index, experts = stack.projection, adapter.expert_pages.get(stack.projection)
            self._write_stack(stack, pages[index], output_rows[index], sums, experts)
        for matrix in ranged_matrices(adapter, self._projections, self._dtype):
            index = matrix.position.projection
            parts = torch.split(matrix.rows, self._projections[index].num_layers * PAGE_ROWS)
            for page, part in zip(pages[index], parts, strict=True):
                page.a.write(matrix.first * PAGE_ROWS, part)

    def _scratch(self) -> Scratch:
        """Return this thread's memory for the factors that it reads."""
        found: Scratch | None = getattr(self._own, "scratch", None)
        if found is None or len(found) != PART_BYTES:
            # NumPy requests huge pages; pages that are not used take no memory.
            found = self._own.scratch = np.empty(PART_BYTES, np.uint8)
        return found

    def _write_stack(
        self,
        stack: LoraStack,
        pages: Sequence[HostPage],
        behind: OutputRows,
        sums: SummedRows,
        experts: ExpertPages | None,
    ) -> None:
        """Write a stack into the pages of its projection; behind: its rows behind LoRA's."""
        projection = self._projections[stack.projection]
        a = select_columns(stack.a, projection.inputs).to(self._dtype)
        changes = None
        if stack.magnitudes is None:
            # Rounded before it is cut and transposed, which the copies to the pages do alone.
            bt = select_columns(stack.scaled_b(self._dtype).transpose(1, 2), projection.outputs)
        else:
            scales = self._norms.scales(stack, sums)
            bt = select_columns(stack.b.transpose(1, 2), projection.outputs)
            # y = c (W x) + c (B A x): B takes the scale here, W x when it is computed. c is near 1:
            # less 1, half precision keeps more of it.
            bt = rounded(projection.name, bt * scales.unsqueeze(1), self._dtype)
            changes = rounded(projection.name, scales - 1, self._dtype)
        if experts is not None:
            experts.write(pages[0], projection, stack.layers, a, bt)
            return
        for index in range(-(-a.shape[1] // PAGE_ROWS)):
            rows = slice(index * PAGE_ROWS, (index + 1) * PAGE_ROWS)
            pages[index].a.write_layers(stack.layers, a[:, rows])
            pages[index].bt.write_layers(stack.layers, bt[:, rows])
        if changes is not None:
            write_row(pages, behind.scale, stack.layers, changes)
        if behind.bias >= 0:
            added = added_bias(stack, projection, self._base_linears, changes)
            write_row(pages, behind.bias, stack.layers, added)


def _host_pages(projection: Projection, num_pages: int) -> tuple[int, int]:
    """Return how many pages there are in host memory, and the rows of each."""
    rows = projection.page_layers * PAGE_ROWS
    is_one = projection.kind is ProjectionKind.EXPERTS
    return (min(num_pages, 1), num_pages * rows) if is_one else (num_pages, rows)


def _keep_freed_memory() -> None:
    """Have glibc keep what a stack's tensors freed for those of the next one.

    By default it gives it back to the system, and each stack pays for new pages, which may be half
    of its time. It keeps twice as much as the largest block that was freed (mallopt(3),
    M_MMAP_THRESHOLD).
    """
    torch.empty(_KEPT_BYTES, dtype=torch.uint8)


def _check_unchanged(adapter: FetchedAdapter) -> None:
    """Refuse files that changed since their digest was computed."""
    for member in adapter.members:
        if member.fingerprint and fingerprint(Path(member.folder)) != member.fingerprint:
            raise AdapterError(
                AdapterRefusal.UNAVAILABLE,
                f"adapter {member.name!r} changed while it was read: try again",
            )

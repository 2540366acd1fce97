"""HostCopies: a rank's staged adapters, in the arena, laid out as the device's pools are.

A page of a projection has two halves, A and Bt, and lies in the pool as [layers * 8, width].
An adapter's halves follow each other through its chunks in whole rows, so a half is one run of
memory, or one for each chunk that it crosses; each run is one copy to the device.
"""

import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType

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
from modeling.adapters.merge import OpenAdapter, open_fetched
from modeling.adapters.pinned_pool import PinnedPool
from modeling.adapters.projection import BaseRows, Projection, Segments
from modeling.transfer import DeviceEvent, aligned
from sources.files import fingerprint

PAGE_ROWS = 8

MAX_CHUNK_BYTES = 2**20
CHUNKS_OF_PAGE = 16
"""A page in every pool fills this many chunks at least, so that small models waste little."""


@dataclass(frozen=True)
class HostMatrix:
    """A or Bt of one page on the host: [rows, width] in runs that follow each other."""

    ranges: tuple[Tensor, ...]
    firsts: tuple[int, ...]

    def write(self, first: int, rows: Tensor) -> None:
        """Write rows [n, width] from row `first` on, in the pools' type."""
        index, done = bisect_right(self.firsts, first) - 1, 0
        while self.ranges and done < len(rows):  # A rank without token ids has no runs.
            run, start = self.ranges[index], first + done - self.firsts[index]
            count = min(len(run) - start, len(rows) - done)
            run[start : start + count].copy_(rows[done : done + count])
            done += count
            index += 1

    def write_layers(self, layers: Sequence[int], rows: Tensor) -> None:
        """Write the rows of several layers, [layers, n, width], n up to a page's; the rest are 0.

        Layers that follow each other are one piece.
        """
        num_layers, count, width = rows.shape
        if tuple(layers) == tuple(range(layers[0], layers[0] + num_layers)):
            if count < PAGE_ROWS:
                padded = rows.new_zeros(num_layers, PAGE_ROWS, width)
                padded[:, :count] = rows
                rows = padded
            self.write(layers[0] * PAGE_ROWS, rows.flatten(0, 1))
        else:
            for layer, own in zip(layers, rows, strict=True):
                self.write(layer * PAGE_ROWS, own)

    def copy_to(self, page: Tensor) -> None:
        """Copy all rows to a page of a pool, [rows, width], behind the current stream."""
        for first, run in zip(self.firsts, self.ranges, strict=True):
            page[first : first + len(run)].copy_(run, non_blocking=True)


@dataclass(frozen=True)
class HostPage:
    """One page of a projection."""

    a: HostMatrix
    bt: HostMatrix


@dataclass(frozen=True)
class StagedAdapter:
    """An adapter in host memory: its pages for each projection, and the true ranks.

    ranks: int32 [projections, layers]; 0 where a place is not adapted.
    """

    pages: tuple[tuple[HostPage, ...], ...]
    ranks: Tensor
    chunks: list[int]
    shape: AdapterShape


@dataclass(frozen=True)
class HostCacheSize:
    """What copies may take: pages of each projection, the largest rank, bytes of the arena."""

    pages: tuple[int, ...]
    max_rank: int
    host_bytes: int


class HostAdapterCache:
    """The host tier of one rank; `stage` may run on several threads, beside steps and fills."""

    def __init__(
        self,
        projections: Sequence[Projection],
        size: HostCacheSize,
        dtype: torch.dtype,
        pinned: bool,
        base: Mapping[str, BaseRows] = MappingProxyType({}),
    ) -> None:
        """Take the arena; pinned: for copies to a CUDA device. base: as in `open_adapter`."""
        self._base = base
        self._projections = tuple(projections)
        self._size = size
        self._dtype = dtype
        self._num_rank_pools = max((p.num_ranked for p in self._projections), default=0)
        chunk_bytes = chunk_size(self._projections, dtype)
        self.pool = PinnedPool(size.host_bytes // chunk_bytes, chunk_bytes, pinned)
        self._staged: dict[AdapterKey, StagedAdapter] = {}
        self._reads: dict[AdapterKey, list[object]] = {}
        self._lock = threading.Lock()

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the arena."""
        return self.pool.num_chunks * self.pool.chunk_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the arena that are taken."""
        return self.pool.num_taken * self.pool.chunk_bytes

    def stage(self, adapter: FetchedAdapter) -> AdapterShape:
        """Read, judge and cut an adapter, and keep it until `drop`.

        Raises AdapterError when it cannot be served exactly or can never fit, AdapterDeferred
        when the arena has no room for it now.
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
            self._end(adapter.key, read)
            raise
        return self._keep(adapter, read, staged)

    def find(self, key: AdapterKey) -> StagedAdapter:
        """Return a staged adapter."""
        with self._lock:
            staged = self._staged.get(key)
        assert staged is not None, f"adapter {key} is placed but was never staged"
        return staged

    def drop(self, key: AdapterKey, after: DeviceEvent | None = None) -> None:
        """Forget an adapter, staged or being read; its memory is free once `after` has passed."""
        with self._lock:
            staged = self._staged.pop(key, None)
            self._reads.pop(key, None)
        if staged is not None:
            self.pool.free(staged.chunks, after)

    def check(self) -> None:
        """Assert that the arena holds the staged adapters alone; not while one is read."""
        with self._lock:
            chunks = [chunk for staged in self._staged.values() for chunk in staged.chunks]
            assert not self._reads, self._reads
        self.pool.check(chunks)

    def _keep(self, adapter: FetchedAdapter, read: object, staged: StagedAdapter) -> AdapterShape:
        """Keep what was read, unless it was dropped or read by another thread meanwhile."""
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

    def _end(self, key: AdapterKey, read: object) -> None:
        with self._lock:
            self._end_read(key, read)

    def _end_read(self, key: AdapterKey, read: object) -> bool:
        """Forget that a thread reads an adapter; whether it is still wanted."""
        reads = self._reads.get(key, [])
        wanted = read in reads
        if wanted:
            reads.remove(read)
        if not reads:
            self._reads.pop(key, None)
        return wanted

    def _read(self, adapter: FetchedAdapter) -> StagedAdapter:
        opened = open_fetched(adapter, self._projections, self._size.max_rank, self._base)
        ranks = torch.zeros(len(self._projections), self._num_rank_pools, dtype=torch.int32)
        for place, rank in opened.ranks.items():
            ranks[place.projection, place.layer] = rank
        num_pages = tuple(-(-int(row.max()) // PAGE_ROWS) for row in ranks)
        layout = self._layout(num_pages)
        shape = AdapterShape(num_pages, layout.num_chunks * self.pool.chunk_bytes)
        self._check_fits(shape)
        chunks = self.pool.allocate(layout.num_chunks)
        if chunks is None:
            raise AdapterDeferred(shape)
        try:
            self.pool.zero(chunks)
            pages = self._pages(layout, num_pages, chunks)
            self._write(opened, pages)
            _check_unchanged(adapter)
        except BaseException:
            self.pool.free(chunks)
            raise
        return StagedAdapter(pages, ranks, chunks, shape)

    def _check_fits(self, shape: AdapterShape) -> None:
        """Refuse what no amount of eviction could ever place."""
        needs = zip(self._projections, shape.num_pages, self._size.pages, strict=True)
        for projection, count, most in needs:
            if count > most:
                raise AdapterError(
                    AdapterRefusal.TOO_LARGE,
                    f"the adapter needs {count} pages of {projection.name}, this server's pool "
                    f"has {most}: raise adapters.device_pages, or train with a smaller r",
                )
        if shape.host_bytes > self.capacity_bytes:
            raise AdapterError(
                AdapterRefusal.TOO_LARGE,
                f"the adapter takes {shape.host_bytes} bytes on this rank, the host tier has "
                f"{self.capacity_bytes}: raise adapters.host_bytes",
            )

    def _layout(self, num_pages: Sequence[int]) -> "ChunkLayout":
        halves = []
        for projection, count in zip(self._projections, num_pages, strict=True):
            rows = projection.num_layers * PAGE_ROWS
            widths = (projection.local_inputs, projection.local_outputs)
            halves += [(rows, width) for width in widths] * count
        return lay_out(halves, self.pool.chunk_bytes // self._dtype.itemsize)

    def _pages(
        self, layout: "ChunkLayout", num_pages: Sequence[int], chunks: Sequence[int]
    ) -> tuple[tuple[HostPage, ...], ...]:
        halves = self._matrices(layout, chunks)
        return tuple(
            tuple(HostPage(next(halves), next(halves)) for _ in range(count)) for count in num_pages
        )

    def _matrices(self, layout: "ChunkLayout", chunks: Sequence[int]) -> Iterator[HostMatrix]:
        size = self._dtype.itemsize
        for runs in layout.matrices:
            views = tuple(
                self.pool.rows(chunks[run.chunk], run.offset * size, run.shape, self._dtype)
                for run in runs
            )
            yield HostMatrix(views, (0, *accumulate(len(view) for view in views))[: len(views)])

    def _write(self, adapter: OpenAdapter, pages: tuple[tuple[HostPage, ...], ...]) -> None:
        """Read an adapter's modules into zeroed pages, cut to this rank."""
        for stack in adapter.stacks():
            projection, own = self._projections[stack.projection], pages[stack.projection]
            a = take(stack.a, projection.inputs).to(self._dtype)
            bt = take(stack.b.transpose(1, 2), projection.outputs).to(self._dtype)
            for index in range(-(-a.shape[1] // PAGE_ROWS)):
                rows = slice(index * PAGE_ROWS, (index + 1) * PAGE_ROWS)
                own[index].a.write_layers(stack.layers, a[:, rows])
                own[index].bt.write_layers(stack.layers, bt[:, rows])
        for matrix in adapter.read_matrices():
            pages[matrix.place.projection][0].a.write(0, matrix.rows)


@dataclass(frozen=True)
class RowRange:
    """Rows [n, width] of one half in one chunk; chunk counts the adapter's own, offset elements."""

    chunk: int
    offset: int
    shape: tuple[int, int]


@dataclass(frozen=True)
class ChunkLayout:
    """Where an adapter's halves lie in its chunks."""

    matrices: tuple[tuple[RowRange, ...], ...]
    num_chunks: int


def lay_out(halves: Sequence[tuple[int, int]], chunk: int) -> ChunkLayout:
    """Let halves of (rows, width) follow each other in chunks of `chunk` elements, row by row."""
    laid = []
    index, offset = 0, 0
    for rows, width in halves:
        assert width <= chunk, (width, chunk)
        runs = []
        while rows and width:
            count = min(rows, (chunk - offset) // width)
            if count:
                runs.append(RowRange(index, offset, (count, width)))
            rows -= count
            offset += count * width
            if rows:
                index, offset = index + 1, 0
        laid.append(tuple(runs))
    return ChunkLayout(tuple(laid), index + 1 if offset else index)


def chunk_size(projections: Sequence[Projection], dtype: torch.dtype) -> int:
    """Bytes of a chunk: a small part of a page in every pool, and the widest row at least."""
    widest = max((max(p.local_inputs, p.local_outputs) for p in projections), default=0)
    part = min(MAX_CHUNK_BYTES, page_bytes(projections, dtype) // CHUNKS_OF_PAGE)
    return max(aligned(max(part, widest * dtype.itemsize)), aligned(1))


def _check_unchanged(adapter: FetchedAdapter) -> None:
    """Refuse files that are not those that were digested."""
    for member in adapter.members:
        if member.fingerprint and fingerprint(Path(member.folder)) != member.fingerprint:
            raise AdapterError(
                AdapterRefusal.UNAVAILABLE,
                f"adapter {member.name!r} changed while it was read: try again",
            )


def take(rows: Tensor, segments: Segments) -> Tensor:
    """Keep the columns of `segments`, in their order: [..., whole] to [..., local]."""
    if len(segments) == 1:
        ((start, stop),) = segments
        return rows[..., start:stop]
    return torch.cat([rows[..., start:stop] for start, stop in segments], dim=-1)


def page_bytes(projections: Sequence[Projection], dtype: torch.dtype) -> int:
    """Bytes of one page in every pool of factors: the unit in which those are sized."""
    factors = [p for p in projections if not p.kind.whole]
    widths = sum(p.num_layers * (p.local_inputs + p.local_outputs) for p in factors)
    return PAGE_ROWS * dtype.itemsize * widths


def copy_bytes(projections: Sequence[Projection], dtype: torch.dtype) -> int:
    """Bytes of one page in every pool of whole matrices."""
    whole = [p for p in projections if p.kind.whole]
    return PAGE_ROWS * dtype.itemsize * sum(p.num_layers * p.local_inputs for p in whole)

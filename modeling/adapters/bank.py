"""The bank: where adapters' rank rows lie, on the host as staged and on the device as placed."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from configs.adapters import AdapterError, AdapterKey, AdapterRefusal, AdapterShape, FetchedAdapter
from modeling.adapters.peft import PeftAdapter, open_adapter
from modeling.adapters.projection import Projection, Segments
from modeling.transfer import to_device
from sharding.sources import fingerprint

PAGE_ROWS = 8


@dataclass(frozen=True)
class BankSize:
    """What a bank holds: pages in each projection's pool, slots, the largest rank, host bytes."""

    pages: int
    slots: int
    max_rank: int
    host_bytes: int


@dataclass(frozen=True)
class Pool:
    """One projection's rank rows: a [pages, layers, 8, in], bt [pages, layers, 8, out].

    The widths are this rank's own slices. The same layout holds a staged adapter on the host.
    """

    a: Tensor
    bt: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of both halves."""
        return self.a.nbytes + self.bt.nbytes


@dataclass(frozen=True)
class StagedAdapter:
    """An adapter in host memory: one pool-shaped piece and the true ranks for each projection.

    ranks: int32 [projections, layers]; 0 where a place is not adapted.
    """

    pieces: tuple[Pool, ...]
    ranks: Tensor

    @property
    def shape(self) -> AdapterShape:
        """What it takes."""
        return AdapterShape(
            num_pages=tuple(piece.a.shape[0] for piece in self.pieces),
            host_bytes=sum(piece.nbytes for piece in self.pieces),
        )


@dataclass(frozen=True)
class Factors:
    """Both factors at one place, ready to multiply: a [in, rank], bt [rank, out]."""

    a: Tensor
    bt: Tensor


class Placement:
    """An adapter on the device: the pages it was given, and its true ranks."""

    def __init__(self, pools: tuple[Pool, ...], pages: list[list[int]], ranks: Tensor) -> None:
        """Remember the tables; `ranks` as in StagedAdapter."""
        self._pools = pools
        self._pages = pages
        self._ranks: list[list[int]] = ranks.tolist()
        self._views: dict[tuple[int, int], Factors] = {}

    def rank(self, projection: int, layer: int) -> int:
        """Return the true rank at a place; 0 where it is not adapted."""
        return self._ranks[projection][layer]

    def factors(self, projection: int, layer: int) -> Factors:
        """Return the first `rank` rows of both factors, through the page table.

        Up to one page they are views of the pool, made once a placement; above, a gather.
        """
        view = self._views.get((projection, layer))
        if view is not None:
            return view
        pool, pages = self._pools[projection], self._pages[projection]
        rank = self.rank(projection, layer)
        pages = pages[: -(-rank // PAGE_ROWS)]
        rows_a = _rows(pool.a, pages, layer)[:rank]
        rows_bt = _rows(pool.bt, pages, layer)[:rank]
        factors = Factors(rows_a.t(), rows_bt)
        if len(pages) == 1:
            self._views[projection, layer] = factors
        return factors


def _rows(pool: Tensor, pages: list[int], layer: int) -> Tensor:
    """Return the rows of some pages at a layer: [8 * pages, width]; a view for one page."""
    first, count = pages[0], len(pages)
    if count == 1:
        return pool[first, layer]
    if pages == list(range(first, first + count)):
        return pool[first : first + count, layer].reshape(count * PAGE_ROWS, -1)
    return torch.cat([pool[page, layer] for page in pages])


class AdapterBank:
    """Device pools, page tables and the host tier of one rank.

    `stage` may run on any thread, beside steps; `place` belongs to the thread that runs steps,
    for it writes what kernels read, in the order of the plans.

    page_table: int32 [slots, projections, pages of max_rank], ranks: int32 [slots, projections,
    layers], both on the device at addresses that never move.
    """

    def __init__(
        self,
        projections: Sequence[Projection],
        size: BankSize,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate the pools; `dtype` is the model's."""
        self.projections = tuple(projections)
        self.size = size
        self.pools = tuple(
            _empty_pool(projection, size.pages, dtype, device) for projection in self.projections
        )
        layers = max((p.num_layers for p in self.projections), default=0)
        count = len(self.projections)
        max_pages = -(-size.max_rank // PAGE_ROWS)
        self.page_table = torch.zeros(
            size.slots, count, max_pages, dtype=torch.int32, device=device
        )
        self.ranks = torch.zeros(size.slots, count, layers, dtype=torch.int32, device=device)
        self._placements: list[Placement | None] = [None] * size.slots
        self._staged: dict[AdapterKey, StagedAdapter] = {}
        self._lock = threading.Lock()
        self._dtype = dtype
        self._pin = device.type == "cuda"

    @property
    def pool_bytes(self) -> int:
        """Bytes of all device pools."""
        return sum(pool.nbytes for pool in self.pools)

    @property
    def host_bytes(self) -> int:
        """Bytes of all staged adapters."""
        with self._lock:
            return sum(staged.shape.host_bytes for staged in self._staged.values())

    def stage(self, adapter: FetchedAdapter) -> AdapterShape:
        """Read, judge and cut an adapter, and keep it in host memory until `drop`.

        Raises AdapterError when it cannot be served exactly or can never fit.
        """
        with self._lock:
            staged = self._staged.get(adapter.key)
        if staged is None:
            folder = Path(adapter.folder)
            staged = self._read(folder)
            if adapter.fingerprint and fingerprint(folder) != adapter.fingerprint:
                raise AdapterError(
                    AdapterRefusal.UNAVAILABLE,
                    f"adapter {adapter.name!r} changed while it was read: try again",
                )
            with self._lock:
                self._staged[adapter.key] = staged
        return staged.shape

    def place(self, key: AdapterKey, slot: int, pages: Sequence[Sequence[int]]) -> None:
        """Copy a staged adapter into its pages and name it by `slot`.

        pages: for each projection, one page index for each page of its AdapterShape.
        """
        with self._lock:
            staged = self._staged.get(key)
        assert staged is not None, f"adapter {key} is placed but was never staged"
        table = [list(part) for part in pages]
        counts = [piece.a.shape[0] for piece in staged.pieces]
        assert [len(part) for part in table] == counts, (key, table, counts)
        for pool, piece, part in zip(self.pools, staged.pieces, table, strict=True):
            for index, page in enumerate(part):
                pool.a[page].copy_(piece.a[index], non_blocking=self._pin)
                pool.bt[page].copy_(piece.bt[index], non_blocking=self._pin)
        self._write_tables(slot, table, staged.ranks)
        self._placements[slot] = Placement(self.pools, table, staged.ranks)

    def drop(self, key: AdapterKey) -> None:
        """Forget the host copy of an adapter; a key that is not there is ignored."""
        with self._lock:
            self._staged.pop(key, None)

    def placement(self, slot: int) -> Placement:
        """Return what lies at a slot."""
        placement = self._placements[slot]
        assert placement is not None, f"slot {slot} is used before anything was placed there"
        return placement

    def adapts(self, slot: int, projection: int) -> bool:
        """Whether what lies at a slot changes a projection's first layer; no, if nothing does."""
        placement = self._placements[slot]
        return placement is not None and placement.rank(projection, 0) > 0

    def check(self) -> None:
        """Assert that no page is out of its pool; slots may name pages that were reused since."""
        for placement in self._placements:
            if placement is not None:
                pages = [page for part in placement._pages for page in part]
                assert all(0 <= page < self.size.pages for page in pages), pages

    def _write_tables(self, slot: int, table: list[list[int]], ranks: Tensor) -> None:
        rows = np.zeros(self.page_table.shape[1:], dtype=np.int32)
        for index, part in enumerate(table):
            rows[index, : len(part)] = part
        device = self.page_table.device
        self.page_table[slot].copy_(to_device(rows, device))
        self.ranks[slot].copy_(to_device(ranks.numpy(), device))

    def _read(self, folder: Path) -> StagedAdapter:
        adapter = open_adapter(folder, self.projections, self.size.max_rank)
        ranks = torch.zeros(self.ranks.shape[1:], dtype=torch.int32)
        for place, rank in adapter.ranks.items():
            ranks[place.projection, place.layer] = rank
        num_pages = [-(-int(row.max()) // PAGE_ROWS) for row in ranks]
        self._check_fits(num_pages)
        return StagedAdapter(self._cut(adapter, num_pages), ranks)

    def _check_fits(self, num_pages: list[int]) -> None:
        """Refuse what no amount of eviction could ever place."""
        for projection, count in zip(self.projections, num_pages, strict=True):
            if count > self.size.pages:
                raise AdapterError(
                    AdapterRefusal.TOO_LARGE,
                    f"the adapter needs {count} pages of {projection.name}, this server's pool "
                    f"has {self.size.pages}: raise adapters.device_pages, or train with a "
                    "smaller r",
                )
        width = self._dtype.itemsize * PAGE_ROWS
        total = sum(
            count * p.num_layers * width * (p.local_inputs + p.local_outputs)
            for p, count in zip(self.projections, num_pages, strict=True)
        )
        if total > self.size.host_bytes:
            raise AdapterError(
                AdapterRefusal.TOO_LARGE,
                f"the adapter takes {total} bytes on this rank, the host tier has "
                f"{self.size.host_bytes}: raise adapters.host_bytes",
            )

    def _cut(self, adapter: PeftAdapter, num_pages: list[int]) -> tuple[Pool, ...]:
        """Read an adapter's modules into zeroed host pieces, cut to this rank."""
        pieces = tuple(
            _zero_piece(projection, count, self._dtype, self._pin)
            for projection, count in zip(self.projections, num_pages, strict=True)
        )
        for module in adapter.read():
            projection = self.projections[module.place.projection]
            piece, layer = pieces[module.place.projection], module.place.layer
            _write_rows(piece.a, layer, take(module.a, projection.inputs))
            _write_rows(piece.bt, layer, take(module.b.t(), projection.outputs))
        return pieces


def take(rows: Tensor, segments: Segments) -> Tensor:
    """Keep the columns of `segments`, in their order: [r, whole] to [r, local]."""
    return torch.cat([rows[:, start:stop] for start, stop in segments], dim=1)


def page_bytes(projections: Sequence[Projection], dtype: torch.dtype) -> int:
    """Bytes of one page in every pool: the unit in which pools are sized."""
    widths = sum(p.num_layers * (p.local_inputs + p.local_outputs) for p in projections)
    return PAGE_ROWS * dtype.itemsize * widths


def _empty_pool(
    projection: Projection, pages: int, dtype: torch.dtype, device: torch.device
) -> Pool:
    shape = (pages, projection.num_layers, PAGE_ROWS)
    return Pool(
        a=torch.empty(*shape, projection.local_inputs, dtype=dtype, device=device),
        bt=torch.empty(*shape, projection.local_outputs, dtype=dtype, device=device),
    )


def _zero_piece(projection: Projection, pages: int, dtype: torch.dtype, pin: bool) -> Pool:
    shape = (pages, projection.num_layers, PAGE_ROWS)
    return Pool(
        a=torch.zeros(*shape, projection.local_inputs, dtype=dtype, pin_memory=pin),
        bt=torch.zeros(*shape, projection.local_outputs, dtype=dtype, pin_memory=pin),
    )


def _write_rows(piece: Tensor, layer: int, rows: Tensor) -> None:
    """Write rank rows [r, width] over the pages of a layer, from the first row on."""
    for index, start in enumerate(range(0, len(rows), PAGE_ROWS)):
        part = rows[start : start + PAGE_ROWS]
        piece[index, layer, : len(part)] = part

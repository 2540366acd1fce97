"""AdapterBank: one rank's adapters, staged in host memory and loaded into device pools."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from configs.wire.adapters import AdapterKey, AdapterShape, FetchedAdapter
from modeling.adapters.device_adapter import DeviceAdapter, Pool
from modeling.adapters.device_copies import CopyEvent, DeviceCopies
from modeling.adapters.expert_loads import ExpertLoads
from modeling.adapters.file_factors import FileBLoads
from modeling.adapters.host_cache import (
    HostAdapterCache,
    HostCacheSize,
    StagedAdapter,
)
from modeling.adapters.host_pages import PAGE_ROWS
from modeling.adapters.output_rows import OutputRows
from modeling.adapters.pool_sizes import copy_bytes, linear_bytes, page_bytes
from modeling.adapters.projection import (
    COPIED_KINDS,
    TOKEN_KINDS,
    WHOLE_KINDS,
    BaseLinear,
    BaseRows,
    ModulePosition,
    Projection,
    ProjectionKind,
    select_columns,
)

__all__ = [
    "PAGE_ROWS",
    "AdapterBank",
    "BankSize",
    "DeviceAdapter",
    "Pool",
    "copy_bytes",
    "linear_bytes",
    "page_bytes",
    "select_columns",
]


@dataclass(frozen=True)
class BankSize:
    """The sizes of a bank.

    pages: pages in each projection's pool of factors.
    slots: adapters that can be loaded at once.
    max_rank: the largest rank that is served.
    host_bytes: bytes of the pool of staged adapters.
    copies: pages, of one matrix each, in the pools of whole embeddings and heads.
    vocabulary_pages: pages in the pools of their factors; None: as in the others.
    expert_pages: 8 rank rows of every expert that the pools of experts' factors hold; None: as many
    as the others have pages.
    """

    pages: int
    slots: int
    max_rank: int
    host_bytes: int
    copies: int = 0
    vocabulary_pages: int | None = None
    expert_pages: int | None = None

    def pages_of(self, projection: Projection) -> int:
        """Return the number of pages in one projection's pool."""
        if projection.kind.whole:
            return self.copies
        if projection.kind in COPIED_KINDS:
            return projection.copies
        if projection.kind is ProjectionKind.NORMS:
            return min(self.slots, self.pages)  # Each adapter takes one.
        if projection.kind in WHOLE_KINDS and self.vocabulary_pages is not None:
            return self.vocabulary_pages
        if projection.experts is not None:
            own = self.pages if self.expert_pages is None else self.expert_pages
            return own * projection.experts.most
        return self.pages


class AdapterBank:
    """Device pools, page tables and the host cache of one rank.

    `stage` and `drop` may run on any thread, beside steps. `load` and `in_use` must run on the
    thread that launches steps: they order copies and kernels.

    page_table: int32 [slots, projections, pages of max_rank], on the device; not those of experts.
    expert_table: int32 [slots, maps of experts, experts, pages of max_rank], alike; -1 where an
    adapter has no page. expert_maps: each projection's index in it; -1 where it has none.
    ranks: int32 [slots, projections, layers], on the device; without experts.
    embedding, head, norms: the index of each one's projection; None where adapters cannot change
    it.
    token_rows: the indices of trained tokens of embedding and head; None without.
    output_rows: int32 [slots, projections, 2], on the device: `DeviceAdapter.output_rows`.
    Pools and tables keep their addresses, so that CUDA graphs may use them.
    """

    def __init__(
        self,
        projections: Sequence[Projection],
        size: BankSize,
        dtype: torch.dtype,
        device: torch.device,
        base: Mapping[str, BaseRows] = MappingProxyType({}),
        base_linears: Mapping[ModulePosition, BaseLinear] = MappingProxyType({}),
        direct_reads: bool | None = None,
    ) -> None:
        """Allocate the pools; `dtype` is the model's.

        base, base_linears, direct_reads: as in `HostAdapterCache`.
        """
        self.projections = tuple(projections)
        self.size = size
        kinds = {projection.kind: index for index, projection in enumerate(self.projections)}
        self.embedding = kinds.get(ProjectionKind.EMBEDDING)
        self.head = kinds.get(ProjectionKind.HEAD)
        self.norms = kinds.get(ProjectionKind.NORMS)
        self.token_rows = _token_rows(kinds)
        counts = zip(self.projections, self.pool_pages, strict=True)
        self.pools = tuple(_empty_pool(own, pages, dtype, device) for own, pages in counts)
        layers = max((p.num_ranked for p in self.projections if p.experts is None), default=0)
        of_slots = (size.slots, len(self.projections))
        pages = -(-size.max_rank // PAGE_ROWS)
        self.page_table = torch.zeros(*of_slots, pages, dtype=torch.int32, device=device)
        self.ranks = torch.zeros(*of_slots, layers, dtype=torch.int32, device=device)
        own = _expert_table(self.projections, size.slots, pages, device)
        self.expert_maps, self.expert_table = own
        shape = (*of_slots, len(OutputRows._fields))
        self.output_rows = torch.full(shape, -1, dtype=torch.int32, device=device)
        # The source of a slot's tables on the device: rewritten only after the slot's last copy.
        on_cuda = device.type == "cuda"
        tables = (self.page_table, self.ranks, self.output_rows, self.expert_table)
        self._host_table, self._host_ranks, self._host_output_rows, self._host_experts = (
            torch.zeros(table.shape, dtype=torch.int32, pin_memory=on_cuda) for table in tables
        )
        self._loaded: list[DeviceAdapter | None] = [None] * size.slots
        # Slots of adapters that change more than linear maps, which few do: each step looks here.
        self._slots_of_kind: dict[ProjectionKind, set[int]] = {
            p.kind: set() for p in self.projections if p.kind is not ProjectionKind.LINEAR
        }
        self._copy_of_slot: dict[int, CopyEvent] = {}
        self._last_copy: dict[AdapterKey, CopyEvent] = {}
        self._slot_of_page: list[dict[int, int]] = [{} for _ in self.projections]
        self._device_copies = DeviceCopies(device)
        copies = HostCacheSize(self.pool_pages, size.max_rank, size.host_bytes if size.slots else 0)
        self._host_cache = HostAdapterCache(
            self.projections, copies, dtype, on_cuda, base, base_linears, direct_reads
        )
        transposed = self.projections if self._host_cache.direct_reads and size.slots else ()
        self._file_b = FileBLoads(transposed, size.max_rank, dtype, device)
        self._expert_loads = ExpertLoads(self.projections if size.slots else (), dtype, device)

    @property
    def pool_pages(self) -> tuple[int, ...]:
        """Return the number of pages of each projection's pool."""
        return tuple(self.size.pages_of(projection) for projection in self.projections)

    @property
    def pool_bytes(self) -> int:
        """Return the bytes of all device pools."""
        return sum(pool.nbytes for pool in self.pools)

    @property
    def host_bytes(self) -> int:
        """Return the bytes of the pinned pool that staged adapters take."""
        return self._host_cache.num_bytes

    @property
    def host_capacity(self) -> int:
        """Return the bytes of the pinned pool."""
        return self._host_cache.capacity_bytes

    def stage(self, adapter: FetchedAdapter) -> AdapterShape:
        """Read, check and cut an adapter, and keep it in host memory until `drop`.

        Raises AdapterError when it cannot be served exactly or can never fit, AdapterDeferred
        when there is no room for it now, AdapterNeedsSums when ranks must add norms first.
        """
        return self._host_cache.stage(adapter)

    def load(self, key: AdapterKey, slot: int, pages: Sequence[Sequence[int]]) -> CopyEvent:
        """Start to copy a staged adapter into its pages and the slot's tables, without waiting.

        pages: for each projection, one page index for each page of its AdapterShape.
        """
        staged = self._host_cache.find(key)
        table = [list(part) for part in pages]
        counts = staged.shape.num_pages
        assert tuple(map(len, table)) == counts, (key, table, counts)
        if slot in self._copy_of_slot:
            # The slot's host tables are still the source of its last copy. The wait is long over,
            # unless a slot is loaded twice at once.
            self._copy_of_slot[slot].wait()
        adapter = DeviceAdapter(self.pools, table, staged)
        with self._device_copies.copy(slot, self._assign(slot, table)) as copied:
            self._copy(staged, slot, table)
            self._copy_tables(staged, slot, table, adapter)
        self._loaded[slot] = adapter
        changed = {p.kind for i, p in enumerate(self.projections) if adapter.adapts(i)}
        for kind, slots in self._slots_of_kind.items():
            (slots.add if kind in changed else slots.discard)(slot)
        self._copy_of_slot[slot] = self._last_copy[key] = copied
        return copied

    def in_use(self, slots: Sequence[int]) -> AbstractContextManager[None]:
        """Return a context in which to launch a step that reads these slots (-1: base model)."""
        return self._device_copies.in_use(slots)

    def drop(self, key: AdapterKey) -> None:
        """Remove an adapter's host copy; an unknown key is ignored."""
        # The pinned chunks are the source of the copy: they are reused only once it has ended.
        last = self._last_copy.pop(key, None)
        self._host_cache.drop(key, None if last is None else last.event)

    def loaded(self, slot: int) -> DeviceAdapter:
        """Return the adapter that is loaded in a slot."""
        adapter = self._loaded[slot]
        assert adapter is not None, f"slot {slot} is used before an adapter was loaded into it"
        return adapter

    def page_of(self, slot: int, projection: int) -> int:
        """Return the first page of a slot's adapter; -1 where it has none."""
        adapter = self._loaded[slot]
        return -1 if adapter is None else adapter.page(projection)

    def adapts(self, slot: int, projection: int) -> bool:
        """Return whether a slot's adapter, if any, changes a projection."""
        adapter = self._loaded[slot]
        return adapter is not None and adapter.adapts(projection)

    def changes(self, slots: Sequence[int], kinds: Iterable[ProjectionKind]) -> bool:
        """Return whether an adapter of these slots (-1: base) changes a projection of some kinds.

        kinds: others than linear maps.
        """
        found = (self._slots_of_kind.get(kind) for kind in kinds)
        return any(own and not own.isdisjoint(slots) for own in found)

    def check(self) -> None:
        """Assert that all pages are in their pools and that host memory holds the staged adapters.

        Slots may name pages that were reused since. Not to be called while an adapter is staged.
        """
        for adapter in self._loaded:
            if adapter is not None:
                parts = zip(adapter._pages, self.pool_pages, strict=True)
                assert all(0 <= page < most for part, most in parts for page in part)
        self._host_cache.check()

    def _assign(self, slot: int, table: list[list[int]]) -> set[int]:
        """Record which slot the pages belong to now; returns the slots they belonged to before."""
        before = set()
        for slot_of, part in zip(self._slot_of_page, table, strict=True):
            before |= {slot_of[page] for page in part if page in slot_of}
            slot_of.update(dict.fromkeys(part, slot))
        return before

    def _copy(self, staged: StagedAdapter, slot: int, table: list[list[int]]) -> None:
        for i, (pool, pages, part) in enumerate(zip(self.pools, staged.pages, table, strict=True)):
            if i in staged.experts:
                self._expert_loads.load(pages[0], pool.a, pool.bt, part)
                continue
            for page, index in zip(pages, part, strict=True):
                page.a.copy_to(pool.a[index].flatten(0, 1))
                if i not in staged.file_b:
                    page.bt.copy_to(pool.bt[index].flatten(0, 1))
            if i in staged.file_b:
                targets = [pool.bt[index] for index in part]
                self._file_b.load(staged.file_b[i], [page.bt for page in pages], targets)

    def _table_row(self, pages: Sequence[int]) -> list[int]:
        """Return a projection's row of a slot's table, zeros behind its pages."""
        width = self._host_table.shape[2]
        return [*pages[:width], *[0] * (width - len(pages))]

    def _copy_tables(
        self, staged: StagedAdapter, slot: int, table: list[list[int]], adapter: DeviceAdapter
    ) -> None:
        rows = self._host_table[slot]
        # No kernel reads the pages of these here.
        apart = (ProjectionKind.SCORE, ProjectionKind.EXPERTS)
        named = [
            # A page of scales alone may lie behind those of the largest rank.
            self._table_row([] if projection.kind in apart else part)
            for projection, part in zip(self.projections, table, strict=True)
        ]
        rows.copy_(torch.tensor(named, dtype=torch.int32).view(rows.shape))
        of_experts = self._host_experts[slot].fill_(-1)
        for i, each in staged.experts.items():
            numbers = torch.tensor(table[i], dtype=torch.int32).view(each.chunks, each.count)
            of_map = of_experts[self.expert_maps[i], :, : each.chunks]
            of_map[list(each.own)] = numbers[:, : len(each.own)].t()
        self.expert_table[slot].copy_(of_experts, non_blocking=True)
        self._host_ranks[slot] = staged.ranks[:, : self._host_ranks.shape[2]]
        self.page_table[slot].copy_(rows, non_blocking=True)
        self.ranks[slot].copy_(self._host_ranks[slot], non_blocking=True)
        own = [adapter.output_rows(index) for index in range(len(self.projections))]
        self._host_output_rows[slot] = torch.tensor(own, dtype=torch.int32)
        self.output_rows[slot].copy_(self._host_output_rows[slot], non_blocking=True)


def _token_rows(kinds: Mapping[ProjectionKind, int]) -> tuple[int, int] | None:
    """Return what `AdapterBank.token_rows` is, by each kind's projection."""
    rows = [kinds[kind] for kind in TOKEN_KINDS.values() if kind in kinds]
    return (rows[0], rows[1]) if rows else None


def _expert_table(
    projections: Sequence[Projection], slots: int, pages: int, device: torch.device
) -> tuple[tuple[int, ...], Tensor]:
    """Return `expert_maps` and `expert_table` of a bank."""
    found = {i: each.experts for i, each in enumerate(projections) if each.experts is not None}
    maps = {index: number for number, index in enumerate(found)}
    most = max((len(each.own) for each in found.values()), default=0)
    shape = (slots, len(maps), most, pages)
    table = torch.full(shape, -1, dtype=torch.int32, device=device)
    return tuple(maps.get(i, -1) for i in range(len(projections))), table


def _empty_pool(
    projection: Projection, pages: int, dtype: torch.dtype, device: torch.device
) -> Pool:
    shape: tuple[int, ...] = (pages, projection.page_layers, PAGE_ROWS)
    if projection.experts is not None:
        shape = (projection.page_layers, pages, PAGE_ROWS)
    return Pool(
        a=torch.empty(*shape, projection.local_inputs, dtype=dtype, device=device),
        bt=torch.empty(*shape, projection.local_outputs, dtype=dtype, device=device),
    )

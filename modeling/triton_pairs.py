"""Adapters of experts in Triton: every pair of a token and an expert for itself.

    s[p, r]     = sum_i x[p, i] A[page(p, r), first + e(p), r % 8, i]
    y[p, o + j] += sum_r s[p, r] Bt[page(p, r), first + e(p), r % 8, j]

p: a pair of a token and one of its experts, e(p); first: the layer's first expert, counted over
all layers. Tokens of few rows seldom share both expert and adapter, so no pair waits for another.
Grids depend on the number of pairs alone: what adapters there are is read on the device.

Launches are programmatic dependent ones, as in `modeling.layers.triton`. No kernel writes slots,
tables and pools, so they may be read before the kernel ahead has ended.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modeling.triton_launch import Launcher, aligned, has_dependent_launch, launch_options

ROWS = 8
"""Rank rows of a page."""

SHRINK_COLUMNS = 1024

EXPAND_COLUMNS = 256

FEW_PAIRS = 64
"""Up to as many, the pages of a pair are shrunk by programs of their own."""

UNSPECIALIZED = ["matrix0", "matrices", "projection0", "projection1"]
COUNTED = [*UNSPECIALIZED, "num_pairs"]
"""Integers that are no reason to compile again where they are 1 or multiples of 16."""

# Arguments are grouped by what they describe.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def pages_of_pair(
    table: "Any", slot: "Any", projection: "Any",
    ENTRIES: tl.constexpr, PAGES: tl.constexpr, WIDE: tl.constexpr,
) -> "Any":
    """Where a slot's pages of a projection are in the table, and how many; 0 for slot -1."""
    at = table + (tl.maximum(slot, 0) * ENTRIES + projection) * PAGES
    i = tl.arange(0, WIDE)
    pages = tl.load(at + i, mask=(i < PAGES) & (slot >= 0), other=-1)
    return at, tl.sum((pages >= 0).to(tl.int32), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def pair_delta(
    shrunk: "Any", bt: "Any", table: "Any", slot: "Any", projection: "Any", matrix: "Any", n: "Any",
    width: "Any", matrices: "Any",
    ENTRIES: tl.constexpr, PAGES: tl.constexpr, WIDE: tl.constexpr,
) -> "Any":
    """Columns n of one pair's delta, float32; shrunk: of the pair. matrix: first + its expert."""
    at, count = pages_of_pair(table, slot, projection, ENTRIES, PAGES, WIDE)
    r = tl.arange(0, 8)
    inside = n < width
    total = tl.zeros([n.shape[0]], dtype=tl.float32)
    for each in range(count):
        page = tl.load(at + each).to(tl.int64)
        rows = bt + ((page * matrices + matrix) * 8 + r) * width
        tile = tl.load(rows[:, None] + n[None, :], mask=inside[None, :], other=0.0)
        own = tl.load(shrunk + each * 8 + r)
        total += tl.sum(tile.to(tl.float32) * own[:, None], axis=0)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def tile_delta(
    total: "Any", shrunk: "Any", bt: "Any", table: "Any", slot: "Any", projection: "Any",
    matrix: "Any", pair: "Any", n: "Any", width: "Any",
    matrices: "Any",
    ENTRIES: tl.constexpr, PAGES: tl.constexpr, WIDE: tl.constexpr,
) -> "Any":
    """total [columns, pairs] with the deltas of one expert's pairs added.

    slot, pair: of each; -1 is the slot of pairs that count for nothing.
    """
    at = table + (tl.maximum(slot, 0) * ENTRIES + projection) * PAGES
    i = tl.arange(0, WIDE)
    mask = (slot >= 0)[:, None] & (i < PAGES)[None, :]
    pages = tl.load(at[:, None] + i[None, :], mask=mask, other=-1)
    most = tl.max(tl.sum((pages >= 0).to(tl.int32), axis=1), axis=0)
    for each in range(most):
        page = tl.load(at + each, mask=slot >= 0, other=-1)
        used = page >= 0
        rows = bt + (tl.maximum(page, 0).to(tl.int64) * matrices + matrix) * 8 * width
        for r in tl.static_range(8):
            own = tl.load(shrunk + pair * (PAGES * 8) + each * 8 + r, mask=used, other=0.0)
            tile = tl.load(
                (rows + r * width)[None, :] + n[:, None],
                mask=used[None, :] & (n < width)[:, None], other=0.0,
            )
            total += tile.to(tl.float32) * own[None, :]
    return total


@triton.jit(do_not_specialize=COUNTED)  # type: ignore[untyped-decorator]
def _shrink(
    x: "Any", shrunk: "Any", a0: "Any", a1: "Any", experts: "Any", slots: "Any", table: "Any",
    projection0: "Any", projection1: "Any", matrix0: "Any", matrices: "Any",
    num_pairs: "Any",
    INPUTS: tl.constexpr, COUNT: tl.constexpr, ACTIVE: tl.constexpr, SHARED: tl.constexpr,
    ENTRIES: tl.constexpr, PAGES: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """Program (pair, target, share of the pages): shrunk [targets, pairs, PAGES * 8].

    ACTIVE: pairs that share an entry of slots; SHARED: those that share a row of x.
    """
    pair, target = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + pair // ACTIVE)
    projection, a = projection0, a0
    if target == 1:
        projection, a = projection1, a1
    at, count = pages_of_pair(table, slot, projection, ENTRIES, PAGES, WIDE)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(experts + pair)
    # Another rank's expert is behind the last.
    count = tl.where(expert < COUNT, count, 0)
    matrix = matrix0 + expert.to(tl.int64)
    r = tl.arange(0, 8)
    own = x + (pair // SHARED).to(tl.int64) * INPUTS
    for each in range(tl.program_id(2), count, tl.num_programs(2)):
        page = tl.load(at + each).to(tl.int64)
        rows = a + ((page * matrices + matrix) * 8 + r) * INPUTS
        total = tl.zeros([8, BLOCK_K], dtype=tl.float32)
        for k0 in range(0, INPUTS, BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)
            tile = tl.load(rows[:, None] + k[None, :], mask=(k < INPUTS)[None, :], other=0.0)
            inputs = tl.load(own + k, mask=k < INPUTS, other=0.0)
            total += tile.to(tl.float32) * inputs.to(tl.float32)[None, :]
        out = shrunk + ((target * num_pairs + pair) * PAGES + each) * 8
        tl.store(out + r, tl.sum(total, axis=1))


@triton.jit(do_not_specialize=UNSPECIALIZED)  # type: ignore[untyped-decorator]
def _expand(
    y: "Any", shrunk: "Any", bt: "Any", experts: "Any", slots: "Any", table: "Any",
    projection0: "Any", matrix0: "Any", matrices: "Any", y_stride: "Any",
    OUTPUTS: tl.constexpr, COUNT: tl.constexpr,
    ENTRIES: tl.constexpr, PAGES: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_N: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """Program (pair, block of columns): y[p, n] += the pair's delta."""
    pair = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(experts + pair)
    slot = tl.load(slots + pair)
    if (slot >= 0) & (expert < COUNT):
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        delta = pair_delta(
            shrunk + pair * (PAGES * 8), bt, table, slot, projection0,
            matrix0 + expert.to(tl.int64), n, OUTPUTS, matrices, ENTRIES, PAGES, WIDE,
        )
        out = y + pair.to(tl.int64) * y_stride + n
        before = tl.load(out, mask=n < OUTPUTS, other=0.0).to(tl.float32)
        tl.store(out, (before + delta).to(y.dtype.element_ty), mask=n < OUTPUTS)


# fmt: on

_SHRINK, _EXPAND = Launcher(_shrink), Launcher(_expand)


@dataclass(frozen=True)
class PairDeltas:
    """A step's adapters of experts, where kernels find them.

    slots: int32 [tokens], each token's adapter slot; -1: the base model's.
    table: int32 [slots, projections, pages], an adapter's pages; -1 behind its last one.
    pools: (A, Bt) of each projection, [pages, layers' experts, 8, width] each.
    """

    slots: Tensor
    table: Tensor
    pools: tuple[tuple[Tensor, Tensor], ...]

    @property
    def sizes(self) -> dict[str, int]:
        """Return the table's constants."""
        _, entries, pages = self.table.shape
        return {"ENTRIES": entries, "PAGES": pages, "WIDE": triton.next_power_of_2(pages)}

    def shrink(
        self,
        x: Tensor,
        experts: Tensor,
        slots: Tensor,
        projections: tuple[int, ...],
        first: int,
        count: int,
    ) -> Tensor:
        """float32 [projections, pairs, rows]; what an adapter does not have is left undefined.

        x: [tokens or pairs, in], contiguous. experts: int64 [pairs], `count` and more for other
        ranks'. slots: int32 [tokens or pairs]. projections: one or two, of the same inputs.
        """
        (_, inputs), pairs = x.shape, experts.numel()
        pages, pdl = self.table.shape[2], has_dependent_launch(x.device)
        shrunk = x.new_empty(len(projections), pairs, pages * ROWS, dtype=torch.float32)
        own = [self.pools[each][0] for each in (projections[0], projections[-1])]
        constants: dict[str, Any] = {
            **{"INPUTS": inputs, "COUNT": count, "ACTIVE": pairs // len(slots)},
            **{"SHARED": pairs // len(x), **self.sizes},
            **{"BLOCK_K": min(SHRINK_COLUMNS, triton.next_power_of_2(inputs)), "PDL": pdl},
        }
        tensors = [x, shrunk, *own, experts, slots, self.table]
        at = (projections[0], projections[-1], first, own[0].shape[1])
        kinds = (x.device, x.dtype, own[0].dtype, experts.dtype, aligned(*tensors))
        key = (*kinds, *constants.values())
        grid = (pairs, len(projections), pages if pairs <= FEW_PAIRS else 1)
        options = {"num_warps": 4, **launch_options(pdl)}
        _SHRINK(key, grid, [*tensors, *at, pairs], constants, options)
        return shrunk

    def add(
        self,
        y: Tensor,
        x: Tensor,
        experts: Tensor,
        tokens: Tensor,
        projection: int,
        first: int,
        count: int,
        offset: int,
    ) -> None:
        """Add a projection's deltas to y [pairs, out], from column `offset` on.

        x: [pairs, in]. experts, tokens: int64 [pairs], those of each pair. first: the layer's first
        expert, counted over all layers; count: this rank's experts.
        """
        slots = self.slots[tokens]
        shrunk = self.shrink(x.contiguous(), experts, slots, (projection,), first, count)
        bt, pdl = self.pools[projection][1], has_dependent_launch(x.device)
        part, outputs = y[:, offset:], bt.shape[3]
        columns = min(EXPAND_COLUMNS, triton.next_power_of_2(outputs))
        constants: dict[str, Any] = {
            **{"OUTPUTS": outputs, "COUNT": count, **self.sizes},
            **{"BLOCK_N": columns, "PDL": pdl},
        }
        tensors = [part, shrunk, bt, experts, slots, self.table]
        stride = y.stride(0)
        forms = (stride % 16 == 0, stride == 1, aligned(*tensors))
        key = (y.device, y.dtype, bt.dtype, experts.dtype, *forms, *constants.values())
        grid = (len(y), -(-outputs // columns))
        arguments = [*tensors, projection, first, bt.shape[1], stride]
        _EXPAND(key, grid, arguments, constants, {"num_warps": 2, **launch_options(pdl)})


@dataclass(frozen=True)
class LayerDeltas:
    """A step's adapters of one layer's experts.

    up: the projections of gate and up. down: that of down. first: the layer's first expert, counted
    over all layers.
    """

    deltas: PairDeltas
    up: tuple[int, int]
    down: int
    first: int

    def shrink_up(self, x: Tensor, ids: Tensor, count: int) -> "ShrunkPairs":
        """Shrink x [tokens, hidden] for gate and up; ids: [tokens, experts of one]."""
        return self._shrunk(x, ids, self.up, count)

    def shrink_down(self, inner: Tensor, ids: Tensor, count: int) -> "ShrunkPairs":
        """Shrink inner [pairs, width] for down."""
        return self._shrunk(inner, ids, (self.down,), count)

    def _shrunk(
        self, x: Tensor, ids: Tensor, projections: tuple[int, ...], count: int
    ) -> "ShrunkPairs":
        own = self.deltas
        shrunk = own.shrink(x, ids, own.slots, projections, self.first, count)
        bt = tuple(own.pools[each][1] for each in projections)
        return ShrunkPairs(own, shrunk, bt, projections, self.first)


@dataclass(frozen=True)
class ShrunkPairs:
    """What kernels of products read to add deltas, of one or two projections.

    shrunk: as `PairDeltas.shrink` returns it. bt: the projections' pools.
    """

    deltas: PairDeltas
    shrunk: Tensor
    bt: tuple[Tensor, ...]
    projections: tuple[int, ...]
    first: int

    @property
    def arguments(self) -> list[Any]:
        """Return the kernels' arguments."""
        tensors = [self.shrunk, self.bt[0], self.bt[-1], self.deltas.slots, self.deltas.table]
        own = (self.projections[0], self.projections[-1], self.first, self.bt[0].shape[1])
        return [*tensors, *own]

    @property
    def constants(self) -> dict[str, Any]:
        """Return the kernels' constants."""
        return {"DELTAS": True, **self.deltas.sizes}


def without_deltas(x: Tensor) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments and constants of kernels that add none; x: any tensor of the launch."""
    constants = {"DELTAS": False, "ENTRIES": 1, "PAGES": 1, "WIDE": 1}
    return [x, x, x, x, x, 0, 0, 0, 0], constants

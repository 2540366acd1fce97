"""Adapters of experts in Triton: every pair of a token and an expert for itself.

    s[p, r]     = sum_i x[p, i] A[l, page(p, r), r % 8, i]
    y[p, o + j] += sum_r s[p, r] Bt[l, page(p, r), r % 8, j]

p: a pair of a token and one of its experts; page(p, r): where the token's adapter has rank row r of
that expert; l: the layer's index among those with experts. Tokens of few rows seldom share both
expert and adapter, so no pair waits for another. Grids depend on the number of pairs alone: what
adapters there are is read on the device. LoRA rank rows are read two pages at once, as far as there
are any: a pair whose expert the adapter leaves as it is reads none.

Launches are programmatic dependent ones, as in `modeling.layers.kernels.operations`. No kernel
writes tables and pools, so they may be read before the kernel ahead has ended, and so may slots,
but for those that `add` looks up.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modeling.kernels.launch import Launcher, aligned, has_dependent_launch, launch_options
from modeling.kernels.tiles import prefetch

ROWS = 8
"""Rank rows of a page."""

SHRINK_COLUMNS = 256

SHRINK_UNROLLED = 4
"""Blocks of so many columns whose loads are under way at once."""

EXPAND_COLUMNS = 256

FEW_PAIRS = 64
"""Up to as many, the pages of a pair are shrunk by programs of their own."""

UNSPECIALIZED = ["layer", "num_pages", "map0", "map1"]
COUNTED = [*UNSPECIALIZED, "num_pairs"]
"""Integers that are no reason to compile again where they are 1 or multiples of 16."""

# Arguments are grouped by what they describe.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def pages_of_pair(
    table: "Any", slot: "Any", of: "Any", expert: "Any",
    MAPS: tl.constexpr, STRIDE: tl.constexpr, PAGES: tl.constexpr, WIDE: tl.constexpr,
) -> "Any":
    """Where a slot's pages of a map and expert are in the table, and how many; 0 for slot -1.

    of: the map. STRIDE: of maps in the table.
    """
    at = table + (tl.maximum(slot, 0) * MAPS + of) * STRIDE + expert * PAGES
    i = tl.arange(0, WIDE)
    pages = tl.load(at + i, mask=(i < PAGES) & (slot >= 0), other=-1)
    return at, tl.sum((pages >= 0).to(tl.int32), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def rank_rows(
    at: "Any", start: "Any", r: "Any", layer: "Any", num_pages: "Any", width: "Any",
    PAGES: tl.constexpr,
) -> "Any":
    """Where rank rows r, counted from page `start` on, begin in a pool, and whether they are there.

    at: see pages_of_pair, of all rows or of each.
    """
    each = start + r // 8
    page = tl.load(at + tl.minimum(each, PAGES - 1))
    first = (layer * num_pages + tl.maximum(page, 0).to(tl.int64)) * 8
    return (first + r % 8) * width, (each < PAGES) & (page >= 0)


@triton.jit  # type: ignore[untyped-decorator]
def pair_delta(
    shrunk: "Any", bt: "Any", at: "Any", count: "Any", n: "Any",
    width: "Any", layer: "Any", num_pages: "Any", PAGES: tl.constexpr,
) -> "Any":
    """Columns n of one pair's delta, float32; shrunk: of the pair. See rank_rows."""
    r = tl.arange(0, 16)
    inside = n < width
    total = tl.zeros([n.shape[0]], dtype=tl.float32)
    for start in range(0, count, 2):
        rows, used = rank_rows(at, start, r, layer, num_pages, width, PAGES)
        mask = used[:, None] & inside[None, :]
        tile = tl.load(bt + rows[:, None] + n[None, :], mask=mask, other=0.0)
        own = tl.load(shrunk + start * 8 + r, mask=start + r // 8 < PAGES, other=0.0)
        # `used` has one layout, that of tiles: with two Triton 3.6 fails.
        total += tl.sum(tile.to(tl.float32) * tl.where(mask, own[:, None], 0.0), axis=0)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def token_delta(
    shrunk: "Any", bt: "Any", ids: "Any", shares: "Any", slots: "Any", table: "Any",
    token: "Any", first: "Any", of: "Any", layer: "Any", num_pages: "Any", width: "Any",
    BLOCK_N: tl.constexpr, ACTIVE: tl.constexpr, POWER: tl.constexpr,
    MAPS: tl.constexpr, STRIDE: tl.constexpr, PAGES: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
) -> "Any":
    """The deltas of all pairs of a token by their weights, float32: BLOCK_N columns from `first`.

    POWER: of two, that holds ACTIVE. PDL: this waits for the kernel ahead, which read ids itself.
    """
    q = tl.arange(0, POWER * 16)
    p, r = q // 16, q % 16
    n = first + tl.arange(0, BLOCK_N)
    own, inside = p < ACTIVE, n < width
    pair = token * ACTIVE + tl.minimum(p, ACTIVE - 1)
    slot = tl.load(slots + token)
    maps = table + (tl.maximum(slot, 0) * MAPS + of) * STRIDE
    e, i = tl.arange(0, POWER), tl.arange(0, WIDE)
    of_experts = maps + tl.load(ids + token * ACTIVE + tl.minimum(e, ACTIVE - 1)) * PAGES
    inside_table = (i < PAGES) & (slot >= 0)
    pages = tl.load(of_experts[:, None] + i[None, :], mask=inside_table[None, :], other=-1)
    # Of the expert that has most; it may be that others have none.
    count = tl.max(tl.sum((pages >= 0).to(tl.int32), axis=1), axis=0)
    at = maps + tl.load(ids + pair) * PAGES
    if PDL:
        if count > 0:
            rows, used = rank_rows(at, 0, r, layer, num_pages, width, PAGES)
            prefetch(bt + rows + first)
        gdc_wait()
        gdc_launch_dependents()
    share = tl.load(shares + pair).to(tl.float32)
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, count, 2):
        rows, used = rank_rows(at, start, r, layer, num_pages, width, PAGES)
        there = own & (start + r // 8 < PAGES)
        factor = tl.load(shrunk + (pair * PAGES + start) * 8 + r, mask=there, other=0.0) * share
        mask = used[:, None] & inside[None, :]
        tile = tl.load(bt + rows[:, None] + n[None, :], mask=mask, other=0.0)
        # See pair_delta. Pairs behind the last one have a factor of 0.
        total += tl.sum(tile.to(tl.float32) * tl.where(mask, factor[:, None], 0.0), axis=0)
    return total


@triton.jit(do_not_specialize=COUNTED)  # type: ignore[untyped-decorator]
def _shrink(
    x: "Any", shrunk: "Any", a0: "Any", a1: "Any", experts: "Any", slots: "Any", table: "Any",
    map0: "Any", map1: "Any", layer: "Any", num_pages: "Any",
    num_pairs: "Any",
    INPUTS: tl.constexpr, COUNT: tl.constexpr, ACTIVE: tl.constexpr, SHARED: tl.constexpr,
    MAPS: tl.constexpr, STRIDE: tl.constexpr, PAGES: tl.constexpr, WIDE: tl.constexpr,
    RANKS: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """Program (pair, target, share of the pages): shrunk [targets, pairs, PAGES * 8].

    ACTIVE: pairs that share an entry of slots; SHARED: those that share a row of x. RANKS: rank
    rows that are read at once. EARLY: whether experts and slots were written before the kernel
    ahead began.
    """
    pair, target = tl.program_id(0), tl.program_id(1)
    of, a = map0, a0
    if target == 1:
        of, a = map1, a1
    if PDL and not EARLY:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slots + pair // ACTIVE)
    expert = tl.load(experts + pair)
    own_expert = tl.minimum(expert, COUNT - 1)
    at, count = pages_of_pair(table, slot, of, own_expert, MAPS, STRIDE, PAGES, WIDE)
    # Another rank's expert is behind the last.
    count = tl.where(expert < COUNT, count, 0)
    if PDL and EARLY:
        gdc_wait()
        gdc_launch_dependents()
    r = tl.arange(0, RANKS)
    own = x + (pair // SHARED).to(tl.int64) * INPUTS
    each: tl.constexpr = RANKS // 8
    for start in range(tl.program_id(2) * each, count, tl.num_programs(2) * each):
        rows, used = rank_rows(at, start, r, layer, num_pages, INPUTS, PAGES)
        total = tl.zeros([RANKS, BLOCK_K], dtype=tl.float32)
        for k0 in tl.range(0, INPUTS, BLOCK_K, loop_unroll_factor=UNROLL):
            k = k0 + tl.arange(0, BLOCK_K)
            mask = used[:, None] & (k < INPUTS)[None, :]
            tile = tl.load(a + rows[:, None] + k[None, :], mask=mask, other=0.0)
            inputs = tl.load(own + k, mask=k < INPUTS, other=0.0)
            total += tile.to(tl.float32) * inputs.to(tl.float32)[None, :]
        out = shrunk + ((target * num_pairs + pair) * PAGES + start) * 8
        tl.store(out + r, tl.sum(total, axis=1), mask=used)


@triton.jit(do_not_specialize=UNSPECIALIZED)  # type: ignore[untyped-decorator]
def _expand(
    y: "Any", shrunk: "Any", bt: "Any", experts: "Any", slots: "Any", table: "Any",
    map0: "Any", layer: "Any", num_pages: "Any", y_stride: "Any",
    OUTPUTS: tl.constexpr, COUNT: tl.constexpr,
    MAPS: tl.constexpr, STRIDE: tl.constexpr, PAGES: tl.constexpr, WIDE: tl.constexpr,
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
        at, count = pages_of_pair(table, slot, map0, expert, MAPS, STRIDE, PAGES, WIDE)
        own = shrunk + pair * (PAGES * 8)
        delta = pair_delta(own, bt, at, count, n, OUTPUTS, layer, num_pages, PAGES)
        out = y + pair.to(tl.int64) * y_stride + n
        before = tl.load(out, mask=n < OUTPUTS, other=0.0).to(tl.float32)
        tl.store(out, (before + delta).to(y.dtype.element_ty), mask=n < OUTPUTS)


# fmt: on

_SHRINK, _EXPAND = Launcher(_shrink), Launcher(_expand)


@dataclass(frozen=True)
class PairDeltas:
    """A step's adapters of experts, where kernels find them.

    slots: int32 [tokens], each token's adapter slot; -1: the base model's.
    table: int32 [slots, maps, experts, pages], an adapter's pages of each map of the experts; -1
    behind the last one.
    pools: (A, Bt) of each projection, [layers with experts, pages, 8, width] each.
    maps: each projection's index in the table.
    """

    slots: Tensor
    table: Tensor
    pools: tuple[tuple[Tensor, Tensor], ...]
    maps: tuple[int, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """Return the table's constants."""
        _, maps, experts, pages = self.table.shape
        wide = triton.next_power_of_2(pages)
        return {"MAPS": maps, "STRIDE": experts * pages, "PAGES": pages, "WIDE": wide}

    def shrink(
        self,
        x: Tensor,
        experts: Tensor,
        slots: Tensor,
        projections: tuple[int, ...],
        layer: int,
        count: int,
        early: bool = False,
    ) -> Tensor:
        """float32 [projections, pairs, rows]; what an adapter does not have is left undefined.

        x: [tokens or pairs, in], contiguous. experts: int64 [pairs], `count` and more for other
        ranks'. slots: int32 [tokens or pairs]. projections: one or two, of the same inputs. layer:
        its index among those with experts. early: whether the kernel ahead of this one waited for
        what wrote experts and slots.
        """
        (_, inputs), pairs = x.shape, experts.numel()
        sizes, pdl = self.sizes, has_dependent_launch(x.device)
        pages = sizes["PAGES"]
        shrunk = x.new_empty(len(projections), pairs, pages * ROWS, dtype=torch.float32)
        own = [self.pools[each][0] for each in (projections[0], projections[-1])]
        constants: dict[str, Any] = {
            **{"INPUTS": inputs, "COUNT": count, "ACTIVE": pairs // len(slots)},
            **{"SHARED": pairs // len(x), **sizes},
            **{"RANKS": ROWS if pairs <= FEW_PAIRS else 2 * ROWS},
            **{
                "BLOCK_K": min(SHRINK_COLUMNS, triton.next_power_of_2(inputs)),
                "UNROLL": SHRINK_UNROLLED,
                **{"EARLY": early, "PDL": pdl},
            },
        }
        tensors = [x, shrunk, *own, experts, slots, self.table]
        maps = (self.maps[each] for each in (projections[0], projections[-1]))
        at = (*maps, layer, own[0].shape[1])
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
        layer: int,
        count: int,
        offset: int,
    ) -> None:
        """Add a projection's deltas to y [pairs, out], from column `offset` on.

        x: [pairs, in]. experts, tokens: int64 [pairs], those of each pair. layer: its index among
        those with experts; count: this rank's experts.
        """
        slots = self.slots[tokens]
        shrunk = self.shrink(x.contiguous(), experts, slots, (projection,), layer, count)
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
        arguments = [*tensors, self.maps[projection], layer, bt.shape[1], stride]
        _EXPAND(key, grid, arguments, constants, {"num_warps": 2, **launch_options(pdl)})

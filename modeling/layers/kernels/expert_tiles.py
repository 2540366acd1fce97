"""Tiles of one expert's pairs: which ones a program has, and what adapters change of them.

A tile has pairs of a few adapters. Its programs turn to one adapter after the other, and read the
adapter's rows of this expert once for all of its pairs.
"""

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modeling.kernels.pairs import UNSPECIALIZED, pages_of_pair, rank_rows

# Arguments are grouped by what they describe.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def tile_of(
    counts: "Any", tiles: "Any", TILED: tl.constexpr, PAIRS: tl.constexpr
) -> "Any":
    """A program's expert, its first pair there, and how many pairs the expert has.

    TILED: program (tile, block), else (share of the pairs, block, expert).
    """
    first, expert = tl.program_id(0) * PAIRS, tl.program_id(2)
    if TILED:
        tile = tiles + tl.program_id(0) * 2
        expert = tl.load(tile)
        first = tl.load(tile + 1, mask=expert >= 0, other=0)
    count = tl.load(counts + expert, mask=expert >= 0, other=0)
    return tl.maximum(expert, 0).to(tl.int64), first, count


@triton.jit  # type: ignore[untyped-decorator]
def tile_delta(
    acc: "Any", shrunk: "Any", bt: "Any", slots: "Any", pages: "Any",
    pair: "Any", live: "Any", of: "Any", expert: "Any", n: "Any",
    layer: "Any", num_pages: "Any", width: "Any",
    ACTIVE: tl.constexpr,
    MAPS: tl.constexpr, STRIDE: tl.constexpr, PAGES: tl.constexpr, WIDE: tl.constexpr,
) -> "Any":
    """acc [columns n, pairs] and the deltas of these pairs of one expert; shrunk: of the map."""
    r = tl.arange(0, 16)
    left = tl.load(slots + pair // ACTIVE, mask=live, other=-1)
    slot = tl.max(left, axis=0)
    while slot >= 0:
        own = left == slot
        at, count = pages_of_pair(pages, slot, of, expert, MAPS, STRIDE, PAGES, WIDE)
        for start in range(0, count, 2):
            rows, used = rank_rows(at, start, r, layer, num_pages, width, PAGES)
            tile = tl.load(bt + rows[:, None] + n[None, :], mask=used[:, None], other=0.0)
            factor = tl.load(
                shrunk + pair[None, :].to(tl.int64) * (PAGES * 8) + start * 8 + r[:, None],
                mask=used[:, None] & own[None, :], other=0.0,
            )
            acc = tl.dot(tl.trans(tile).to(tl.float32), factor, acc, input_precision="tf32")
        left = tl.where(own, -1, left)
        slot = tl.max(left, axis=0)
    return acc


@triton.jit(do_not_specialize=UNSPECIALIZED)  # type: ignore[untyped-decorator]
def shrink_tile_kernel(
    x: "Any", shrunk: "Any", counts: "Any", tiles: "Any", table: "Any", num_tokens: "Any",
    a0: "Any", a1: "Any", slots: "Any", pages: "Any",
    map0: "Any", map1: "Any", layer: "Any", num_pages: "Any",
    INPUTS: tl.constexpr, ACTIVE: tl.constexpr, SHARED: tl.constexpr,
    PAIRS: tl.constexpr, TILED: tl.constexpr, BLOCK_K: tl.constexpr,
    MAPS: tl.constexpr, STRIDE: tl.constexpr, PAGES: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One tile's pairs, of one target: shrunk [targets, pairs, PAGES * 8], see `PairDeltas.shrink`.

    Programs: see `tile_of`; their second number is the target's. SHARED: pairs of a row of x.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    target = tl.program_id(1)
    of, a = map0, a0
    if target == 1:
        of, a = map1, a1
    expert, first, count = tile_of(counts, tiles, TILED, PAIRS)
    if first < count:
        m = first + tl.arange(0, PAIRS)
        live = m < count
        pair = tl.load(table + expert * num_tokens + m, mask=live, other=0)
        r, k = tl.arange(0, 16), tl.arange(0, BLOCK_K)
        inputs = x + (pair // SHARED)[None, :].to(tl.int64) * INPUTS + k[:, None]
        out = shrunk + (target * num_tokens * ACTIVE + pair)[None, :].to(tl.int64) * (PAGES * 8)
        left = tl.load(slots + pair // ACTIVE, mask=live, other=-1)
        slot = tl.max(left, axis=0)
        while slot >= 0:
            own = left == slot
            at, has = pages_of_pair(pages, slot, of, expert, MAPS, STRIDE, PAGES, WIDE)
            for start in range(0, has, 2):
                rows, used = rank_rows(at, start, r, layer, num_pages, INPUTS, PAGES)
                acc = tl.zeros([16, PAIRS], dtype=tl.float32)
                for k0 in range(0, INPUTS, BLOCK_K):
                    inside = k0 + k < INPUTS
                    tile = tl.load(
                        a + rows[:, None] + (k0 + k)[None, :],
                        mask=used[:, None] & inside[None, :], other=0.0,
                    )
                    part = tl.load(inputs + k0, mask=own[None, :] & inside[:, None], other=0.0)
                    acc = tl.dot(tile.to(x.dtype.element_ty), part, acc)
                tl.store(out + start * 8 + r[:, None], acc, mask=used[:, None] & own[None, :])
            left = tl.where(own, -1, left)
            slot = tl.max(left, axis=0)


# fmt: on

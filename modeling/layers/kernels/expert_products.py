"""The kernels of `experts.py`: of one pair, and of a tile of one expert's pairs.

With DELTAS they add what adapters change, before silu and to the sum of a token's pairs: see
`modeling.kernels.pairs`. layer: its index among those with experts; num_pages: of a pool. map0,
map1: the maps' indices in the table of adapters' pages.
"""

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modeling.kernels.pairs import (
    COUNTED,
    UNSPECIALIZED,
    pages_of_pair,
    pair_delta,
    rank_rows,
    token_delta,
)
from modeling.kernels.tiles import prefetch
from modeling.layers.kernels.expert_tiles import tile_delta, tile_of

# Arguments are grouped by what they describe.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def enter_kernel(
    ids: "Any", counts: "Any", table: "Any", num_tokens: "Any",
    ACTIVE: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """Enter one token's pairs in the table [experts, tokens]; counts [experts] begin as zeros."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0)
    n = tl.arange(0, WIDTH)
    inside = n < ACTIVE
    expert = tl.load(ids + token * ACTIVE + n, mask=inside, other=0)
    at = tl.atomic_add(counts + expert, 1, mask=inside, sem="relaxed")
    tl.store(table + expert * num_tokens + at, token * ACTIVE + n, mask=inside)


@triton.jit(do_not_specialize=COUNTED)  # type: ignore[untyped-decorator]
def enter_deltas_kernel(
    ids: "Any", counts: "Any", order: "Any", deltas: "Any", num_tokens: "Any", num_pairs: "Any",
    shrunk: "Any", bt0: "Any", bt1: "Any", slots: "Any", table: "Any",
    map0: "Any", map1: "Any", layer: "Any", num_pages: "Any",
    WIDTH: tl.constexpr, ACTIVE: tl.constexpr, BLOCK_N: tl.constexpr,
    MAPS: tl.constexpr, STRIDE: tl.constexpr, PAGES: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (pair, map, block): deltas [maps, pairs, WIDTH]; the first one enters the pair.

    order: the table of `enter_kernel`. table: of adapters' pages.
    """
    pair, target = tl.program_id(0), tl.program_id(1)
    first = tl.program_id(2) * BLOCK_N
    of, bt = map0, bt0
    if target == 1:
        of, bt = map1, bt1
    slot = tl.load(slots + pair // ACTIVE)
    # Written before the kernel ahead began, which waited for it.
    expert = tl.load(ids + pair).to(tl.int64)
    at, count = pages_of_pair(table, slot, of, expert, MAPS, STRIDE, PAGES, WIDE)
    if PDL:
        if count > 0:
            rows, _ = rank_rows(at, 0, tl.arange(0, 16), layer, num_pages, WIDTH, PAGES)
            lines = tl.minimum(first + tl.arange(0, BLOCK_N // 64) * 64, WIDTH - 1)
            prefetch(bt + rows[:, None] + lines[None, :])
        gdc_wait()
        gdc_launch_dependents()
    if (target == 0) & (first == 0):
        position = tl.atomic_add(counts + expert, 1, sem="relaxed")
        tl.store(order + expert * num_tokens + position, pair)
    n = first + tl.arange(0, BLOCK_N)
    row = target * num_pairs + pair
    own = shrunk + row * (PAGES * 8)
    delta = pair_delta(own, bt, at, count, n, WIDTH, layer, num_pages, PAGES)
    tl.store(deltas + row.to(tl.int64) * WIDTH + n, delta, mask=n < WIDTH)


@triton.jit(do_not_specialize=["most"])  # type: ignore[untyped-decorator]
def tiles_kernel(
    counts: "Any", tiles: "Any", most: "Any",
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Cut all experts' pairs into tiles [most, 2]: expert, -1 behind the last tile; first pair."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    e = tl.arange(0, WIDTH)
    blocks = (tl.load(counts + e, mask=e < EXPERTS, other=0) + PAIRS - 1) // PAIRS
    before = tl.cumsum(blocks, axis=0) - blocks
    for each in range(tl.max(blocks, axis=0)):
        at = tiles + (before + each) * 2
        tl.store(at, e, mask=each < blocks)
        tl.store(at + 1, tl.zeros([WIDTH], tl.int32) + each * PAIRS, mask=each < blocks)
    for start in range(tl.sum(blocks, axis=0), most, BLOCK):
        t = start + tl.arange(0, BLOCK)
        tl.store(tiles + t * 2, tl.full([BLOCK], -1, tl.int32), mask=t < most)


@triton.jit  # type: ignore[untyped-decorator]
def _up_tile(
    x: "Any", weight: "Any", inner: "Any", table: "Any", deltas: "Any", num_tokens: "Any",
    shrunk: "Any", bt0: "Any", bt1: "Any", slots: "Any", pages: "Any",
    map0: "Any", map1: "Any", layer: "Any", num_pages: "Any",
    expert: "Any", first: "Any", count: "Any",
    INPUTS: tl.constexpr, WIDTH: tl.constexpr, ACTIVE: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, MADE: tl.constexpr,
    DELTAS: tl.constexpr, MAPS: tl.constexpr, STRIDE: tl.constexpr, PAGES: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """`up_kernel` for PAIRS pairs of an expert from `first` on."""
    m = first + tl.arange(0, PAIRS)
    live = m < count
    pair = tl.load(table + expert * num_tokens + m, mask=live, other=0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    gates = weight + (expert * 2 * WIDTH + n)[:, None] * INPUTS + k[None, :]
    ups = gates + WIDTH * INPUTS
    rows = x + (pair // ACTIVE)[None, :] * INPUTS + k[:, None]
    gate = tl.zeros([BLOCK_N, PAIRS], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, PAIRS], dtype=tl.float32)
    own = deltas + pair[None, :].to(tl.int64) * WIDTH + n[:, None]
    behind = num_tokens * (ACTIVE * WIDTH)
    # Loaded now, to be there when the products are, where there are registers for them.
    if MADE and PAIRS <= 32:
        of_gate = tl.load(own, mask=live[None, :], other=0.0)
        of_up = tl.load(own + behind, mask=live[None, :], other=0.0)
    for k0 in range(0, INPUTS, BLOCK_K):
        x_tile = tl.load(rows + k0, mask=live[None, :], other=0.0)
        gate = tl.dot(tl.load(gates + k0), x_tile, gate)
        up = tl.dot(tl.load(ups + k0), x_tile, up)
    if MADE and PAIRS > 32:
        of_gate = tl.load(own, mask=live[None, :], other=0.0)
        of_up = tl.load(own + behind, mask=live[None, :], other=0.0)
    if MADE:
        gate += of_gate
        up += of_up
    if DELTAS:
        gate = tile_delta(
            gate, shrunk, bt0, slots, pages, pair, live, map0, expert, n, layer, num_pages,
            WIDTH, ACTIVE, MAPS, STRIDE, PAGES, WIDE,
        )
        up = tile_delta(
            up, shrunk + num_tokens * (ACTIVE * PAGES * 8), bt1, slots, pages, pair, live, map1,
            expert, n, layer, num_pages, WIDTH, ACTIVE, MAPS, STRIDE, PAGES, WIDE,
        )
    value = gate * tl.sigmoid(gate) * up
    out = inner + pair[None, :] * WIDTH + n[:, None]
    tl.store(out, value.to(inner.dtype.element_ty), mask=live[None, :])


@triton.jit(do_not_specialize=UNSPECIALIZED)  # type: ignore[untyped-decorator]
def up_kernel(
    x: "Any", weight: "Any", inner: "Any", counts: "Any", tiles: "Any", table: "Any",
    deltas: "Any", num_tokens: "Any",
    shrunk: "Any", bt0: "Any", bt1: "Any", slots: "Any", pages: "Any",
    map0: "Any", map1: "Any", layer: "Any", num_pages: "Any",
    INPUTS: tl.constexpr, WIDTH: tl.constexpr, ACTIVE: tl.constexpr,
    PAIRS: tl.constexpr, TILED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WIDTHS: tl.constexpr, MADE: tl.constexpr,
    DELTAS: tl.constexpr, MAPS: tl.constexpr, STRIDE: tl.constexpr, PAGES: tl.constexpr,
    WIDE: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """One block of an expert's inner columns, gate and up, for up to PAIRS of its pairs.

    deltas: with MADE, float32 [2, pairs, WIDTH], added to gate and up. WIDTHS: of tiles, PAIRS and
    its halves: an expert's last pairs take the least one that has them.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, first, count = tile_of(counts, tiles, TILED, PAIRS)
    left = tl.minimum(count - first, PAIRS)
    for w in tl.static_range(WIDTHS):
        if (left <= (PAIRS >> w)) & (left > ((PAIRS >> (w + 1)) if w + 1 < WIDTHS else 0)):
            _up_tile(
                x, weight, inner, table, deltas, num_tokens, shrunk, bt0, bt1, slots, pages,
                map0, map1, layer, num_pages, expert, first, count,
                INPUTS, WIDTH, ACTIVE, PAIRS >> w, BLOCK_N, BLOCK_K, MADE,
                DELTAS, MAPS, STRIDE, PAGES, WIDE,
            )


@triton.jit  # type: ignore[untyped-decorator]
def _down_tile(
    inner: "Any", weight: "Any", shares: "Any", out: "Any", table: "Any", num_tokens: "Any",
    shrunk: "Any", bt: "Any", slots: "Any", pages: "Any",
    map0: "Any", layer: "Any", num_pages: "Any",
    expert: "Any", first: "Any", count: "Any",
    INPUTS: tl.constexpr, WIDTH: tl.constexpr, ACTIVE: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DELTAS: tl.constexpr, MAPS: tl.constexpr, STRIDE: tl.constexpr, PAGES: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """`down_kernel` for PAIRS pairs of an expert from `first` on."""
    m = first + tl.arange(0, PAIRS)
    live = m < count
    pair = tl.load(table + expert * num_tokens + m, mask=live, other=0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    matrix = weight + (expert * WIDTH + n)[:, None] * INPUTS + k[None, :]
    rows = inner + pair[None, :] * INPUTS + k[:, None]
    acc = tl.zeros([BLOCK_N, PAIRS], dtype=tl.float32)
    for k0 in range(0, INPUTS, BLOCK_K):
        inner_tile = tl.load(rows + k0, mask=live[None, :], other=0.0)
        acc = tl.dot(tl.load(matrix + k0), inner_tile, acc)
    if DELTAS:
        acc = tile_delta(
            acc, shrunk, bt, slots, pages, pair, live, map0, expert, n, layer, num_pages,
            WIDTH, ACTIVE, MAPS, STRIDE, PAGES, WIDE,
        )
    acc *= tl.load(shares + pair, mask=live, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + pair[None, :] * WIDTH + n[:, None], acc.to(out.dtype.element_ty), mask=live[None, :]
    )


@triton.jit(do_not_specialize=UNSPECIALIZED)  # type: ignore[untyped-decorator]
def down_kernel(
    inner: "Any", weight: "Any", shares: "Any", out: "Any",
    counts: "Any", tiles: "Any", table: "Any", num_tokens: "Any",
    shrunk: "Any", bt: "Any", slots: "Any", pages: "Any",
    map0: "Any", layer: "Any", num_pages: "Any",
    INPUTS: tl.constexpr, WIDTH: tl.constexpr, ACTIVE: tl.constexpr,
    PAIRS: tl.constexpr, TILED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WIDTHS: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr,
    DELTAS: tl.constexpr, MAPS: tl.constexpr, STRIDE: tl.constexpr, PAGES: tl.constexpr,
    WIDE: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """One block of an expert's outputs for up to PAIRS of its pairs, by the pairs' weights."""
    # Written before the kernel ahead began, which waited for it.
    expert, first, count = tile_of(counts, tiles, TILED, PAIRS)
    if PDL:
        if first < count:
            n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
            ahead = tl.minimum(tl.arange(0, LINES) * LINE, INPUTS - 1)
            prefetch(weight + (expert * WIDTH + n)[:, None] * INPUTS + ahead[None, :])
        gdc_wait()
        gdc_launch_dependents()
    left = tl.minimum(count - first, PAIRS)
    for w in tl.static_range(WIDTHS):
        if (left <= (PAIRS >> w)) & (left > ((PAIRS >> (w + 1)) if w + 1 < WIDTHS else 0)):
            _down_tile(
                inner, weight, shares, out, table, num_tokens, shrunk, bt, slots, pages,
                map0, layer, num_pages, expert, first, count,
                INPUTS, WIDTH, ACTIVE, PAIRS >> w, BLOCK_N, BLOCK_K,
                DELTAS, MAPS, STRIDE, PAGES, WIDE,
            )


@triton.jit  # type: ignore[untyped-decorator]
def sum_pairs(
    out: "Any", y: "Any", counts: "Any", token: "Any", first: "Any", total: "Any",
    WIDTH: tl.constexpr, ACTIVE: tl.constexpr, BLOCK_N: tl.constexpr,
    EXPERTS: tl.constexpr, COUNTS: tl.constexpr,
) -> None:
    """Add one token's pairs in order to a total; the first program leaves counts as zeros again."""
    n = first + tl.arange(0, BLOCK_N)
    row = out + token.to(tl.int64) * (ACTIVE * WIDTH) + n
    for p in tl.static_range(ACTIVE):
        total += tl.load(row + p * WIDTH, mask=n < WIDTH, other=0.0).to(tl.float32)
    tl.store(y + token * WIDTH + n, total.to(y.dtype.element_ty), mask=n < WIDTH)
    if (token == 0) & (first == 0):
        e = tl.arange(0, COUNTS)
        tl.store(counts + e, tl.zeros([COUNTS], dtype=tl.int32), mask=e < EXPERTS)


@triton.jit  # type: ignore[untyped-decorator]
def sum_kernel(
    out: "Any", y: "Any", counts: "Any",
    WIDTH: tl.constexpr, ACTIVE: tl.constexpr, BLOCK_N: tl.constexpr,
    EXPERTS: tl.constexpr, COUNTS: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """Sum one token's pairs in order; the first program leaves counts as zeros again."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token, first = tl.program_id(0), tl.program_id(1) * BLOCK_N
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    sum_pairs(out, y, counts, token, first, total, WIDTH, ACTIVE, BLOCK_N, EXPERTS, COUNTS)


@triton.jit(do_not_specialize=UNSPECIALIZED)  # type: ignore[untyped-decorator]
def sum_deltas_kernel(
    out: "Any", y: "Any", counts: "Any", ids: "Any", shares: "Any",
    shrunk: "Any", bt: "Any", slots: "Any", table: "Any",
    map0: "Any", layer: "Any", num_pages: "Any",
    WIDTH: tl.constexpr, ACTIVE: tl.constexpr, PAIRS: tl.constexpr, BLOCK_N: tl.constexpr,
    EXPERTS: tl.constexpr, COUNTS: tl.constexpr,
    MAPS: tl.constexpr, STRIDE: tl.constexpr, PAGES: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """`sum_kernel` with the deltas of the token's pairs by their weights."""
    token, first = tl.program_id(0), tl.program_id(1) * BLOCK_N
    total = token_delta(
        shrunk, bt, ids, shares, slots, table, token, first, map0, layer, num_pages,
        WIDTH, BLOCK_N, ACTIVE, PAIRS, MAPS, STRIDE, PAGES, WIDE, PDL,
    )
    sum_pairs(out, y, counts, token, first, total, WIDTH, ACTIVE, BLOCK_N, EXPERTS, COUNTS)


@triton.jit(do_not_specialize=COUNTED)  # type: ignore[untyped-decorator]
def up_of_pair_kernel(
    x: "Any", weight: "Any", ids: "Any", inner: "Any", num_pairs: "Any",
    shrunk: "Any", bt0: "Any", bt1: "Any", slots: "Any", pages: "Any",
    map0: "Any", map1: "Any", layer: "Any", num_pages: "Any",
    INPUTS: tl.constexpr, WIDTH: tl.constexpr, ACTIVE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DELTAS: tl.constexpr, MAPS: tl.constexpr, STRIDE: tl.constexpr, PAGES: tl.constexpr,
    WIDE: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """One block of one pair's inner columns."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.program_id(1)
    expert = tl.load(ids + pair).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    gates = weight + (expert * 2 * WIDTH + n)[:, None] * INPUTS + k[None, :]
    ups = gates + WIDTH * INPUTS
    rows = x + pair // ACTIVE * INPUTS + k
    gate = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for k0 in range(0, INPUTS, BLOCK_K):
        own = tl.load(rows + k0).to(tl.float32)[None, :]
        gate += tl.load(gates + k0).to(tl.float32) * own
        up += tl.load(ups + k0).to(tl.float32) * own
    summed, upper = tl.sum(gate, axis=1), tl.sum(up, axis=1)
    if DELTAS:
        slot, own = tl.load(slots + pair // ACTIVE), shrunk + pair * (PAGES * 8)
        at, of_gate = pages_of_pair(pages, slot, map0, expert, MAPS, STRIDE, PAGES, WIDE)
        summed += pair_delta(own, bt0, at, of_gate, n, WIDTH, layer, num_pages, PAGES)
        at, of_up = pages_of_pair(pages, slot, map1, expert, MAPS, STRIDE, PAGES, WIDE)
        own += num_pairs * (PAGES * 8)
        upper += pair_delta(own, bt1, at, of_up, n, WIDTH, layer, num_pages, PAGES)
    value = summed * tl.sigmoid(summed) * upper
    tl.store(inner + pair * WIDTH + n, value.to(inner.dtype.element_ty))


@triton.jit(do_not_specialize=UNSPECIALIZED)  # type: ignore[untyped-decorator]
def down_of_token_kernel(
    inner: "Any", weight: "Any", ids: "Any", shares: "Any", y: "Any",
    shrunk: "Any", bt: "Any", slots: "Any", pages: "Any",
    map0: "Any", layer: "Any", num_pages: "Any",
    INPUTS: tl.constexpr, WIDTH: tl.constexpr, ACTIVE: tl.constexpr, POWER: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    LINE: tl.constexpr, LINES: tl.constexpr,
    DELTAS: tl.constexpr, MAPS: tl.constexpr, STRIDE: tl.constexpr, PAGES: tl.constexpr,
    WIDE: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """One block of one token's outputs, summed over its experts."""
    token = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    if PDL:
        # Ids were written before the kernel ahead began, which waited for them.
        for p in tl.static_range(ACTIVE):
            expert = tl.load(ids + token * ACTIVE + p).to(tl.int64)
            ahead = tl.minimum(tl.arange(0, LINES) * LINE, INPUTS - 1)
            prefetch(weight + (expert * WIDTH + n)[:, None] * INPUTS + ahead[None, :])
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for p in tl.static_range(ACTIVE):
        pair = token * ACTIVE + p
        expert = tl.load(ids + pair).to(tl.int64)
        share = tl.load(shares + pair).to(tl.float32)
        tiles = weight + (expert * WIDTH + n)[:, None] * INPUTS + k[None, :]
        for k0 in tl.static_range(0, INPUTS, BLOCK_K):
            own = tl.load(inner + pair * INPUTS + k0 + k).to(tl.float32) * share
            acc += tl.load(tiles + k0).to(tl.float32) * own[None, :]
    total = tl.sum(acc, axis=1)
    if DELTAS:
        total += token_delta(
            shrunk, bt, ids, shares, slots, pages, token, tl.program_id(0) * BLOCK_N, map0,
            layer, num_pages, WIDTH, BLOCK_N, ACTIVE, POWER, MAPS, STRIDE, PAGES, WIDE, False,
        )
    tl.store(y + token * WIDTH + n, total.to(y.dtype.element_ty))


# fmt: on

"""Experts of a step of few tokens in Triton.

    inner[p, i] = silu( sum_h Wg[e(p), i, h] x[t(p), h] ) * sum_h Wu[e(p), i, h] x[t(p), h]
    y[t, h]     = sum_{p of t} w[p] sum_i Wd[e(p), h, i] inner[p, i]

p: a pair of a token t(p) and one of the experts that compute it, e(p); w: its weight. Two ways:

* One or two tokens share few experts, so every pair reads its expert's weights for itself: two
  launches, sums without tensor cores.
* More tokens: a table has the pairs of each expert, and a program reads a tile of one expert's
  weights once for many pairs, which are the narrow side of the tensor cores' instruction. An expert
  without pairs costs an empty program. In which order an expert's pairs lie in the table is left to
  chance; no pair's result depends on it.

Launches are programmatic dependent ones, as in `modeling.layers.triton`.
"""

from dataclasses import dataclass, replace
from functools import cache
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modeling.triton_launch import Launcher, aligned, has_dependent_launch, launch_options
from modeling.triton_tiles import prefetch


@dataclass(frozen=True)
class Tile:
    """What a program reads of a weight at once, and how it is compiled."""

    outputs: int
    inputs: int
    warps: int
    stages: int = 3

    def fitted(self, outputs: int, inputs: int) -> "Tile":
        """Return the largest part of it of which whole numbers make a weight [outputs, inputs]."""
        return replace(self, outputs=gcd(self.outputs, outputs), inputs=gcd(self.inputs, inputs))


@dataclass(frozen=True)
class ExpertsCut:
    """How experts of up to `tokens` tokens are cut.

    pairs: of a program; 0: every pair for itself.
    """

    tokens: int
    pairs: int
    up: Tile
    down: Tile


CUTS = (
    ExpertsCut(2, 0, Tile(2, 2048, 4), Tile(4, 256, 4)),
    ExpertsCut(128, 16, Tile(64, 128, 4, 3), Tile(64, 128, 4, 3)),
    ExpertsCut(256, 32, Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)),
)
"""As measured on an H200 with 128 experts of 768, 8 of them a token, hidden size 2048. Beyond the
last, a library's grouped products are faster."""

MOST_TOKENS = CUTS[-1].tokens

LEAST = 32
"""Of which an expert's sizes are multiples: smaller tiles are too slow."""

SUM_COLUMNS = 512

LINE = 64
"""Numbers of half precision that a cache line holds."""

# Arguments are grouped by what they describe.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def _enter(
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


@triton.jit  # type: ignore[untyped-decorator]
def _up(
    x: "Any", weight: "Any", inner: "Any", counts: "Any", table: "Any", num_tokens: "Any",
    INPUTS: tl.constexpr, WIDTH: tl.constexpr, ACTIVE: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """One block of an expert's inner columns, gate and up, for up to PAIRS of its pairs."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    first = tl.program_id(0) * PAIRS
    expert = tl.program_id(2).to(tl.int64)
    count = tl.load(counts + expert)
    if first < count:
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
        for k0 in range(0, INPUTS, BLOCK_K):
            x_tile = tl.load(rows + k0, mask=live[None, :], other=0.0)
            gate = tl.dot(tl.load(gates + k0), x_tile, gate)
            up = tl.dot(tl.load(ups + k0), x_tile, up)
        value = gate * tl.sigmoid(gate) * up
        out = inner + pair[None, :] * WIDTH + n[:, None]
        tl.store(out, value.to(inner.dtype.element_ty), mask=live[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _down(
    inner: "Any", weight: "Any", shares: "Any", out: "Any",
    counts: "Any", table: "Any", num_tokens: "Any",
    INPUTS: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    LINE: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """One block of an expert's outputs for up to PAIRS of its pairs, by the pairs' weights."""
    first = tl.program_id(0) * PAIRS
    expert = tl.program_id(2).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Written before the kernel ahead began, which waited for it.
    count = tl.load(counts + expert)
    if PDL:
        if first < count:
            ahead = tl.minimum(tl.arange(0, LINES) * LINE, INPUTS - 1)
            prefetch(weight + (expert * WIDTH + n)[:, None] * INPUTS + ahead[None, :])
        gdc_wait()
        gdc_launch_dependents()
    if first < count:
        m = first + tl.arange(0, PAIRS)
        live = m < count
        pair = tl.load(table + expert * num_tokens + m, mask=live, other=0)
        k = tl.arange(0, BLOCK_K)
        tiles = weight + (expert * WIDTH + n)[:, None] * INPUTS + k[None, :]
        rows = inner + pair[None, :] * INPUTS + k[:, None]
        acc = tl.zeros([BLOCK_N, PAIRS], dtype=tl.float32)
        for k0 in range(0, INPUTS, BLOCK_K):
            inner_tile = tl.load(rows + k0, mask=live[None, :], other=0.0)
            acc = tl.dot(tl.load(tiles + k0), inner_tile, acc)
        acc *= tl.load(shares + pair, mask=live, other=0.0).to(tl.float32)[None, :]
        tl.store(
            out + pair[None, :] * WIDTH + n[:, None], acc.to(out.dtype.element_ty),
            mask=live[None, :],
        )


@triton.jit  # type: ignore[untyped-decorator]
def _sum(
    out: "Any", y: "Any", counts: "Any",
    WIDTH: tl.constexpr, ACTIVE: tl.constexpr, PAIRS: tl.constexpr, BLOCK_N: tl.constexpr,
    EXPERTS: tl.constexpr, COUNTS: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """Sum one token's pairs in order; the first program leaves counts as zeros again."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token, n = tl.program_id(0), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    p = tl.arange(0, PAIRS)
    mask = (p < ACTIVE)[:, None] & (n < WIDTH)[None, :]
    found = tl.load(out + (token * ACTIVE + p)[:, None] * WIDTH + n[None, :], mask=mask, other=0.0)
    total = tl.sum(found.to(tl.float32), axis=0)
    tl.store(y + token * WIDTH + n, total.to(y.dtype.element_ty), mask=n < WIDTH)
    if (token == 0) & (tl.program_id(1) == 0):
        e = tl.arange(0, COUNTS)
        tl.store(counts + e, tl.zeros([COUNTS], dtype=tl.int32), mask=e < EXPERTS)


@triton.jit  # type: ignore[untyped-decorator]
def _up_of_pair(
    x: "Any", weight: "Any", ids: "Any", inner: "Any",
    INPUTS: tl.constexpr, WIDTH: tl.constexpr, ACTIVE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
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
    summed = tl.sum(gate, axis=1)
    value = summed * tl.sigmoid(summed) * tl.sum(up, axis=1)
    tl.store(inner + pair * WIDTH + n, value.to(inner.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def _down_of_token(
    inner: "Any", weight: "Any", ids: "Any", shares: "Any", y: "Any",
    INPUTS: tl.constexpr, WIDTH: tl.constexpr, ACTIVE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    LINE: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
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
    tl.store(y + token * WIDTH + n, tl.sum(acc, axis=1).to(y.dtype.element_ty))


# fmt: on

_ENTER, _UP, _DOWN, _SUM = map(Launcher, (_enter, _up, _down, _sum))
_UP_OF_PAIR, _DOWN_OF_TOKEN = Launcher(_up_of_pair), Launcher(_down_of_token)


def experts(
    x: Tensor, up: Tensor, down: Tensor, ids: Tensor, shares: Tensor, counts: Tensor
) -> Tensor:
    """[tokens, hidden] to the same shape, of at most MOST_TOKENS tokens.

    up: [experts, 2 * inner, hidden], gate's rows first. down: [experts, hidden, inner].
    ids, shares: [tokens, experts of one]. counts: int32 [experts] zeros, which it leaves as zeros.
    """
    cut = _cut(len(x), *down.shape[1:])
    if not cut.pairs:
        return _by_pair(cut, x, up, down, ids, shares)
    return _by_expert(cut, x, up, down, ids, shares, counts)


@cache
def _cut(tokens: int, hidden: int, width: int) -> ExpertsCut:
    cut = next(each for each in CUTS if tokens <= each.tokens)
    return replace(cut, up=cut.up.fitted(width, hidden), down=cut.down.fitted(hidden, width))


def _by_pair(
    cut: ExpertsCut, x: Tensor, up: Tensor, down: Tensor, ids: Tensor, shares: Tensor
) -> Tensor:
    (tokens, hidden), active, width = x.shape, ids.shape[1], down.shape[2]
    inner = torch.empty(tokens * active, width, dtype=x.dtype, device=x.device)
    y = torch.empty_like(x)
    pdl = has_dependent_launch(x.device)
    kinds = (x.device, x.dtype, shares.dtype, ids.dtype)
    constants: dict[str, Any] = {"INPUTS": hidden, "WIDTH": width, "ACTIVE": active}
    constants |= _sizes(cut.up) | {"PDL": pdl}
    tensors = [x, up, ids, inner]
    grid = (width // cut.up.outputs, tokens * active)
    _UP_OF_PAIR(
        (kinds, aligned(*tensors), *constants.values()),
        *(grid, tensors, constants, _options(cut.up, pdl)),
    )
    constants = {"INPUTS": width, "WIDTH": hidden, "ACTIVE": active, **_sizes(cut.down)}
    constants |= _lines(width) | {"PDL": pdl}
    tensors = [inner, down, ids, shares, y]
    _DOWN_OF_TOKEN(
        (kinds, aligned(*tensors), *constants.values()),
        *((hidden // cut.down.outputs, tokens), tensors, constants, _options(cut.down, pdl)),
    )
    return y


def _by_expert(
    cut: ExpertsCut,
    x: Tensor,
    up: Tensor,
    down: Tensor,
    ids: Tensor,
    shares: Tensor,
    counts: Tensor,
) -> Tensor:
    (tokens, hidden), active, count = x.shape, ids.shape[1], len(up)
    width = down.shape[2]
    table = torch.empty(count, tokens, dtype=torch.int32, device=x.device)
    inner = torch.empty(tokens * active, width, dtype=x.dtype, device=x.device)
    out = torch.empty(tokens * active, hidden, dtype=x.dtype, device=x.device)
    y, pdl = torch.empty_like(x), has_dependent_launch(x.device)
    pointers = (x, up, down, ids, shares, counts, table, inner, out, y)
    forms = (tokens % 16 == 0, tokens == 1, aligned(*pointers))
    kinds = (x.device, x.dtype, shares.dtype, ids.dtype, *forms)
    small = {"num_warps": 1, **launch_options(pdl)}
    power = triton.next_power_of_2(active)
    constants: dict[str, Any] = {"ACTIVE": active, "WIDTH": power, "PDL": pdl}
    key = (kinds, *constants.values())
    _ENTER(key, (tokens,), [ids, counts, table, tokens], constants, small)
    blocks, of_pairs = -(-tokens // cut.pairs), {"PAIRS": cut.pairs}
    constants = {"INPUTS": hidden, "WIDTH": width, "ACTIVE": active, **of_pairs}
    constants |= _sizes(cut.up) | {"PDL": pdl}
    grid = (blocks, width // cut.up.outputs, count)
    tensors: list[Any] = [x, up, inner, counts, table, tokens]
    _UP((kinds, *constants.values()), grid, tensors, constants, _options(cut.up, pdl))
    constants = {"INPUTS": width, "WIDTH": hidden, **of_pairs, **_sizes(cut.down)}
    constants |= _lines(width) | {"PDL": pdl}
    grid = (blocks, hidden // cut.down.outputs, count)
    tensors = [inner, down, shares, out, counts, table, tokens]
    _DOWN((kinds, *constants.values()), grid, tensors, constants, _options(cut.down, pdl))
    constants = {
        **{"WIDTH": hidden, "ACTIVE": active, "PAIRS": power, "BLOCK_N": SUM_COLUMNS},
        **{"EXPERTS": count, "COUNTS": triton.next_power_of_2(count), "PDL": pdl},
    }
    grid = (tokens, -(-hidden // SUM_COLUMNS), 1)
    _SUM((kinds, *constants.values()), grid, [out, y, counts], constants, {**small, "num_warps": 4})
    return y


def _sizes(tile: Tile) -> dict[str, int]:
    return {"BLOCK_N": tile.outputs, "BLOCK_K": tile.inputs}


def _options(tile: Tile, pdl: bool) -> dict[str, Any]:
    return {"num_warps": tile.warps, "num_stages": tile.stages, **launch_options(pdl)}


def _lines(inputs: int) -> dict[str, int]:
    return {"LINE": LINE, "LINES": triton.next_power_of_2(-(-inputs // LINE))}


def fits(up: Tensor, down: Tensor) -> bool:
    """Whether the tiles fit weights of these shapes; see `experts`."""
    is_whole = all(size % LEAST == 0 for size in down.shape[1:])
    is_half = up.dtype in (torch.bfloat16, torch.float16)
    return is_half and is_whole and up.is_contiguous() and down.is_contiguous()

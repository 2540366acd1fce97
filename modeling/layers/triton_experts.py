"""Experts of a step of few tokens in Triton: three launches around their weights.

    inner[p, i] = silu( sum_h Wg[e(p), i, h] x[t(p), h] ) * sum_h Wu[e(p), i, h] x[t(p), h]
    out[p, h]   = w[p] sum_i Wd[e(p), h, i] inner[p, i]
    y[t, h]     = sum_{p of t} out[p, h]

p: a pair of a token t(p) and one of the experts that compute it, e(p); w: its weight. A table has
the pairs of each expert, so a program reads a tile of one expert's weights once for up to 16 pairs,
and an expert without pairs costs an empty program. The few pairs are the narrow side of the tensor
cores' instruction. In which order an expert's pairs lie in the table is left to chance; no pair's
result depends on it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from modeling.triton_launch import Launcher, aligned

ROWS = 16
"""Pairs of a program: fewer columns get no warpgroup instruction."""

OUTPUTS = 64
UP_INPUTS, DOWN_INPUTS = 128, 64
"""Of a tile of weights. Whole numbers of them make a model's sizes, or it is not served so."""

OPTIONS = {"num_warps": 4, "num_stages": 4}

MOST_TOKENS = 256
"""Beyond, a library's grouped products are faster than these tiles."""

SUM_COLUMNS = 512

# Arguments are grouped by what they describe.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def _enter(
    ids: "Any", counts: "Any", table: "Any", num_tokens: "Any",
    ACTIVE: tl.constexpr, WIDTH: tl.constexpr,
) -> None:
    """Enter one token's pairs in the table [experts, tokens]; counts [experts] begin as zeros."""
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
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:
    """One block of an expert's inner columns, gate and up, for up to ROWS of its pairs."""
    expert = tl.program_id(1).to(tl.int64)
    first = tl.program_id(2) * ROWS
    count = tl.load(counts + expert)
    if first < count:
        m = first + tl.arange(0, ROWS)
        live = m < count
        pair = tl.load(table + expert * num_tokens + m, mask=live, other=0)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        gates = weight + (expert * 2 * WIDTH + n)[:, None] * INPUTS + k[None, :]
        ups = gates + WIDTH * INPUTS
        rows = x + (pair // ACTIVE)[None, :] * INPUTS + k[:, None]
        gate = tl.zeros([BLOCK_N, ROWS], dtype=tl.float32)
        up = tl.zeros([BLOCK_N, ROWS], dtype=tl.float32)
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
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:
    """One block of an expert's outputs for up to ROWS of its pairs, by the pairs' weights."""
    expert = tl.program_id(1).to(tl.int64)
    first = tl.program_id(2) * ROWS
    count = tl.load(counts + expert)
    if first < count:
        m = first + tl.arange(0, ROWS)
        live = m < count
        pair = tl.load(table + expert * num_tokens + m, mask=live, other=0)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        tiles = weight + (expert * WIDTH + n)[:, None] * INPUTS + k[None, :]
        rows = inner + pair[None, :] * INPUTS + k[:, None]
        acc = tl.zeros([BLOCK_N, ROWS], dtype=tl.float32)
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
    EXPERTS: tl.constexpr, COUNTS: tl.constexpr,
) -> None:
    """Sum one token's pairs in order; the first program leaves counts as zeros again."""
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
def _choose(
    logits: "Any", ids: "Any", shares: "Any",
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, ACTIVE: tl.constexpr, SUMMED: tl.constexpr,
) -> None:
    """One token's best experts by the softmax of its logits; SUMMED: their weights sum to 1."""
    token = tl.program_id(0)
    e = tl.arange(0, WIDTH)
    inside = e < EXPERTS
    own = tl.load(logits + token * EXPERTS + e, mask=inside, other=-float("inf")).to(tl.float32)
    own = tl.exp(own - tl.max(own, axis=0))
    own = own / tl.sum(own, axis=0)
    left = tl.where(inside, own, -1.0)
    total = 0.0
    for n in range(ACTIVE):
        best = tl.max(left, axis=0)
        at = tl.min(tl.where(left == best, e, WIDTH), axis=0)
        tl.store(ids + token * ACTIVE + n, at.to(tl.int64))
        left = tl.where(e == at, -1.0, left)
        total += best
    divisor = total if SUMMED else 1.0
    left = tl.where(inside, own, -1.0)
    for n in range(ACTIVE):
        best = tl.max(left, axis=0)
        at = tl.min(tl.where(left == best, e, WIDTH), axis=0)
        tl.store(shares + token * ACTIVE + n, (best / divisor).to(shares.dtype.element_ty))
        left = tl.where(e == at, -1.0, left)


# fmt: on

_ENTER, _UP, _DOWN, _SUM, _CHOOSE = map(Launcher, (_enter, _up, _down, _sum, _choose))


def choose_experts(logits: Tensor, active: int, summed: bool) -> tuple[Tensor, Tensor]:
    """Logits [tokens, experts] to (weights of logits' type, int64 ids), [tokens, active] each."""
    tokens, count = logits.shape
    ids = torch.empty(tokens, active, dtype=torch.int64, device=logits.device)
    shares = torch.empty(tokens, active, dtype=logits.dtype, device=logits.device)
    constants = {
        "EXPERTS": count,
        "WIDTH": triton.next_power_of_2(count),
        "ACTIVE": active,
        "SUMMED": summed,
    }
    key = (logits.device, logits.dtype, aligned(logits, ids, shares), *constants.values())
    _CHOOSE(key, (tokens,), [logits, ids, shares], constants, {"num_warps": 1})
    return shares, ids


def experts(
    x: Tensor, up: Tensor, down: Tensor, ids: Tensor, shares: Tensor, counts: Tensor
) -> Tensor:
    """[tokens, hidden] to the same shape.

    up: [experts, 2 * inner, hidden], gate's rows first. down: [experts, hidden, inner].
    ids, shares: [tokens, experts of one]. counts: int32 [experts] zeros, which it leaves as zeros.
    """
    (tokens, hidden), active, count = x.shape, ids.shape[1], len(up)
    width = down.shape[2]
    table = torch.empty(count, tokens, dtype=torch.int32, device=x.device)
    inner = torch.empty(tokens * active, width, dtype=x.dtype, device=x.device)
    out = torch.empty(tokens * active, hidden, dtype=x.dtype, device=x.device)
    y = torch.empty_like(x)
    kinds = (x.device, x.dtype, shares.dtype, tokens % 16 == 0, tokens == 1)
    blocks, pairs = -(-tokens // ROWS), triton.next_power_of_2(active)
    tile = {"ROWS": ROWS, "BLOCK_N": OUTPUTS}
    constants = {"ACTIVE": active, "WIDTH": pairs}
    key = (kinds, ids.dtype, aligned(ids, counts, table), *constants.values())
    _ENTER(key, (tokens,), [ids, counts, table, tokens], constants, {"num_warps": 1})
    constants = {"INPUTS": hidden, "WIDTH": width, "ACTIVE": active, **tile, "BLOCK_K": UP_INPUTS}
    key = (kinds, aligned(x, up, inner), *constants.values())
    grid = (width // OUTPUTS, count, blocks)
    _UP(key, grid, [x, up, inner, counts, table, tokens], constants, OPTIONS)
    constants = {"INPUTS": width, "WIDTH": hidden, **tile, "BLOCK_K": DOWN_INPUTS}
    key = (kinds, aligned(inner, down, out), *constants.values())
    grid = (hidden // OUTPUTS, count, blocks)
    _DOWN(key, grid, [inner, down, shares, out, counts, table, tokens], constants, OPTIONS)
    constants = {
        **{"WIDTH": hidden, "ACTIVE": active, "PAIRS": pairs, "BLOCK_N": SUM_COLUMNS},
        **{"EXPERTS": count, "COUNTS": triton.next_power_of_2(count)},
    }
    key = (kinds, aligned(out, y, counts), *constants.values())
    _SUM(key, (tokens, -(-hidden // SUM_COLUMNS)), [out, y, counts], constants, {"num_warps": 4})
    return y


def fits(up: Tensor, down: Tensor) -> bool:
    """Whether the tiles fit weights of these shapes; see `experts`."""
    hidden, width = down.shape[1:]
    sizes = ((hidden, OUTPUTS), (hidden, UP_INPUTS), (width, OUTPUTS), (width, DOWN_INPUTS))
    is_half = up.dtype in (torch.bfloat16, torch.float16)
    return (
        is_half
        and up.is_contiguous()
        and down.is_contiguous()
        and not any(size % tile for size, tile in sizes)
    )

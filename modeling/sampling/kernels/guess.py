"""Tokens drawn before it is known where the kept ones end, in Triton.

A filter keeps the first tokens of an order, up to a share of all weights. The best token with noise
among more than those is the best among those too, if it is one of them: if the weights before it
are less than the share. Where the share is large, it mostly is. If not, no token from it on is
kept, so a second one is drawn among those before it.
"""

from typing import Any

import triton
import triton.language as tl

from modeling.sampling.kernels.cuts import key_of, pairs, part_tokens, weight_of
from modeling.sampling.kernels.draw import middle, row_peak, warped

Pointer = Any


@triton.jit  # type: ignore[untyped-decorator]
def check_kernel(
    logits: "Pointer", rows: "Pointer", peaks: "Pointer", inverse: "Pointer",
    filtered: "Pointer", cuts: "Pointer", least: "Pointer", moments: "Pointer",
    guessed: "Pointer", share: "Pointer", scores: "Pointer", ids_of_scores: "Pointer",
    sums: "Pointer", tokens: "Pointer", vocab: "Any", stride: "Any",
    width: tl.constexpr, spread: tl.constexpr, TYPICAL: tl.constexpr, GUESSED: tl.constexpr,
) -> None:  # fmt: skip
    """Program (filtered row, part): add the weights before the token that `draw_kernel` guessed.

    The last part of a row keeps the token, and says so by a key of -1 in `cuts`; or it lets only
    tokens before this one be drawn from now on. sums: int64 zeros [filtered rows, 3], zeros again
    afterwards: the weights before the token, all weights, parts that have arrived.
    """
    j = tl.program_id(0)
    if (tl.load(cuts + j * 4) == -1) | (tl.load(guessed + j) != GUESSED):
        return
    own = tl.load(filtered + j)
    row, parts = tl.load(rows + own).to(tl.int64), tl.num_programs(1)
    part = tl.arange(0, spread)
    found = tl.load(scores + own * parts + part, mask=part < parts, other=-float("inf"))
    token = tl.load(ids_of_scores + own * parts + tl.argmax(found, axis=0))
    mean = middle(moments + j * 2)
    peak = row_peak(peaks + own * parts, parts, spread)
    value = warped(logits + row * stride, token, token < vocab, peak, tl.load(inverse + own))
    key = key_of(value, mean, TYPICAL)
    ids = tl.program_id(1) * width + tl.arange(0, width)
    x, inside = part_tokens(
        logits, rows, peaks, inverse, own, ids, vocab, stride, cuts + j * 4, least + j,
        spread, TYPICAL,
    )  # fmt: skip
    keys = key_of(x, mean, TYPICAL)
    weights = tl.where(inside, weight_of(x), 0)
    is_before = (keys < key) | ((keys == key) & (ids < token))
    before, total = tl.reduce((tl.where(is_before, weights, 0), weights), 0, pairs)
    sums += j * 3
    tl.atomic_add(sums, before, sem="relaxed")
    tl.atomic_add(sums + 1, total, sem="relaxed")
    # One thread counts the arrival for all: its sums come before it for the last part to arrive.
    tl.debug_barrier()
    if tl.atomic_add(sums + 2, 1, sem="acq_rel") == parts - 1:
        # Atomic: past the first-level cache; and zeros again for the next launch.
        nothing = before * 0
        before = tl.atomic_xchg(sums, nothing, sem="relaxed")
        total = tl.atomic_xchg(sums + 1, nothing, sem="relaxed")
        tl.atomic_xchg(sums + 2, nothing, sem="relaxed")
        limit = (tl.load(share + j).to(tl.float64) * total.to(tl.float64)).to(tl.int64)
        is_known = tl.max(found, axis=0) > -float("inf")
        if is_known & (before < tl.maximum(limit, 1)):
            tl.store(tokens + row, token.to(tl.int64))
            tl.store(cuts + j * 4, -1)
        elif is_known:
            tl.store(cuts + j * 4 + 2 * TYPICAL, key)
            tl.store(cuts + j * 4 + 2 * TYPICAL + 1, token - 1)

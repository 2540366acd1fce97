"""The last kept token among a row's collected candidates, and the token drawn of few, in Triton.

It is found by bisection: first its key, then its id. Candidates, keys and bins are those of
`cuts.py`; so is the order.
"""

from typing import Any

import triton
import triton.language as tl

from modeling.sampling.kernels.cuts import edge, key_of, weight_of
from modeling.sampling.kernels.draw import comes_before, middle
from modeling.sampling.kernels.exact import exponential_noise, log

Pointer = Any


@triton.jit  # type: ignore[untyped-decorator]
def _block(
    values: "Pointer", candidates: "Pointer", at: "Any", count: "Any", mean: "Any",
    block: tl.constexpr, TYPICAL: tl.constexpr,
) -> "Any":  # fmt: skip
    """(keys, ids, weights) of some candidates; where there are none, key -1 and weight 0."""
    index = at + tl.arange(0, block)
    x = tl.load(values + index, mask=index < count, other=-float("inf"))
    ids = tl.load(candidates + index, mask=index < count, other=0)
    return tl.where(index < count, key_of(x, mean, TYPICAL), -1), ids, weight_of(x)


@triton.jit  # type: ignore[untyped-decorator]
def _joined(
    amount: "Any", below: "Any", above: "Any", amount2: "Any", below2: "Any", above2: "Any"
) -> "Any":
    return amount + amount2, tl.maximum(below, below2), tl.minimum(above, above2)


@triton.jit  # type: ignore[untyped-decorator]
def _amount_of(
    keys: "Any", ids: "Any", weights: "Any", first_key: "Any", kept_key: "Any", kept_id: "Any",
    key: "Any", id: "Any", COUNTED: tl.constexpr, BY_ID: tl.constexpr,
) -> "Any":  # fmt: skip
    inside = (keys >= first_key) & comes_before(keys, ids, kept_key, kept_id)
    below = comes_before(keys, ids, key, id)
    amounts = (inside & below).to(tl.int32) if COUNTED else tl.where(inside & below, weights, 0)
    found = keys
    if BY_ID:
        found = ids
        inside &= keys == key
    largest = tl.where(inside & below, found, -1)
    smallest = tl.where(inside & (below == 0), found, 0x7FFFFFFF)
    return tl.reduce((amounts, largest, smallest), 0, _joined)


@triton.jit  # type: ignore[untyped-decorator]
def _amount(
    values: "Pointer", candidates: "Pointer", count: "Any", mean: "Any",
    keys: "Any", ids: "Any", weights: "Any", first_key: "Any", kept_key: "Any", kept_id: "Any",
    key: "Any", id: "Any",
    block: tl.constexpr, COUNTED: tl.constexpr, BY_ID: tl.constexpr, TYPICAL: tl.constexpr,
) -> "Any":  # fmt: skip
    """How many candidates (COUNTED), or the weight of those, that are up to (key, id).

    Their keys are at least `first_key`; they are also up to (kept_key, kept_id). keys, ids,
    weights: of the first block, which is nearly always the only one. Also the largest key of
    those, and the smallest of the others; BY_ID: id, of those with this key.
    """
    total, largest, smallest = _amount_of(
        keys, ids, weights, first_key, kept_key, kept_id, key, id, COUNTED, BY_ID
    )
    total = total.to(tl.int64)
    for at in range(block, count, block):
        keys, ids, weights = _block(values, candidates, at, count, mean, block, TYPICAL)
        more, low, high = _amount_of(
            keys, ids, weights, first_key, kept_key, kept_id, key, id, COUNTED, BY_ID
        )
        total += more
        largest, smallest = tl.maximum(largest, low), tl.minimum(smallest, high)
    return total, largest, smallest


@triton.jit  # type: ignore[untyped-decorator]
def _find(
    values: "Pointer", candidates: "Pointer", count: "Any", mean: "Any",
    keys: "Any", ids: "Any", weights: "Any", first_key: "Any", low: "Any", high: "Any",
    kept_key: "Any", kept_id: "Any", wanted: "Any", vocab: "Any",
    block: tl.constexpr, COUNTED: tl.constexpr, TYPICAL: tl.constexpr,
) -> "Any":  # fmt: skip
    """The first candidate (key, id) up to which there are `wanted`, with a key in [low, high).

    Each turn goes on from a candidate's key, or id: equal keys are many, different ones are few.
    """
    while low < high:
        key = low + (high - low) // 2
        found, largest, smallest = _amount(
            values, candidates, count, mean, keys, ids, weights, first_key, kept_key, kept_id,
            key, 0x7FFFFFFF, block, COUNTED, False, TYPICAL,
        )  # fmt: skip
        if found >= wanted:
            high = largest
        else:
            low = tl.minimum(smallest, high)
    first_id, last_id = low * 0, low * 0 + vocab
    while first_id < last_id:
        id = first_id + (last_id - first_id) // 2
        found, largest, smallest = _amount(
            values, candidates, count, mean, keys, ids, weights, first_key, kept_key, kept_id,
            low, id, block, COUNTED, True, TYPICAL,
        )  # fmt: skip
        if found >= wanted:
            last_id = largest
        else:
            first_id = tl.minimum(smallest, last_id)
    return low, first_id


@triton.jit  # type: ignore[untyped-decorator]
def _token_of_few(
    values: "Pointer", candidates: "Pointer", count: "Any", mean: "Any", kept_key: "Any",
    kept_id: "Any", least: "Any", first_key: "Any", second_key: "Any",
    few: tl.constexpr, TYPICAL: tl.constexpr,
) -> "Any":  # fmt: skip
    """The best kept candidate with noise, the lowest id of equals; LAST if there is none."""
    index = tl.arange(0, few)
    x = tl.load(values + index, mask=index < count, other=-float("inf"))
    ids = tl.load(candidates + index, mask=index < count, other=0)
    kept = comes_before(key_of(x, mean, TYPICAL), ids, kept_key, kept_id)
    kept &= (index < count) & (x >= least)
    scores = tl.where(kept, x - log(exponential_noise(first_key, second_key, ids)), -float("inf"))
    best = kept & (scores == tl.max(scores, axis=0))
    return tl.min(tl.where(best, ids, 0x7FFFFFFF), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def cut_kernel(
    share: "Pointer", moments: "Pointer", plans: "Pointer", totals: "Pointer", values: "Pointer",
    candidates: "Pointer", cuts: "Pointer", least: "Pointer", typical_p: "Pointer",
    keys_of_rows: "Pointer", filtered: "Pointer", rows: "Pointer", tokens: "Pointer", vocab: "Any",
    block: tl.constexpr, few: tl.constexpr, bins: tl.constexpr, TYPICAL: tl.constexpr,
) -> None:  # fmt: skip
    """Program (filtered row): write its last kept (key, id) into `cuts`, if its filters are on.

    If few tokens may be kept and no filter follows, draw its token, and say so by a key of -1.
    """
    j = tl.program_id(0)
    if tl.load(cuts + j * 4) == -1:
        return
    first, end = tl.load(plans + j * 5), tl.load(plans + j * 5 + 1)
    last, left = tl.load(plans + j * 5 + 2), tl.load(plans + j * 5 + 3)
    is_few = tl.load(plans + j * 5 + 4) == 1
    count = tl.load(totals + j * 3).to(tl.int32)
    before, between = tl.load(totals + j * 3 + 1), tl.load(totals + j * 3 + 2)
    values += j.to(tl.int64) * vocab
    candidates += j.to(tl.int64) * vocab
    mean = middle(moments + j * 2)
    kept_key, kept_id = first * 0 + 0x7FFFFFFF, first * 0 + 0x7FFFFFFF
    keys, ids, weights = _block(values, candidates, 0, count, mean, block, TYPICAL)
    if last < bins:
        kept_key, kept_id = _find(
            values, candidates, count, mean, keys, ids, weights, edge(last, bins),
            edge(last, bins), edge(last + 1, bins), kept_key, kept_id, left.to(tl.int64), vocab,
            block, True, TYPICAL,
        )  # fmt: skip
    if first <= end:
        low, high = edge(first, bins), edge(tl.minimum(end + 1, bins), bins)
        first_key = tl.where(is_few, 0, low)
        if TYPICAL:
            total = tl.load(moments + j * 2)
        else:
            total, _, _ = _amount(
                values, candidates, count, mean, keys, ids, weights, 0, kept_key, kept_id,
                0x7FFFFFFF, 0x7FFFFFFF, block, False, False, TYPICAL,
            )  # fmt: skip
            total += before + between
        share_of = tl.load(share + j).to(tl.float64) * total.to(tl.float64)
        wanted = tl.maximum(share_of.to(tl.int64), 1) - before
        kept_key, kept_id = _find(
            values, candidates, count, mean, keys, ids, weights, first_key, low, high, kept_key,
            kept_id, wanted, vocab, block, False, TYPICAL,
        )  # fmt: skip
    out = cuts + j * 4
    if TYPICAL:
        out += 2
    tl.store(out, kept_key)
    tl.store(out + 1, kept_id)
    if is_few & (TYPICAL | (tl.load(typical_p + j) >= 1)):
        own = tl.load(filtered + j)
        token = _token_of_few(
            values, candidates, count, mean, kept_key, kept_id, tl.load(least + j),
            tl.load(keys_of_rows + own * 2), tl.load(keys_of_rows + own * 2 + 1), few, TYPICAL,
        )  # fmt: skip
        if token < 0x7FFFFFFF:
            tl.store(tokens + tl.load(rows + own), token.to(tl.int64))
            tl.store(cuts + j * 4, -1)

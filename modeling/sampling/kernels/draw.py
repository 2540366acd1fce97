"""Rows' logits over their temperature, and the best of the kept ones with noise, in Triton.

A row is cut into parts of `width` columns, a program each. A second launch compares the parts.
"""

from typing import Any

import triton
import triton.language as tl

from modeling.sampling.kernels.exact import exponential_noise, log, vocabulary_hash

Pointer = Any


@triton.jit  # type: ignore[untyped-decorator]
def row_peak(peaks: "Pointer", parts: "Any", spread: tl.constexpr) -> "Any":
    """A row's largest logit, from its parts'; spread: a power of two that holds the parts."""
    part = tl.arange(0, spread)
    return tl.max(tl.load(peaks + part, mask=part < parts, other=-float("inf")), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def warped(logits: "Pointer", ids: "Any", inside: "Any", peak: "Any", inverse: "Any") -> "Any":
    """A row's logits at `ids`, its largest one taken off, times `inverse`.

    What is not `inside` is minus infinity.
    """
    x = tl.load(logits + ids, mask=inside, other=-float("inf")).to(tl.float32)
    return (x - peak) * inverse


@triton.jit  # type: ignore[untyped-decorator]
def magnitude(x: "Any") -> "Any":
    """The bits of |x|: integers in the order of the magnitudes."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit  # type: ignore[untyped-decorator]
def comes_before(key: "Any", id: "Any", last_key: "Any", last_id: "Any") -> "Any":
    """Whether (key, id) is not behind (last_key, last_id)."""
    return (key < last_key) | ((key == last_key) & (id <= last_id))


@triton.jit  # type: ignore[untyped-decorator]
def peaks_kernel(
    logits: "Pointer", rows: "Pointer", peaks: "Pointer", vocab: "Any", stride: "Any",
    width: tl.constexpr,
) -> None:  # fmt: skip
    """Program (random row, part): the part's largest logit."""
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    ids = tl.program_id(1) * width + tl.arange(0, width)
    x = tl.load(logits + row * stride + ids, mask=ids < vocab, other=-float("inf"))
    at = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(peaks + at, tl.max(x.to(tl.float32), axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def best_kernel(
    logits: "Pointer", scores: "Pointer", ids_of_scores: "Pointer", vocab: "Any", stride: "Any",
    width: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row, part): the part's largest logit and its id."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * width + tl.arange(0, width)
    x = tl.load(logits + row * stride + ids, mask=ids < vocab, other=-float("inf"))
    best, at = tl.max(x.to(tl.float32), axis=0, return_indices=True)
    out = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(scores + out, best)
    tl.store(ids_of_scores + out, tl.program_id(1) * width + at)


@triton.jit  # type: ignore[untyped-decorator]
def draw_kernel(
    logits: "Pointer", rows: "Pointer", peaks: "Pointer", inverse: "Pointer", keys: "Pointer",
    filters: "Pointer", cuts: "Pointer", least: "Pointer", moments: "Pointer", guessed: "Pointer",
    scores: "Pointer", ids_of_scores: "Pointer", vocab: "Any", stride: "Any",
    width: tl.constexpr, spread: tl.constexpr, GUESSED: tl.constexpr,
) -> None:  # fmt: skip
    """Program (random row, part): the part's best x - ln E among kept tokens, and its id.

    GUESSED: only for filtered rows of which `guessed`, int32 [filtered rows], says the same; 0 for
    all rows.

    cuts: int32 [filtered rows, 4]: the last kept (key, id) by likelihood, and by surprise. The
    first key is -1 where the token is known; then the part's id is -1.
    moments: int64 [filtered rows, 2], see `middle`.
    """
    own = tl.program_id(0)
    out = own * tl.num_programs(1) + tl.program_id(1)
    filter = tl.load(filters + own)
    cut = cuts + tl.maximum(filter, 0) * 4
    skipped = (filter >= 0) & (tl.load(cut) == -1)
    if GUESSED != 0:
        skipped |= (filter < 0) | (tl.load(guessed + tl.maximum(filter, 0)) != GUESSED)
    if skipped:
        tl.store(scores + out, -float("inf"))
        tl.store(ids_of_scores + out, -1)
    else:
        start = tl.program_id(1) * width
        ids = start + tl.arange(0, width)
        row = logits + tl.load(rows + own).to(tl.int64) * stride
        peak = row_peak(peaks + own * tl.num_programs(1), tl.num_programs(1), spread)
        scale = tl.load(inverse + own)
        x = warped(row, ids, ids < vocab, peak, scale)
        kept = x > -float("inf")
        if filter >= 0:
            kept &= is_kept(x, ids, cut, least + filter)
            key, last = tl.load(cut + 2), tl.load(cut + 3)
            if key < 0x7FFFFFFF:
                distance = magnitude(-x - middle(moments + filter * 2))
                kept &= comes_before(distance, ids, key, last)
        first_key, second_key = tl.load(keys + own * 2), tl.load(keys + own * 2 + 1)
        # Exact scores are only computed of tokens that may be the best by a bound: of one
        # or two. Their noise takes as long as all else.
        bounds = tl.where(kept, _bound(x, first_key, second_key, ids), -float("inf"))
        top, at = tl.max(bounds, axis=0, return_indices=True)
        score, token = tl.full([], -float("inf"), tl.float32), start + at * 0
        while (top > -float("inf")) & (_score(top) >= score):
            id = start + at
            value = warped(row, id, id < vocab, peak, scale)
            value -= log(exponential_noise(first_key, second_key, id))
            if (value > score) | ((value == score) & (id < token)):
                score, token = value, id
            bounds = tl.where(ids == id, -float("inf"), bounds)
            top = tl.max(bounds, axis=0)
            if (top > -float("inf")) & (_score(top) >= score):
                top, at = tl.max(bounds, axis=0, return_indices=True)
        tl.store(scores + out, score)
        tl.store(ids_of_scores + out, token)


@triton.jit  # type: ignore[untyped-decorator]
def _bound(x: "Any", first_key: "Any", second_key: "Any", ids: "Any") -> "Any":
    """Above x - ln E in an order that `_score` keeps, by few operations; x <= 0."""
    number = vocabulary_hash(first_key, second_key, ids).to(tl.uint32, bitcast=True)
    # A float's bits are nearly its binary logarithm, from below; E is above its uniform number.
    bits = number.to(tl.float32).to(tl.int32, bitcast=True).to(tl.float32)
    return x * 1.442693598 - bits * 1.1920928955e-7


@triton.jit  # type: ignore[untyped-decorator]
def _score(bound: "Any") -> "Any":
    """The bound in units of scores: the floats' bias and 32 bits taken off, and some for errors."""
    return (bound + 159.0) * 0.69314718 + 0.002


@triton.jit  # type: ignore[untyped-decorator]
def is_kept(x: "Any", ids: "Any", cut: "Pointer", least: "Pointer") -> "Any":
    """Whether tokens stay after top-k, top-p and min-p. cut: the row's last (key, id)."""
    before = comes_before(magnitude(x), ids, tl.load(cut), tl.load(cut + 1))
    return before & (x >= tl.load(least))


@triton.jit  # type: ignore[untyped-decorator]
def middle(moments: "Pointer") -> "Any":
    """The mean surprise of a row, from its sums of weights and of weights times surprise."""
    parts, total = tl.load(moments), tl.load(moments + 1)
    return (total.to(tl.float64) / parts.to(tl.float64)).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def choose_kernel(
    scores: "Pointer", ids: "Pointer", rows: "Pointer", tokens: "Pointer", parts: "Any",
    spread: tl.constexpr,
) -> None:  # fmt: skip
    """Program (random row): its best part's token, the lowest id of equals, into `tokens`.

    Parts' ids are -1 where the token is there already.
    """
    own = tl.program_id(0)
    part = tl.arange(0, spread)
    found = tl.load(scores + own * parts + part, mask=part < parts, other=-float("inf"))
    token = tl.load(ids + own * parts + tl.argmax(found, axis=0))
    if token >= 0:
        tl.store(tokens + tl.load(rows + own), token.to(tl.int64))

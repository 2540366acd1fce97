"""Where a row's kept tokens end, found without a sort: five launches over parts of rows, in Triton.

Tokens have an order: by key, an integer, then by id. The key is the magnitude of the warped logit
x (top-k and top-p; x <= 0), or of its distance from the mean (typical-p, constant TYPICAL). The
last kept token is found exactly:

1. `count_kernel` counts each part's tokens in bins of keys.
2. `bracket_kernel` adds the parts, and finds the bin of the k-th token and the few bins in which
   the share must be reached, from bounds of the bins' weights.
3. `gather_kernel` collects the tokens of those bins, and adds the weights of the bins before them;
   or all up to those bins, where they are few.
4. `cut_kernel` (`candidates.py`) finds the last kept token among those.

Where the filter is likely to keep it, a token is drawn without the filter before, and kept if the
weights before it say so (`guess.py`). Then the row is left out of these.

Sums of weights are integers, exact in any order, so which programs add them changes nothing.
"""

from typing import Any

import triton
import triton.language as tl

from modeling.sampling.kernels.draw import is_kept, magnitude, middle, row_peak, warped
from modeling.sampling.kernels.exact import scaled_exp

BINS = 512
"""384 of width 1/16 up to 24, then 16 for each doubling; half the number is twice as coarse. By
surprise there are twice as many: those of tokens likelier than the mean are others. `tl.histogram`
takes longer by the number."""

FEW = 2048
"""Tokens that are collected whole, up to the last that may be kept."""

LAST = 2**31 - 1
"""A key and an id behind all others."""

Pointer = Any


@triton.jit  # type: ignore[untyped-decorator]
def _bin(key: "Any", bins: tl.constexpr) -> "Any":
    """The bin of a float's magnitude; `edge` gives the least magnitude of a bin."""
    value = key.to(tl.float32, bitcast=True)
    near = (tl.minimum(value, 24.0) * (bins // 32)).to(tl.int32)
    beyond = (key - 0x41C00000).to(tl.uint32, bitcast=True) // (0x10000000 // bins)
    far = bins // 4 * 3 + tl.minimum(beyond.to(tl.int32), bins // 4 - 1)
    return tl.where(value < 24.0, near, far)


@triton.jit  # type: ignore[untyped-decorator]
def edge(bin: "Any", bins: tl.constexpr) -> "Any":
    """The least key of a bin; infinity's beyond the last one."""
    near = (bin.to(tl.float32) * (32 / bins)).to(tl.int32, bitcast=True)
    far = 0x41C00000 + (tl.minimum(bin, bins - 1) - bins // 4 * 3) * (0x10000000 // bins)
    return tl.where(bin >= bins, 0x7F800000, tl.where(bin < bins // 4 * 3, near, far))


@triton.jit  # type: ignore[untyped-decorator]
def key_of(x: "Any", mean: "Any", TYPICAL: tl.constexpr) -> "Any":
    """What orders tokens; mean: of their surprise, where TYPICAL."""
    if TYPICAL:
        return magnitude(-x - mean)
    return magnitude(x)


@triton.jit  # type: ignore[untyped-decorator]
def weight_of(x: "Any") -> "Any":
    """A probability as an integer, see `exact.weights`."""
    return scaled_exp(x).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def part_tokens(
    logits: "Pointer", rows: "Pointer", peaks: "Pointer", inverse: "Pointer",
    own: "Any", ids: "Any", vocab: "Any", stride: "Any", cuts: "Pointer", least: "Pointer",
    spread: tl.constexpr, AFTER: tl.constexpr,
) -> "Any":  # fmt: skip
    """(x, whether they count) of random row `own` in this program's part.

    AFTER: only those count that stay after the filters before typical-p.
    """
    parts = tl.num_programs(1)
    row = tl.load(rows + own).to(tl.int64)
    scale = tl.load(inverse + own)
    peak = row_peak(peaks + own * parts, parts, spread)
    x = warped(logits + row * stride, ids, ids < vocab, peak, scale)
    counts = x > -float("inf")
    if AFTER:
        counts &= is_kept(x, ids, cuts, least)
    return x, counts


@triton.jit  # type: ignore[untyped-decorator]
def moments_kernel(
    logits: "Pointer", rows: "Pointer", peaks: "Pointer", inverse: "Pointer",
    filtered: "Pointer", cuts: "Pointer", least: "Pointer", moments: "Pointer",
    vocab: "Any", stride: "Any", width: tl.constexpr, spread: tl.constexpr,
) -> None:  # fmt: skip
    """Program (filtered row, part): add the kept tokens' weights, and those times surprise."""
    j = tl.program_id(0)
    own = tl.load(filtered + j)
    ids = tl.program_id(1) * width + tl.arange(0, width)
    x, counts = part_tokens(
        logits, rows, peaks, inverse, own, ids, vocab, stride, cuts + j * 4, least + j, spread, True
    )  # fmt: skip
    weight = scaled_exp(x)
    moment = tl.where(counts & (x > -60.0), weight * -x, 0.0).to(tl.int64)
    parts = tl.where(counts, weight, 0.0).to(tl.int64)
    tl.atomic_add(moments + j * 2, tl.sum(parts, axis=0), sem="relaxed")
    tl.atomic_add(moments + j * 2 + 1, tl.sum(moment, axis=0), sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def count_kernel(
    logits: "Pointer", rows: "Pointer", peaks: "Pointer", inverse: "Pointer",
    filtered: "Pointer", cuts: "Pointer", least: "Pointer", moments: "Pointer", counts: "Pointer",
    vocab: "Any", stride: "Any",
    width: tl.constexpr, spread: tl.constexpr, bins: tl.constexpr, TYPICAL: tl.constexpr,
) -> None:  # fmt: skip
    """Program (filtered row, part): count its tokens by bin, int32 [filtered rows, bins] of zeros.

    By surprise there are twice as many bins; every second one counts the tokens that are likelier
    than the mean. Rows with a known token have no counts.
    """
    j = tl.program_id(0)
    if tl.load(cuts + j * 4) == -1:
        return
    own = tl.load(filtered + j)
    ids = tl.program_id(1) * width + tl.arange(0, width)
    x, inside = part_tokens(
        logits, rows, peaks, inverse, own, ids, vocab, stride, cuts + j * 4, least + j,
        spread, TYPICAL,
    )  # fmt: skip
    mean = middle(moments + j * 2)
    bin = _bin(key_of(x, mean, TYPICAL), bins)
    if TYPICAL:
        bin = bin * 2 + (-x < mean).to(tl.int32)
    all_bins: tl.constexpr = bins * 2 if TYPICAL else bins
    found = tl.histogram(tl.where(inside, bin, 0), all_bins, inside)
    index = tl.arange(0, all_bins)
    tl.atomic_add(counts + j * all_bins + index, found, mask=found > 0, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def bracket_kernel(
    counts: "Pointer", top_k: "Pointer", share: "Pointer", moments: "Pointer", plans: "Pointer",
    totals: "Pointer", few: tl.constexpr, bins: tl.constexpr, TYPICAL: tl.constexpr,
) -> None:  # fmt: skip
    """Program (filtered row): where its last kept token may be.

    plans: int32 [filtered rows, 5]: the first and the last bin in which the share may be reached,
    the bin of the k-th token, and how many tokens of that bin are kept. The first two are bins and
    -1, and the third is bins, where the filters are off. The fifth is 1 where no more than `few`
    tokens are in the bins in which any may be kept.
    totals: int64 [filtered rows, 3] becomes zeros.
    """
    j = tl.program_id(0)
    all_bins: tl.constexpr = bins * 2 if TYPICAL else bins
    bin = tl.arange(0, all_bins)
    found = tl.load(counts + j * all_bins + bin)
    upto = tl.cumsum(found, axis=0)
    before = upto - found
    wanted = tl.load(top_k + j)
    limited = (wanted < tl.sum(found, axis=0)) & (not TYPICAL)
    is_last = limited & (before < wanted) & (wanted <= before + found)
    last = tl.min(tl.where(is_last, bin, bins), axis=0)
    left = wanted - tl.sum(tl.where(is_last, before, 0), axis=0)
    found = tl.where(limited, tl.minimum(found, tl.maximum(wanted - before, 0)), found)

    if TYPICAL:
        low = edge(bin // 2, bins).to(tl.float32, bitcast=True)
        high = edge(bin // 2 + 1, bins).to(tl.float32, bitcast=True)
        mean = middle(moments + j * 2)
        likelier = bin % 2 == 1
        nearest = tl.where(likelier, tl.maximum(mean - high, 0.0), mean + low)
        farthest = tl.where(likelier, tl.maximum(mean - low, 0.0), mean + high)
    else:
        nearest = edge(bin, bins).to(tl.float32, bitcast=True)
        farthest = edge(bin + 1, bins).to(tl.float32, bitcast=True)
    # Wider than all that is rounded: weights, edges, shares. In units of weights.
    most = tl.exp(-nearest).to(tl.float64) * 1099621579000.0
    fewest = tl.maximum(tl.exp(-farthest).to(tl.float64) * 1099401676000.0 - 1.0, 0.0)
    number = found.to(tl.float64)
    most_sum = tl.cumsum(most * number, axis=0)
    fewest_sum = tl.cumsum(fewest * number, axis=0)
    most_rest = tl.sum(most * number, axis=0) - most_sum
    fewest_rest = tl.sum(fewest * number, axis=0) - fewest_sum
    p = tl.load(share + j).to(tl.float64)
    short = most_sum * (1 - p) < fewest_rest * p - 2
    reached = fewest_sum * (1 - p) >= most_rest * p + 2
    if TYPICAL:
        first = tl.sum((short & (bin % 2 == 1)).to(tl.int32), axis=0)
        end = tl.min(tl.where(reached & (bin % 2 == 1), bin // 2, bins), axis=0)
    else:
        first = tl.sum(short.to(tl.int32), axis=0)
        end = tl.min(tl.where(reached, bin, bins), axis=0)
    first, end = tl.where(p < 1, first, bins), tl.where(p < 1, end, -1)
    ending = tl.where(limited, last, end)
    if TYPICAL:
        ending = ending * 2 + 1
    number = tl.sum(tl.where(bin == ending, upto, 0), axis=0)
    tl.store(plans + j * 5, first)
    tl.store(plans + j * 5 + 1, end)
    tl.store(plans + j * 5 + 2, last)
    tl.store(plans + j * 5 + 3, left)
    tl.store(plans + j * 5 + 4, ((ending >= 0) & (number > 0) & (number <= few)).to(tl.int32))
    for index in tl.static_range(3):
        tl.store(totals + j * 3 + index, tl.zeros([], tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def pairs(a: "Any", b: "Any", a2: "Any", b2: "Any") -> "Any":
    """The sums of two pairs."""
    return a + a2, b + b2


@triton.jit  # type: ignore[untyped-decorator]
def _sums(a: "Any", b: "Any") -> "Any":
    """The sums of two matrices."""
    a, b = tl.reduce((a, b), 1, pairs)
    return tl.reduce((a, b), 0, pairs)


@triton.jit(do_not_specialize=["stride"])  # type: ignore[untyped-decorator]
def gather_kernel(
    logits: "Pointer", rows: "Pointer", peaks: "Pointer", inverse: "Pointer",
    filtered: "Pointer", cuts: "Pointer", least: "Pointer", moments: "Pointer", plans: "Pointer",
    totals: "Pointer", values: "Pointer", candidates: "Pointer", vocab: "Any", stride: "Any",
    width: tl.constexpr, spread: tl.constexpr, bins: tl.constexpr, TYPICAL: tl.constexpr,
) -> None:  # fmt: skip
    """Program (filtered row, part): collect the tokens of the bins that the plan names.

    values: float32 [filtered rows, vocab]: their x, in no order. candidates: their ids.
    totals: how many they are; the weights before the first bin of the share; the weights between
    its last one and that of the k-th token.
    """
    j = tl.program_id(0)
    if tl.load(cuts + j * 4) == -1:
        return
    first, end = tl.load(plans + j * 5), tl.load(plans + j * 5 + 1)
    last, few = tl.load(plans + j * 5 + 2), tl.load(plans + j * 5 + 4)
    if (first <= end) | (last < bins):
        own = tl.load(filtered + j)
        # A thread of 256 holds a line of the matrix, so it numbers its tokens by itself.
        lines = tl.arange(0, 256)[:, None]
        ids = tl.program_id(1) * width + lines + tl.arange(0, width // 256)[None, :] * 256
        x, inside = part_tokens(
            logits, rows, peaks, inverse, own, ids, vocab, stride, cuts + j * 4, least + j,
            spread, TYPICAL,
        )  # fmt: skip
        # As keys: bins would take as many operations again.
        key = key_of(x, middle(moments + j * 2), TYPICAL)
        start, stop = edge(first, bins), edge(end + 1, bins)
        of_last, after_last = edge(last, bins), edge(last + 1, bins)
        if few == 1:
            start = 0
            if last < bins:
                stop = after_last
        if (few == 0) | ((last == bins) & (not TYPICAL)):
            weight = weight_of(x)
            before = tl.where(inside & (key < start), weight, 0)
            between = inside & (key >= stop) & ((key < of_last) | (last == bins))
            before, between = _sums(before, tl.where(between, weight, 0))
            tl.atomic_add(totals + j * 3 + 1, before, sem="relaxed")
            tl.atomic_add(totals + j * 3 + 2, between, sem="relaxed")
        taken = (key >= start) & (key < stop)
        taken = inside & (taken | ((key >= of_last) & (key < after_last) & (last < bins)))
        number = tl.cumsum(taken.to(tl.int32), axis=1)
        found = tl.max(number, axis=1)
        upto = tl.cumsum(found, axis=0)
        more = tl.max(upto, axis=0).to(tl.int64)
        at = tl.atomic_add(totals + j * 3, more, sem="relaxed").to(tl.int32) - 1
        at = (at + upto - found)[:, None] + number
        tl.store(values + j.to(tl.int64) * vocab + at, x, mask=taken)
        tl.store(candidates + j.to(tl.int64) * vocab + at, ids, mask=taken)

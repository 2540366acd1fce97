"""Where a row's kept tokens end, found without a sort: five launches over parts of rows, in Triton.

Tokens have an order: by key, an integer, then by id. The key is the magnitude of the warped logit
x (top-k and top-p; x <= 0), or of its distance from the mean (typical-p, constant TYPICAL). The
last kept token is found exactly:

1. `count_kernel` counts each part's tokens in bins of keys.
2. `bracket_kernel` adds the parts, and finds the bin of the k-th token and the few bins in which
   the share must be reached, from bounds of the bins' weights.
3. `gather_kernel` collects the tokens of those bins, and adds the weights of the bins before them.
4. `cut_kernel` finds the last kept token among those: first its key by bisection, then its id.

Sums of weights are integers, exact in any order, so which programs add them changes nothing.
"""

from typing import Any

import triton
import triton.language as tl

from modeling.sampling.kernels.triton_draw import comes_before, is_kept, magnitude, middle, warped
from modeling.sampling.kernels.triton_exact import scaled_exp

BINS = 512
"""384 of width 1/16 up to 24, then 16 for each doubling. By surprise there are twice as many:
tokens likelier than the mean have their own. `tl.histogram` takes longer by the number."""

LAST = 2**31 - 1
"""A key and an id behind all others."""

Pointer = Any


@triton.jit  # type: ignore[untyped-decorator]
def _bin(key: "Any") -> "Any":
    """The bin of a float's magnitude; `_edge` gives the least magnitude of a bin."""
    value = key.to(tl.float32, bitcast=True)
    near = (tl.minimum(value, 24.0) * 16.0).to(tl.int32)
    far = 384 + tl.minimum((key - 0x41C00000) >> 19, 127)
    return tl.where(value < 24.0, near, far)


@triton.jit  # type: ignore[untyped-decorator]
def _edge(bin: "Any") -> "Any":
    near = (bin.to(tl.float32) * 0.0625).to(tl.int32, bitcast=True)
    far = 0x41C00000 + ((tl.minimum(bin, 511) - 384) << 19)
    return tl.where(bin > 511, 0x7F800000, tl.where(bin < 384, near, far))


@triton.jit  # type: ignore[untyped-decorator]
def _key(x: "Any", mean: "Any", TYPICAL: tl.constexpr) -> "Any":
    if TYPICAL:
        return magnitude(-x - mean)
    return magnitude(x)


@triton.jit  # type: ignore[untyped-decorator]
def _weight(x: "Any") -> "Any":
    return scaled_exp(x).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _tokens(
    logits: "Pointer", rows: "Pointer", peaks: "Pointer", inverse: "Pointer",
    own: "Any", vocab: "Any", stride: "Any", cuts: "Pointer", least: "Pointer",
    width: tl.constexpr, spread: tl.constexpr, AFTER: tl.constexpr,
) -> "Any":  # fmt: skip
    """(x, ids, whether they count) of random row `own` in this program's part.

    AFTER: only those count that stay after the filters before typical-p.
    """
    parts = tl.num_programs(1)
    ids = tl.program_id(1) * width + tl.arange(0, width)
    row = tl.load(rows + own).to(tl.int64)
    scale = tl.load(inverse + own)
    x = warped(logits + row * stride, peaks + own * parts, parts, ids, ids < vocab, scale, spread)
    counts = x > -float("inf")
    if AFTER:
        counts &= is_kept(x, ids, cuts, least)
    return x, ids, counts


@triton.jit  # type: ignore[untyped-decorator]
def moments_kernel(
    logits: "Pointer", rows: "Pointer", peaks: "Pointer", inverse: "Pointer",
    filtered: "Pointer", cuts: "Pointer", least: "Pointer", moments: "Pointer",
    vocab: "Any", stride: "Any", width: tl.constexpr, spread: tl.constexpr,
) -> None:  # fmt: skip
    """Program (filtered row, part): add the kept tokens' weights, and those times surprise."""
    j = tl.program_id(0)
    own = tl.load(filtered + j)
    x, _, counts = _tokens(
        logits, rows, peaks, inverse, own, vocab, stride, cuts + j * 4, least + j,
        width, spread, True,
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

    By surprise, a bin's second half counts the tokens that are likelier than the mean.
    """
    j = tl.program_id(0)
    own = tl.load(filtered + j)
    x, _, inside = _tokens(
        logits, rows, peaks, inverse, own, vocab, stride, cuts + j * 4, least + j,
        width, spread, TYPICAL,
    )  # fmt: skip
    mean = middle(moments + j * 2)
    bin = _bin(_key(x, mean, TYPICAL))
    if TYPICAL:
        bin = bin * 2 + (-x < mean).to(tl.int32)
    found = tl.histogram(tl.where(inside, bin, 0), bins, inside)
    index = tl.arange(0, bins)
    tl.atomic_add(counts + j * bins + index, found, mask=found > 0, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def bracket_kernel(
    counts: "Pointer", top_k: "Pointer", share: "Pointer", moments: "Pointer", plans: "Pointer",
    totals: "Pointer", bins: tl.constexpr, TYPICAL: tl.constexpr,
) -> None:  # fmt: skip
    """Program (filtered row): where its last kept token may be.

    plans: int32 [filtered rows, 4]: the first and the last bin in which the share may be reached,
    the bin of the k-th token, and how many tokens of that bin are kept. The first two are bins and
    -1, and the third is bins, where the filters are off.
    totals: int64 [filtered rows, 3] becomes zeros.
    """
    j = tl.program_id(0)
    bin = tl.arange(0, bins)
    found = tl.load(counts + j * bins + bin)
    before = tl.cumsum(found, axis=0) - found
    wanted = tl.load(top_k + j)
    limited = (wanted < tl.sum(found, axis=0)) & (not TYPICAL)
    is_last = limited & (before < wanted) & (wanted <= before + found)
    last = tl.min(tl.where(is_last, bin, bins), axis=0)
    left = wanted - tl.sum(tl.where(is_last, before, 0), axis=0)
    found = tl.where(limited, tl.minimum(found, tl.maximum(wanted - before, 0)), found)

    if TYPICAL:
        low = _edge(bin // 2).to(tl.float32, bitcast=True)
        high = _edge(bin // 2 + 1).to(tl.float32, bitcast=True)
        mean = middle(moments + j * 2)
        likelier = bin % 2 == 1
        nearest = tl.where(likelier, tl.maximum(mean - high, 0.0), mean + low)
        farthest = tl.where(likelier, tl.maximum(mean - low, 0.0), mean + high)
    else:
        nearest = _edge(bin).to(tl.float32, bitcast=True)
        farthest = _edge(bin + 1).to(tl.float32, bitcast=True)
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
    tl.store(plans + j * 4, tl.where(p < 1, first, bins))
    tl.store(plans + j * 4 + 1, tl.where(p < 1, end, -1))
    tl.store(plans + j * 4 + 2, last)
    tl.store(plans + j * 4 + 3, left)
    for index in tl.static_range(3):
        tl.store(totals + j * 3 + index, tl.zeros([], tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def gather_kernel(
    logits: "Pointer", rows: "Pointer", peaks: "Pointer", inverse: "Pointer",
    filtered: "Pointer", cuts: "Pointer", least: "Pointer", moments: "Pointer", plans: "Pointer",
    totals: "Pointer", values: "Pointer", candidates: "Pointer", vocab: "Any", stride: "Any",
    width: tl.constexpr, spread: tl.constexpr, TYPICAL: tl.constexpr,
) -> None:  # fmt: skip
    """Program (filtered row, part): collect the tokens of the bins that the plan names.

    values: float32 [filtered rows, vocab]: their x, in no order. candidates: their ids.
    totals: how many they are; the weights before the first bin of the share; the weights between
    its last one and that of the k-th token.
    """
    j = tl.program_id(0)
    first, end = tl.load(plans + j * 4), tl.load(plans + j * 4 + 1)
    last = tl.load(plans + j * 4 + 2)
    if (first <= end) | (last < 512):
        own = tl.load(filtered + j)
        x, ids, inside = _tokens(
            logits, rows, peaks, inverse, own, vocab, stride, cuts + j * 4, least + j,
            width, spread, TYPICAL,
        )  # fmt: skip
        bin = _bin(_key(x, middle(moments + j * 2), TYPICAL))
        weight = _weight(x)
        before = tl.sum(tl.where(inside & (bin < first), weight, 0), axis=0)
        between = tl.sum(tl.where(inside & (bin > end) & (bin < last), weight, 0), axis=0)
        tl.atomic_add(totals + j * 3 + 1, before, sem="relaxed")
        tl.atomic_add(totals + j * 3 + 2, between, sem="relaxed")
        taken = inside & (((bin >= first) & (bin <= end)) | (bin == last))
        number = tl.cumsum(taken.to(tl.int32), axis=0)
        start = tl.atomic_add(totals + j * 3, tl.max(number, axis=0).to(tl.int64), sem="relaxed")
        at = j.to(tl.int64) * vocab + start + number - 1
        tl.store(values + at, x, mask=taken)
        tl.store(candidates + at, ids, mask=taken)


@triton.jit  # type: ignore[untyped-decorator]
def _block(
    values: "Pointer", candidates: "Pointer", at: "Any", count: "Any", mean: "Any",
    block: tl.constexpr, TYPICAL: tl.constexpr,
) -> "Any":  # fmt: skip
    """(keys, ids, weights) of some candidates; where there are none, key -1 and weight 0."""
    index = at + tl.arange(0, block)
    x = tl.load(values + index, mask=index < count, other=-float("inf"))
    ids = tl.load(candidates + index, mask=index < count, other=0)
    return tl.where(index < count, _key(x, mean, TYPICAL), -1), ids, _weight(x)


@triton.jit  # type: ignore[untyped-decorator]
def _amount_of(
    keys: "Any", ids: "Any", weights: "Any", first_key: "Any", kept_key: "Any", kept_id: "Any",
    key: "Any", id: "Any", COUNTED: tl.constexpr,
) -> "Any":  # fmt: skip
    inside = (keys >= first_key) & comes_before(keys, ids, key, id)
    inside &= comes_before(keys, ids, kept_key, kept_id)
    if COUNTED:
        return tl.sum(inside.to(tl.int32), axis=0).to(tl.int64)
    return tl.sum(tl.where(inside, weights, 0), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _amount(
    values: "Pointer", candidates: "Pointer", count: "Any", mean: "Any",
    keys: "Any", ids: "Any", weights: "Any", first_key: "Any", kept_key: "Any", kept_id: "Any",
    key: "Any", id: "Any", block: tl.constexpr, COUNTED: tl.constexpr, TYPICAL: tl.constexpr,
) -> "Any":  # fmt: skip
    """How many candidates (COUNTED), or the weight of those, that are up to (key, id).

    Their keys are at least `first_key`; they are also up to (kept_key, kept_id). keys, ids,
    weights: of the first block, which is nearly always the only one.
    """
    total = _amount_of(keys, ids, weights, first_key, kept_key, kept_id, key, id, COUNTED)
    for at in range(block, count, block):
        keys, ids, weights = _block(values, candidates, at, count, mean, block, TYPICAL)
        total += _amount_of(keys, ids, weights, first_key, kept_key, kept_id, key, id, COUNTED)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _find(
    values: "Pointer", candidates: "Pointer", count: "Any", mean: "Any",
    keys: "Any", ids: "Any", weights: "Any", first_key: "Any", end_key: "Any", kept_key: "Any",
    kept_id: "Any", wanted: "Any", vocab: "Any",
    block: tl.constexpr, COUNTED: tl.constexpr, TYPICAL: tl.constexpr,
) -> "Any":  # fmt: skip
    """The first candidate (key, id) up to which there are `wanted`, with keys below `end_key`."""
    low, high = first_key, end_key
    while low < high:
        key = low + (high - low) // 2
        found = _amount(
            values, candidates, count, mean, keys, ids, weights, first_key, kept_key, kept_id,
            key, 0x7FFFFFFF, block, COUNTED, TYPICAL,
        )  # fmt: skip
        if found >= wanted:
            high = key
        else:
            low = key + 1
    first_id, last_id = low * 0, low * 0 + vocab
    while first_id < last_id:
        id = first_id + (last_id - first_id) // 2
        found = _amount(
            values, candidates, count, mean, keys, ids, weights, first_key, kept_key, kept_id,
            low, id, block, COUNTED, TYPICAL,
        )  # fmt: skip
        if found >= wanted:
            last_id = id
        else:
            first_id = id + 1
    return low, first_id


@triton.jit  # type: ignore[untyped-decorator]
def cut_kernel(
    share: "Pointer", moments: "Pointer", plans: "Pointer", totals: "Pointer", values: "Pointer",
    candidates: "Pointer", cuts: "Pointer", vocab: "Any",
    block: tl.constexpr, TYPICAL: tl.constexpr,
) -> None:  # fmt: skip
    """Program (filtered row): write its last kept (key, id) into `cuts`, if its filters are on."""
    j = tl.program_id(0)
    first, end = tl.load(plans + j * 4), tl.load(plans + j * 4 + 1)
    last, left = tl.load(plans + j * 4 + 2), tl.load(plans + j * 4 + 3)
    count = tl.load(totals + j * 3).to(tl.int32)
    before, between = tl.load(totals + j * 3 + 1), tl.load(totals + j * 3 + 2)
    values += j.to(tl.int64) * vocab
    candidates += j.to(tl.int64) * vocab
    mean = middle(moments + j * 2)
    kept_key, kept_id = first * 0 + 0x7FFFFFFF, first * 0 + 0x7FFFFFFF
    keys, ids, weights = _block(values, candidates, 0, count, mean, block, TYPICAL)
    if last < 512:
        kept_key, kept_id = _find(
            values, candidates, count, mean, keys, ids, weights, _edge(last), _edge(last + 1),
            kept_key, kept_id, left.to(tl.int64), vocab, block, True, TYPICAL,
        )  # fmt: skip
    if first <= end:
        if TYPICAL:
            total = tl.load(moments + j * 2)
        else:
            total = before + between + _amount(
                values, candidates, count, mean, keys, ids, weights, 0, 0x7FFFFFFF, 0x7FFFFFFF,
                kept_key, kept_id, block, False, TYPICAL,
            )  # fmt: skip
        first_key, end_key = _edge(first), _edge(tl.minimum(end + 1, 512))
        share_of = tl.load(share + j).to(tl.float64) * total.to(tl.float64)
        wanted = tl.maximum(share_of.to(tl.int64), 1) - before
        kept_key, kept_id = _find(
            values, candidates, count, mean, keys, ids, weights, first_key, end_key, kept_key,
            kept_id, wanted, vocab, block, False, TYPICAL,
        )  # fmt: skip
    out = cuts + j * 4
    if TYPICAL:
        out += 2
    tl.store(out, kept_key)
    tl.store(out + 1, kept_id)

"""Attention over latents in Triton: all heads share one key, which begins with their value.

What decode.py and prefill.py do, with keys on the tall side of both products: 64 of them and 512
numbers of a value fill the tensor cores' instruction, which a few heads do not. A block of keys is
loaded once and is a factor of both.
"""

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modeling.attention.triton.decode import added, blocks_of, finish, first_key, lines, splits_of
from modeling.attention.triton.scores import NEVER, pages_of

# Arguments are grouped by what they describe; a line for each would hide the kernels.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def _attend(
    q: "Any", rest: "Any", acc: "Any", top: "Any", total: "Any",
    keys: "Any", pages: "Any", start: "Any", stop: "Any", positions: "Any", window: "Any",
    scale: "Any",
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    ENDS: tl.constexpr, CAUSAL: tl.constexpr,
) -> "Any":
    """(acc, top, total) after the keys start .. start + BLOCK_N - 1; see `scores.attend_block`.

    acc: [BLOCK_D, M].
    """
    at = start + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    e = VALUE_DIM + tl.arange(0, BLOCK_REST)
    inside = at < stop
    mask = (d < VALUE_DIM)[None, :]
    others = (e < HEAD_DIM)[None, :]
    if ENDS:
        mask = mask & inside[:, None]
        others = others & inside[:, None]
    rows = (pages.to(tl.int64) * PAGE + at % PAGE) * HEAD_DIM
    k = tl.load(keys + rows[:, None] + d[None, :], mask=mask, other=0.0).to(q.dtype)
    more = tl.load(keys + rows[:, None] + e[None, :], mask=others, other=0.0).to(q.dtype)
    scores = tl.dot(k, tl.trans(q), input_precision="ieee")
    scores = tl.dot(more, tl.trans(rest), scores, input_precision="ieee") * scale
    if ENDS:
        scores = tl.where(inside[:, None], scores, NEVER)
    if CAUSAL:
        behind = positions[None, :] - at[:, None]
        scores = tl.where((behind >= 0) & (behind < window), scores, NEVER)
    higher = tl.maximum(top, tl.max(scores, axis=0))
    weights = tl.exp2(scores - higher[None, :])
    shrunk = tl.exp2(top - higher)
    total = total * shrunk + tl.sum(weights, axis=0)
    acc = acc * shrunk[None, :]
    acc = tl.dot(tl.trans(k), weights.to(q.dtype), acc, input_precision="ieee")
    return acc, higher, total


@triton.jit  # type: ignore[untyped-decorator]
def _combined(
    acc: "Any", top: "Any", total: "Any", other: "Any", other_top: "Any", other_total: "Any"
) -> "Any":
    """(acc, top, total) of two parts of a row's keys; see `decode.combined`."""
    higher = tl.maximum(top, other_top)
    kept, more = tl.exp2(top - higher), tl.exp2(other_top - higher)
    acc = tl.fma(acc, kept[None, :], other * more[None, :])
    return acc, higher, tl.fma(total, kept, other_total * more)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "tokens", "offsets", "lengths", "row_queries", "order", "arrived", "tables", "window",
        "max_count", "usual", "most_keys",
    ]
)
def latent_decode_kernel(
    q: "Any", keys: "Any", _values: "Any", out: "Any", partials: "Any", sums: "Any",
    _sinks: "Any", _slopes: "Any",
    tokens: "Any", offsets: "Any", lengths: "Any", row_queries: "Any", order: "Any",
    arrived: "Any", tables: "Any", window: "Any", max_count: "Any", usual: "Any",
    most_keys: "Any", scale: "Any", _cap: "Any", factor: "Any",
    Q_STRIDE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr, QUERIES: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_M: tl.constexpr, LIVE_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, CHUNK: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """Program (block of PACKED heads, i, p); the arguments are those of `decode.decode_kernel`."""
    if PDL:
        gdc_launch_dependents()
    tl.static_assert(KV_HEADS == 1 and not (CAPPED or SINKS or ALIBI))
    HEADS: tl.constexpr = GROUP
    own = tl.load(order + tl.program_id(1))
    program = tl.program_id(2)
    length = tl.load(lengths + own)
    token = tl.load(tokens + own).to(tl.int64)
    table = tables + tl.load(offsets + own)
    num_queries = 1
    if QUERIES > 1:
        num_queries = tl.load(row_queries + own)
    first = first_key(length, num_queries, window)
    count, width = splits_of(length - first, MIN_SPLIT, MAX_SPLITS, BLOCK_N)
    programs = tl.minimum(tl.maximum(usual, tl.cdiv(length - first, most_keys)), count)
    programs = tl.minimum(programs, tl.num_programs(2))
    is_alone = programs == 1
    # These need not wait: the first program of each row does.
    if program >= programs:
        return
    d = tl.arange(0, BLOCK_D)
    e = VALUE_DIM + tl.arange(0, BLOCK_REST)
    query, head, live = lines(HEADS, QUERIES, PACKED, BLOCK_M)
    position = length - num_queries + query
    split, start = program, first + program * width
    pages = pages_of(table, start, length, BLOCK_N, PAGE)
    acc = tl.zeros([BLOCK_D, BLOCK_M], dtype=tl.float32)
    top = tl.full([BLOCK_M], NEVER, dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    row_acc = tl.zeros([BLOCK_D, BLOCK_M], dtype=tl.float32)
    row_top = tl.full([BLOCK_M], NEVER, dtype=tl.float32)
    row_total = tl.zeros([BLOCK_M], dtype=tl.float32)
    index = ((own.to(tl.int64) * QUERIES + query) * HEADS + head) * max_count
    at = q + (token + query) * Q_STRIDE + head * HEAD_DIM
    if PDL:
        gdc_wait()
    q_mask = live[:, None] & (d < VALUE_DIM)[None, :]
    queries = tl.load(at[:, None] + d[None, :], mask=q_mask, other=0.0)
    r_mask = live[:, None] & (e < HEAD_DIM)[None, :]
    rest = tl.load(at[:, None] + e[None, :], mask=r_mask, other=0.0)
    # One loop over all blocks, so that loads go on where a split ends.
    for _ in range(blocks_of(length - first, count, width, program, programs, BLOCK_N)):
        ends = start + BLOCK_N >= tl.minimum(first + (split + 1) * width, length)
        after = tl.where(ends, first + (split + programs) * width, start + BLOCK_N)
        following = pages_of(table, after, length, BLOCK_N, PAGE)
        acc, top, total = _attend(
            queries, rest, acc, top, total, keys, pages, start, length, position, window, scale,
            HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_REST, BLOCK_N, PAGE, True, QUERIES > 1,
        )
        if ends:
            if is_alone:
                row_acc, row_top, row_total = _combined(
                    row_acc, row_top, row_total, acc, top, total
                )
            else:
                one = index + split
                to = partials + one[None, :] * VALUE_DIM + d[:, None]
                tl.store(to, acc, mask=live[None, :] & (d < VALUE_DIM)[:, None])
                tl.store(sums + one * 2, top, mask=live)
                tl.store(sums + one * 2 + 1, total, mask=live)
            acc = tl.zeros([BLOCK_D, BLOCK_M], dtype=tl.float32)
            top = tl.full([BLOCK_M], NEVER, dtype=tl.float32)
            total = tl.zeros([BLOCK_M], dtype=tl.float32)
            split += programs
        start, pages = after, following
    if is_alone:
        finish(
            tl.trans(row_acc), row_top, row_total, out, sums, token + query, head, live, factor,
            HEADS, HEAD_DIM, VALUE_DIM, BLOCK_D, False,
        )
    else:
        # One thread counts the arrival for all: the barrier puts every thread's stores before it,
        # and acq_rel makes them visible to the program that finds itself last.
        tl.debug_barrier()
        cell = arrived + own * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(cell, 1, sem="acq_rel") == programs - 1:
            # Zero again for the next launch, which begins to add only after this one has ended.
            tl.atomic_xchg(cell, 0, sem="relaxed")
            queried, headed, filled = lines(HEADS, QUERIES, PACKED, LIVE_M)
            parts = ((own.to(tl.int64) * QUERIES + queried) * HEADS + headed) * max_count
            all_acc, all_top, all_total = added(
                partials, sums, parts, filled, count, VALUE_DIM, BLOCK_D, LIVE_M, CHUNK
            )
            finish(
                all_acc, all_top, all_total, out, sums, token + queried, headed, filled, factor,
                HEADS, HEAD_DIM, VALUE_DIM, BLOCK_D, False,
            )


@triton.jit(do_not_specialize=["tiles", "tables", "window"])  # type: ignore[untyped-decorator]
def latent_prefill_kernel(
    q: "Any", keys: "Any", _values: "Any", out: "Any", _sinks: "Any", _slopes: "Any",
    tiles: "Any", tables: "Any", window: "Any", scale: "Any", _cap: "Any", factor: "Any",
    Q_STRIDE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr, PAGE: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """Program (block of PACKED heads, tile): BLOCK_M // PACKED tokens of a row.

    The arguments are those of `prefill.prefill_kernel`.
    """
    if PDL:
        gdc_launch_dependents()
    tl.static_assert(KV_HEADS == 1 and not (CAPPED or SINKS or ALIBI))
    HEADS: tl.constexpr = GROUP
    tokens: tl.constexpr = BLOCK_M // PACKED
    record = tiles + tl.program_id(1) * WORDS
    table = tables + tl.load(record)
    token = tl.load(record + 1).to(tl.int64)
    num_queries = tl.load(record + 2)
    length = tl.load(record + 3)
    first = tl.load(record + 4)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    e = VALUE_DIM + tl.arange(0, BLOCK_REST)
    query = first + m // PACKED
    head = tl.program_id(0) * PACKED + m % PACKED
    live = (m // PACKED < tokens) & (query < num_queries) & (head < HEADS)
    positions = length - num_queries + query
    earliest = length - num_queries + first
    stop = tl.minimum(earliest + tokens, length)
    start = tl.maximum(earliest - window + 1, 0)
    if PDL:
        gdc_wait()
    at = q + (token + query) * Q_STRIDE + head * HEAD_DIM
    q_mask = live[:, None] & (d < VALUE_DIM)[None, :]
    queries = tl.load(at[:, None] + d[None, :], mask=q_mask, other=0.0)
    r_mask = live[:, None] & (e < HEAD_DIM)[None, :]
    rest = tl.load(at[:, None] + e[None, :], mask=r_mask, other=0.0)
    acc = tl.zeros([BLOCK_D, BLOCK_M], dtype=tl.float32)
    top = tl.full([BLOCK_M], NEVER, dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    pages = pages_of(table, start, stop, BLOCK_N, PAGE)
    for block in range(start, stop, BLOCK_N):
        following = pages_of(table, block + BLOCK_N, stop, BLOCK_N, PAGE)
        acc, top, total = _attend(
            queries, rest, acc, top, total, keys, pages, block, stop, positions, window, scale,
            HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_REST, BLOCK_N, PAGE, True, True,
        )
        pages = following
    acc = acc * (factor / total)[None, :]
    to = out + ((token + query) * HEADS + head) * HEAD_DIM
    mask = live[None, :] & (d < VALUE_DIM)[:, None]
    tl.store(to[None, :] + d[:, None], acc.to(out.dtype.element_ty), mask=mask)

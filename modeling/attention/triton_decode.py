"""Rows of few tokens in Triton: keys are cut into splits; a second kernel combines their results.

The query heads that share a KV head, of all of a row's tokens, are one tile, so keys and values are
read once. A row's splits follow from its own length alone: which programs compute them, and how
many rows are beside it, changes no bit of its result. A row of one split is finished by the first
kernel.
"""

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modeling.attention.triton_scores import LOG2_E, NEVER, attend_block, pages_of, with_sinks

COMBINED = 16
"""Splits that are added at once."""


@triton.jit  # type: ignore[untyped-decorator]
def _first_key(length: "Any", num_queries: "Any", window: "Any") -> "Any":
    """The first key that the first of a row's queries sees."""
    return tl.maximum(length - num_queries + 1 - window, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _splits(
    seen: "Any", MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr
) -> "Any":
    """(number, keys in each) of the splits of a row that sees so many keys."""
    wanted = tl.minimum(tl.cdiv(seen, MIN_SPLIT), MAX_SPLITS)
    width = tl.cdiv(tl.cdiv(seen, wanted), BLOCK_N) * BLOCK_N
    return tl.cdiv(seen, width), width


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "tokens",
        "offsets",
        "lengths",
        "row_queries",
        "tables",
        "window",
        "max_count",
    ]
)
def decode_kernel(
    q: "Any",
    keys: "Any",
    values: "Any",
    out: "Any",
    partials: "Any",
    sums: "Any",
    sinks: "Any",
    slopes: "Any",
    tokens: "Any",
    offsets: "Any",
    lengths: "Any",
    row_queries: "Any",
    tables: "Any",
    window: "Any",
    max_count: "Any",
    scale: "Any",
    cap: "Any",
    factor: "Any",
    Q_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (block of PACKED heads, row, p): splits p, p + programs, ... of the row.

    tokens, offsets, lengths, row_queries: int32 [rows]: the index of a row's first token in q and
    out, where its pages' numbers start in `tables`, its keys, its queries. QUERIES tokens of q and
    out belong to a row; what is computed for those behind its queries means nothing.
    partials: float32 [rows, QUERIES, heads, max_count, HEAD_DIM], max_count: splits of a row at
    most; sums: [.., max_count, 2], each split's largest score and sum of weights. window: keys
    that are seen at most. factor: of the output.
    """
    if PDL:
        gdc_launch_dependents()
    blocks: tl.constexpr = (GROUP + PACKED - 1) // PACKED
    heads: tl.constexpr = KV_HEADS * GROUP
    kv_head = tl.program_id(0) // blocks
    own = tl.program_id(1)
    # Lengths and tables are written by copies, never by a kernel, so they may be read before.
    length = tl.load(lengths + own)
    token = tl.load(tokens + own).to(tl.int64)
    table = tables + tl.load(offsets + own)
    num_queries = 1
    if QUERIES > 1:
        num_queries = tl.load(row_queries + own)
    first = _first_key(length, num_queries, window)
    count, width = _splits(length - first, MIN_SPLIT, MAX_SPLITS, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    query = m // PACKED
    g = tl.program_id(0) % blocks * PACKED + m % PACKED
    d = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + g
    live = (query < QUERIES) & (g < GROUP)
    mask = live[:, None] & (d < HEAD_DIM)[None, :]
    slope = tl.zeros([BLOCK_M], dtype=tl.float32)
    if ALIBI:
        slope = tl.load(slopes + head, mask=live, other=0.0) * LOG2_E
    position = length - num_queries + query
    begin = first + tl.program_id(2) * width
    pages = pages_of(table, begin, tl.minimum(begin + width, length), BLOCK_N, PAGE)
    if PDL:
        gdc_wait()
    for split in range(tl.program_id(2), count, tl.num_programs(2)):
        at = (token + query) * Q_STRIDE + head * HEAD_DIM
        queries = tl.load(q + at[:, None] + d[None, :], mask=mask, other=0.0)
        acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        top = tl.full([BLOCK_M], NEVER, dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        start = first + split * width
        stop = tl.minimum(start + width, length)
        for block in range(start, stop, BLOCK_N):
            following = pages_of(table, block + BLOCK_N, stop, BLOCK_N, PAGE)
            acc, top, total = attend_block(
                queries,
                acc,
                top,
                total,
                keys,
                values,
                pages,
                block,
                stop,
                kv_head,
                position,
                slope,
                window,
                scale,
                cap,
                KV_HEADS,
                HEAD_DIM,
                BLOCK_D,
                BLOCK_N,
                PAGE,
                CAPPED,
                ALIBI,
                True,
                QUERIES > 1,
            )
            pages = following
        if count == 1:
            if SINKS:
                sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * LOG2_E
                acc = with_sinks(acc, top, total, sink, factor)
            else:
                acc = acc * (factor / total)[:, None]
            at = ((token + query) * heads + head) * HEAD_DIM
            tl.store(out + at[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=mask)
        else:
            index = ((own.to(tl.int64) * QUERIES + query) * heads + head) * max_count + split
            tl.store(partials + index[:, None] * HEAD_DIM + d[None, :], acc, mask=mask)
            tl.store(sums + index * 2, top, mask=live)
            tl.store(sums + index * 2 + 1, total, mask=live)
        begin = start + tl.num_programs(2) * width
        pages = pages_of(table, begin, tl.minimum(begin + width, length), BLOCK_N, PAGE)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["tokens", "lengths", "row_queries", "window", "max_count"]
)
def combine_kernel(
    out: "Any",
    partials: "Any",
    sums: "Any",
    sinks: "Any",
    tokens: "Any",
    lengths: "Any",
    row_queries: "Any",
    window: "Any",
    max_count: "Any",
    factor: "Any",
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (head, token of a row): its splits' results into one; else as decode_kernel."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0)
    own = tl.program_id(1) // QUERIES
    length = tl.load(lengths + own)
    token = tl.load(tokens + own).to(tl.int64) + tl.program_id(1) % QUERIES
    num_queries = 1
    if QUERIES > 1:
        num_queries = tl.load(row_queries + own)
    first_key = _first_key(length, num_queries, window)
    count, _ = _splits(length - first_key, MIN_SPLIT, MAX_SPLITS, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    # Every program waits: the next kernel counts on all that came before this one.
    if PDL:
        gdc_wait()
    if count > 1:
        first = (tl.program_id(1).to(tl.int64) * HEADS + head) * max_count
        split = tl.arange(0, MAX_SPLITS)
        own_sums = sums + (first + split) * 2
        tops = tl.load(own_sums, mask=split < count, other=NEVER)
        totals = tl.load(own_sums + 1, mask=split < count, other=0.0)
        top = tl.max(tops, axis=0)
        if SINKS:
            sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
            top = tl.maximum(top, sink)
        total = tl.sum(totals * tl.exp2(tops - top), axis=0)
        if SINKS:
            total += tl.exp2(sink - top)
        acc = tl.zeros([BLOCK_D], dtype=tl.float32)
        for start in range(0, count, CHUNK):
            some = start + tl.arange(0, CHUNK)
            weights = tl.exp2(
                tl.load(sums + (first + some) * 2, mask=some < count, other=NEVER) - top
            )
            mask = (some < count)[:, None] & (d < HEAD_DIM)[None, :]
            at = partials + (first + some)[:, None] * HEAD_DIM + d[None, :]
            acc += tl.sum(tl.load(at, mask=mask, other=0.0) * weights[:, None], axis=0)
        at = out + (token * HEADS + head) * HEAD_DIM + d
        tl.store(at, (acc * (factor / total)).to(out.dtype.element_ty), mask=d < HEAD_DIM)

"""Rows of one token in Triton: keys are cut into splits; a second kernel combines their results.

The query heads that share a KV head are one tile, so keys and values are read once. A row's
splits follow from its own length alone: which programs compute them, and how many rows are beside
it, changes no bit of its result. A row of one split is finished by the first kernel.
"""

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modeling.attention.triton_scores import LOG2_E, NEVER, attend_block, pages_of, with_sinks

COMBINED = 16
"""Splits that are added at once."""


@triton.jit  # type: ignore[untyped-decorator]
def _splits(
    seen: "Any", MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr
) -> "Any":
    """(number, keys in each) of the splits of a row that sees so many keys."""
    wanted = tl.minimum(tl.cdiv(seen, MIN_SPLIT), MAX_SPLITS)
    width = tl.cdiv(tl.cdiv(seen, wanted), BLOCK_N) * BLOCK_N
    return tl.cdiv(seen, width), width


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["tokens", "offsets", "lengths", "tables", "window", "max_count"]
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
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (block of heads, decode row, p): splits p, p + programs, ... of the row.

    tokens, offsets, lengths: int32 [decode rows]: a row's index in q and out, where its pages'
    numbers start in `tables`, its keys.
    partials: float32 [decode rows, heads, max_count, HEAD_DIM], max_count: splits of a row at
    most; sums: [.., max_count, 2], each split's largest score and sum of weights. window: keys
    that are seen at most. factor: of the output.
    """
    if PDL:
        gdc_launch_dependents()
    blocks: tl.constexpr = (GROUP + BLOCK_G - 1) // BLOCK_G
    heads: tl.constexpr = KV_HEADS * GROUP
    kv_head = tl.program_id(0) // blocks
    own = tl.program_id(1)
    # Lengths and tables are written by copies, never by a kernel, so they may be read before.
    length = tl.load(lengths + own)
    token = tl.load(tokens + own).to(tl.int64)
    table = tables + tl.load(offsets + own)
    first = tl.maximum(length - window, 0)
    count, width = _splits(length - first, MIN_SPLIT, MAX_SPLITS, BLOCK_N)
    g = tl.program_id(0) % blocks * BLOCK_G + tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + g
    mask = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    slope = tl.zeros([BLOCK_G], dtype=tl.float32)
    if ALIBI:
        slope = tl.load(slopes + head, mask=g < GROUP, other=0.0) * LOG2_E
    position = tl.zeros([BLOCK_G], dtype=tl.int32) + length - 1
    begin = first + tl.program_id(2) * width
    pages = pages_of(table, begin, tl.minimum(begin + width, length), BLOCK_N, PAGE)
    if PDL:
        gdc_wait()
    for split in range(tl.program_id(2), count, tl.num_programs(2)):
        at = q + token * Q_STRIDE + head[:, None] * HEAD_DIM + d[None, :]
        queries = tl.load(at, mask=mask, other=0.0)
        acc = tl.zeros([BLOCK_G, BLOCK_D], dtype=tl.float32)
        top = tl.full([BLOCK_G], NEVER, dtype=tl.float32)
        total = tl.zeros([BLOCK_G], dtype=tl.float32)
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
                False,
            )
            pages = following
        if count == 1:
            if SINKS:
                sink = tl.load(sinks + head, mask=g < GROUP, other=0.0).to(tl.float32) * LOG2_E
                acc = with_sinks(acc, top, total, sink, factor)
            else:
                acc = acc * (factor / total)[:, None]
            at = out + (token * heads + head)[:, None] * HEAD_DIM + d[None, :]
            tl.store(at, acc.to(out.dtype.element_ty), mask=mask)
        else:
            index = (own.to(tl.int64) * heads + head) * max_count + split
            tl.store(partials + index[:, None] * HEAD_DIM + d[None, :], acc, mask=mask)
            tl.store(sums + index * 2, top, mask=g < GROUP)
            tl.store(sums + index * 2 + 1, total, mask=g < GROUP)
        begin = start + tl.num_programs(2) * width
        pages = pages_of(table, begin, tl.minimum(begin + width, length), BLOCK_N, PAGE)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["tokens", "lengths", "window", "max_count"]
)
def combine_kernel(
    out: "Any",
    partials: "Any",
    sums: "Any",
    sinks: "Any",
    tokens: "Any",
    lengths: "Any",
    window: "Any",
    max_count: "Any",
    factor: "Any",
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (head, decode row): its splits' results into one; arguments as decode_kernel's."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0)
    own = tl.program_id(1)
    length = tl.load(lengths + own)
    token = tl.load(tokens + own).to(tl.int64)
    count, _ = _splits(tl.minimum(length, window), MIN_SPLIT, MAX_SPLITS, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    # Every program waits: the next kernel counts on all that came before this one.
    if PDL:
        gdc_wait()
    if count > 1:
        first = (own.to(tl.int64) * HEADS + head) * max_count
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

"""Rows of several tokens in Triton: a program takes some tokens of the heads that share a KV head.

A tile's keys are all before its first token (no mask), around its tokens, or where the window of
some token begins; the last two are masked, and come after the others.
"""

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modeling.attention.triton.scores import LOG2_E, NEVER, attend_block, pages_of, with_sinks

TILE_WORDS = 5
"""int32 that describe a tile, of its row: where the pages' numbers start in the tables, the first
token in q, queries, keys; and of itself: the first query."""


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["tiles", "tables", "window"]
)
def prefill_kernel(
    q: "Any",
    keys: "Any",
    values: "Any",
    out: "Any",
    sinks: "Any",
    slopes: "Any",
    tiles: "Any",
    tables: "Any",
    window: "Any",
    scale: "Any",
    cap: "Any",
    factor: "Any",
    Q_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
    PAGE: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (block of PACKED heads, tile): BLOCK_M // PACKED tokens of a row."""
    if PDL:
        gdc_launch_dependents()
    blocks: tl.constexpr = (GROUP + PACKED - 1) // PACKED
    tokens: tl.constexpr = BLOCK_M // PACKED
    kv_head = tl.program_id(0) // blocks
    record = tiles + tl.program_id(1) * WORDS
    table = tables + tl.load(record)
    token = tl.load(record + 1).to(tl.int64)
    num_queries = tl.load(record + 2)
    length = tl.load(record + 3)
    first = tl.load(record + 4)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    query = first + m // PACKED
    g = tl.program_id(0) % blocks * PACKED + m % PACKED
    head = kv_head * GROUP + g
    live = (m // PACKED < tokens) & (query < num_queries) & (g < GROUP)
    positions = length - num_queries + query
    earliest = length - num_queries + first
    latest = tl.minimum(earliest + tokens, length) - 1
    start = tl.maximum(earliest - window + 1, 0)
    num_blocks = tl.cdiv(latest + 1 - start, BLOCK_N)
    # Blocks [leading, leading + full) are seen by every token of the tile.
    leading = tl.cdiv(tl.maximum(latest - window + 1, start) - start, BLOCK_N)
    full = tl.maximum((earliest + 1 - start) // BLOCK_N - leading, 0)
    slope = tl.zeros([BLOCK_M], dtype=tl.float32)
    if ALIBI:
        slope = tl.load(slopes + head, mask=live, other=0.0) * LOG2_E
    if PDL:
        gdc_wait()

    mask = live[:, None] & (d < HEAD_DIM)[None, :]
    at = (token + query) * Q_STRIDE + head * HEAD_DIM
    queries = tl.load(q + at[:, None] + d[None, :], mask=mask, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    top = tl.full([BLOCK_M], NEVER, dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    stop = latest + 1
    at = start + leading * BLOCK_N
    pages = pages_of(table, at, stop, BLOCK_N, PAGE)
    for block in range(at, at + full * BLOCK_N, BLOCK_N):
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
            positions,
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
            False,
            False,
        )
        pages = following
    at = start + tl.where(leading > 0, 0, full) * BLOCK_N
    pages = pages_of(table, at, stop, BLOCK_N, PAGE)
    for masked in range(0, num_blocks - full):
        block = at
        at = start + (masked + 1 + tl.where(masked + 1 < leading, 0, full)) * BLOCK_N
        following = pages_of(table, at, stop, BLOCK_N, PAGE)
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
            positions,
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
            True,
        )
        pages = following
    if SINKS:
        sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * LOG2_E
        acc = with_sinks(acc, top, total, sink, factor)
    else:
        acc = acc * (factor / total)[:, None]
    at = ((token + query) * (KV_HEADS * GROUP) + head) * HEAD_DIM
    tl.store(out + at[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=mask)

"""Rows of few tokens in Triton: keys are cut into splits; their results are combined in order.

The query heads that share a KV head, of all of a row's tokens, are one tile, so keys and values are
read once. A row's splits follow from its own length alone. One program computes all splits of a
row, or several share them and the last of these to arrive reads the others' results from memory;
both combine them in the same order by the same operations. So which programs compute a row, and how
many rows are beside it, changes no bit of its result.
"""

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modeling.attention.triton.scores import LOG2_E, NEVER, attend_block, pages_of, with_sinks


@triton.jit  # type: ignore[untyped-decorator]
def first_key(length: "Any", num_queries: "Any", window: "Any") -> "Any":
    """The first key that the first of a row's queries sees."""
    return tl.maximum(length - num_queries + 1 - window, 0)


@triton.jit  # type: ignore[untyped-decorator]
def splits_of(
    seen: "Any", MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr
) -> "Any":
    """(number, keys in each) of the splits of a row that sees so many keys."""
    wanted = tl.minimum(tl.cdiv(seen, MIN_SPLIT), MAX_SPLITS)
    width = tl.cdiv(tl.cdiv(seen, wanted), BLOCK_N) * BLOCK_N
    return tl.cdiv(seen, width), width


@triton.jit  # type: ignore[untyped-decorator]
def blocks_of(
    seen: "Any", count: "Any", width: "Any", program: "Any", programs: "Any", BLOCK_N: tl.constexpr
) -> "Any":
    """How many blocks of keys splits program, program + programs, ... of a row have together."""
    whole = tl.cdiv(count - program, programs) * (width // BLOCK_N)
    has_last = (count - 1 - program) % programs == 0
    lacking = count * (width // BLOCK_N) - tl.cdiv(seen, BLOCK_N)
    return whole - tl.where(has_last, lacking, 0)


@triton.jit  # type: ignore[untyped-decorator]
def lines(
    GROUP: tl.constexpr, QUERIES: tl.constexpr, PACKED: tl.constexpr, M: tl.constexpr
) -> "Any":
    """(query, head, whether there is one) of each of M lines of a program's tile."""
    blocks: tl.constexpr = (GROUP + PACKED - 1) // PACKED
    m = tl.arange(0, M)
    query = m // PACKED
    g = tl.program_id(0) % blocks * PACKED + m % PACKED
    head = tl.program_id(0) // blocks * GROUP + g
    return query, head, (query < QUERIES) & (g < GROUP)


@triton.jit  # type: ignore[untyped-decorator]
def combined(
    acc: "Any", top: "Any", total: "Any", other: "Any", other_top: "Any", other_total: "Any"
) -> "Any":
    """(acc, top, total) of two parts of a row's keys, as `attend_block` has them of each.

    A compiler may contract a sum of two products in two ways, so it is left no choice.
    """
    higher = tl.maximum(top, other_top)
    kept, more = tl.exp2(top - higher), tl.exp2(other_top - higher)
    acc = tl.fma(acc, kept[:, None], other * more[:, None])
    return acc, higher, tl.fma(total, kept, other_total * more)


@triton.jit  # type: ignore[untyped-decorator]
def added(
    partials: "Any",
    sums: "Any",
    index: "Any",
    live: "Any",
    count: "Any",
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LIVE_M: tl.constexpr,
    CHUNK: tl.constexpr,
) -> "Any":
    """(acc, top, total) of a row's splits 0 .. count - 1, from memory; index: [LIVE_M], the first.

    CHUNK splits are loaded before the first of them is added: one wait for all.
    """
    d = tl.arange(0, BLOCK_D)
    mask = live[:, None] & (d < HEAD_DIM)[None, :]
    row_acc = tl.zeros([LIVE_M, BLOCK_D], dtype=tl.float32)
    row_top = tl.full([LIVE_M], NEVER, dtype=tl.float32)
    row_total = tl.zeros([LIVE_M], dtype=tl.float32)
    for start in range(0, count, CHUNK):
        at = partials + (index + start)[:, None] * HEAD_DIM + d[None, :]
        own = sums + (index + start) * 2
        accs, tops, totals = (), (), ()
        for each in tl.static_range(CHUNK):
            more = start + each < count
            inside = live & more
            # .cg: past the first-level cache, which may lack other programs' stores.
            acc = tl.load(at + each * HEAD_DIM, mask & more, 0.0, cache_modifier=".cg")
            top = tl.load(own + each * 2, inside, NEVER, cache_modifier=".cg")
            total = tl.load(own + each * 2 + 1, inside, 0.0, cache_modifier=".cg")
            accs = accs + (acc,)  # type: ignore[assignment]  # noqa: RUF005
            tops = tops + (top,)  # type: ignore[assignment]  # noqa: RUF005
            totals = totals + (total,)  # type: ignore[assignment]  # noqa: RUF005
        for each in tl.static_range(CHUNK):
            row_acc, row_top, row_total = combined(
                row_acc, row_top, row_total, accs[each], tops[each], totals[each]
            )
    return row_acc, row_top, row_total


@triton.jit  # type: ignore[untyped-decorator]
def finish(
    acc: "Any",
    top: "Any",
    total: "Any",
    out: "Any",
    sinks: "Any",
    tokens: "Any",
    heads: "Any",
    live: "Any",
    factor: "Any",
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:
    """Store what all splits of a row give: of each line of a tile its token, head, whether live.

    VALUE_DIM: numbers of a head that have meaning, of HEAD_DIM.
    """
    # Nothing was added up in memory for lines without a query.
    total = tl.where(live, total, 1.0)
    if SINKS:
        sink = tl.load(sinks + heads, mask=live, other=0.0).to(tl.float32) * LOG2_E
        acc = with_sinks(acc, top, total, sink, factor)
    else:
        acc = acc * (factor / total)[:, None]
    d = tl.arange(0, BLOCK_D)
    at = out + ((tokens * HEADS + heads) * HEAD_DIM)[:, None] + d[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=live[:, None] & (d < VALUE_DIM)[None, :])


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "tokens",
        "offsets",
        "lengths",
        "row_queries",
        "order",
        "arrived",
        "tables",
        "window",
        "max_count",
        "usual",
        "most_keys",
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
    order: "Any",
    arrived: "Any",
    tables: "Any",
    window: "Any",
    max_count: "Any",
    usual: "Any",
    most_keys: "Any",
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
    LIVE_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (block of PACKED heads, i, p): splits p, p + programs, ... of a row, or all.

    The row is the i-th of `order`, int32 [rows]: the longest first, so that those which begin last,
    when other programs have ended already, are the shortest.

    usual: programs of a row, if it has as many splits; a longer row has one for `most_keys` each.

    tokens, offsets, lengths, row_queries: int32 [rows]: the index of a row's first token in q and
    out, where its pages' numbers start in `tables`, its keys, its queries. QUERIES tokens of q and
    out belong to a row; what is computed for those behind its queries means nothing.
    partials: float32 [rows, QUERIES, heads, max_count, HEAD_DIM], max_count: splits of a row at
    most; sums: [.., max_count, 2], each split's largest score and sum of weights. arrived: int32
    zeros [rows, blocks of heads], zeros again afterwards. window: keys that are seen at most.
    factor: of the output. LIVE_M: a power of two that holds a tile's lines, which BLOCK_M may
    exceed. CHUNK: splits of which the results are loaded at once.
    """
    if PDL:
        gdc_launch_dependents()
    HEADS: tl.constexpr = KV_HEADS * GROUP
    kv_head = tl.program_id(0) // ((GROUP + PACKED - 1) // PACKED)
    own = tl.load(order + tl.program_id(1))
    program = tl.program_id(2)
    # Lengths, order and tables are written by copies, or long before (see GraphTriton.key_lengths),
    # so they may be read before the kernel in front of this one ends.
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
    query, head, live = lines(GROUP, QUERIES, PACKED, BLOCK_M)
    mask = live[:, None] & (d < HEAD_DIM)[None, :]
    slope = tl.zeros([BLOCK_M], dtype=tl.float32)
    if ALIBI:
        slope = tl.load(slopes + head, mask=live, other=0.0) * LOG2_E
    position = length - num_queries + query
    split, start = program, first + program * width
    pages = pages_of(table, start, length, BLOCK_N, PAGE)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    top = tl.full([BLOCK_M], NEVER, dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    row_acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_top = tl.full([BLOCK_M], NEVER, dtype=tl.float32)
    row_total = tl.zeros([BLOCK_M], dtype=tl.float32)
    index = ((own.to(tl.int64) * QUERIES + query) * HEADS + head) * max_count
    at = (token + query) * Q_STRIDE + head * HEAD_DIM
    if PDL:
        gdc_wait()
    queries = tl.load(q + at[:, None] + d[None, :], mask=mask, other=0.0)
    # One loop over all blocks, so that loads go on where a split ends.
    for _ in range(blocks_of(length - first, count, width, program, programs, BLOCK_N)):
        ends = start + BLOCK_N >= tl.minimum(first + (split + 1) * width, length)
        after = tl.where(ends, first + (split + programs) * width, start + BLOCK_N)
        following = pages_of(table, after, length, BLOCK_N, PAGE)
        acc, top, total = attend_block(
            queries,
            acc,
            top,
            total,
            keys,
            values,
            pages,
            start,
            length,
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
        if ends:
            if is_alone:
                row_acc, row_top, row_total = combined(row_acc, row_top, row_total, acc, top, total)
            else:
                one = index + split
                tl.store(partials + one[:, None] * HEAD_DIM + d[None, :], acc, mask=mask)
                tl.store(sums + one * 2, top, mask=live)
                tl.store(sums + one * 2 + 1, total, mask=live)
            acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
            top = tl.full([BLOCK_M], NEVER, dtype=tl.float32)
            total = tl.zeros([BLOCK_M], dtype=tl.float32)
            split += programs
        start, pages = after, following
    if is_alone:
        finish(
            row_acc, row_top, row_total, out, sinks, token + query, head, live, factor,
            HEADS, HEAD_DIM, HEAD_DIM, BLOCK_D, SINKS,
        )  # fmt: skip
    else:
        # One thread counts the arrival for all: the barrier puts every thread's stores before it,
        # and acq_rel makes them visible to the program that finds itself last.
        tl.debug_barrier()
        cell = arrived + own * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(cell, 1, sem="acq_rel") == programs - 1:
            # Zero again for the next launch, which begins to add only after this one has ended.
            tl.atomic_xchg(cell, 0, sem="relaxed")
            # Without the lines that fill the tile up.
            queried, headed, filled = lines(GROUP, QUERIES, PACKED, LIVE_M)
            parts = ((own.to(tl.int64) * QUERIES + queried) * HEADS + headed) * max_count
            all_acc, all_top, all_total = added(
                partials, sums, parts, filled, count, HEAD_DIM, BLOCK_D, LIVE_M, CHUNK
            )
            finish(
                all_acc, all_top, all_total, out, sinks, token + queried, headed, filled, factor,
                HEADS, HEAD_DIM, HEAD_DIM, BLOCK_D, SINKS,
            )  # fmt: skip

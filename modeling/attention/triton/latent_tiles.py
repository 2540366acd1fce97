"""Attention over latents in Gluon, for Hopper: what latents.py does, faster.

Gluon is Triton with the layouts of tensors in the program's hands. A block of keys is on its way
while the one before it is multiplied, which Triton's own order of a loop does not reach: two blocks
and a tile's queries fill a multiprocessor's memory. Of a block one warpgroup has the scores of half
the keys, and sums half of a value's numbers; they give each other their weights.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language import debug_barrier  # Gluon's own has other names in other versions.
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modeling.attention.triton.decode import blocks_of, first_key, splits_of
from modeling.attention.triton.scores import NEVER

# Triton 3.8 gave it another name, and 3.9 took this one away.
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
ADDED = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0]))
"""Layouts of what eight warps copy, 16 bytes a thread, and of eight lines that they add up."""

WIDE = gl.constexpr(gl.NVMMASharedLayout(128, 16))
"""The layout of shared memory that warpgroups multiply from, in rows of 64 numbers or more."""

# Arguments are grouped by what they describe; a line for each would hide the kernels.
# fmt: off


@gluon.jit  # type: ignore[untyped-decorator]
def _memory(
    dtype: gl.constexpr, M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, REST: gl.constexpr
) -> "Any":
    """Shared memory: queries and their rest, weights, two blocks of keys and their rests."""
    NARROW: gl.constexpr = gl.NVMMASharedLayout(REST * 2, 16)
    queries = gl.allocate_shared_memory(dtype, [M, D], WIDE)
    others = gl.allocate_shared_memory(dtype, [M, REST], NARROW)
    shared = gl.allocate_shared_memory(dtype, [M, N], WIDE)
    blocks = gl.allocate_shared_memory(dtype, [2, N, D], WIDE)
    rests = gl.allocate_shared_memory(dtype, [2, N, REST], NARROW)
    return queries, others, shared, blocks, rests


@gluon.jit  # type: ignore[untyped-decorator]
def _nothing(
    M: gl.constexpr, D: gl.constexpr, OF_SCORES: gl.constexpr, OF_SUMS: gl.constexpr
) -> "Any":
    """(acc, top, total) before any key."""
    acc = gl.zeros([M, D], gl.float32, OF_SUMS)
    top = gl.full([M], NEVER, gl.float32, gl.SliceLayout(1, OF_SCORES))
    return acc, top, gl.zeros([M], gl.float32, gl.SliceLayout(1, OF_SCORES))


@gluon.jit  # type: ignore[untyped-decorator]
def _pages(
    table: "Any", start: "Any", stop: "Any", ROWS: gl.constexpr, PAGE: gl.constexpr
) -> "Any":
    """Pages of the positions from `start` on; from `stop` on those of the last position."""
    at = gl.minimum(start + gl.arange(0, ROWS, gl.SliceLayout(1, COPIED)), stop - 1)
    return gl.load(table + at // PAGE)


@gluon.jit  # type: ignore[untyped-decorator]
def _copy(
    into: "Any", rest: "Any", lines: "Any", WIDTH: gl.constexpr, REST: gl.constexpr
) -> None:
    """Begin to copy WIDTH and REST numbers from each of `lines` on."""
    d = gl.arange(0, WIDTH, gl.SliceLayout(0, COPIED))
    e = gl.arange(0, REST, gl.SliceLayout(0, COPIED))
    first = gl.expand_dims(lines, 1)
    async_load(into, first + gl.expand_dims(d, 0))
    async_load(rest, first + (gl.expand_dims(e, 0) + WIDTH))
    async_copy.commit_group()


@gluon.jit  # type: ignore[untyped-decorator]
def _copy_keys(
    into: "Any", rest: "Any", keys: "Any", pages: "Any", start: "Any", stop: "Any",
    ROWS: gl.constexpr, PAGE: gl.constexpr, WIDTH: gl.constexpr, REST: gl.constexpr,
) -> None:
    """Begin to copy the keys from the position `start` on; see `_pages`."""
    at = gl.minimum(start + gl.arange(0, ROWS, gl.SliceLayout(1, COPIED)), stop - 1)
    lines = keys + (pages.to(gl.int64) * PAGE + at % PAGE) * (WIDTH + REST)
    _copy(into, rest, lines, WIDTH, REST)


@gluon.jit  # type: ignore[untyped-decorator]
def _arrived() -> None:
    """Wait until all copies are there, and until no warp multiplies the block before any more."""
    async_copy.wait_group(0)
    fence_async_shared()
    debug_barrier()


@gluon.jit  # type: ignore[untyped-decorator]
def _attend(
    queries: "Any", others: "Any", shared: "Any", acc: "Any", top: "Any", total: "Any",
    k: "Any", rest: "Any", positions: "Any", start: "Any", window: "Any", scale: "Any",
    OF_SCORES: gl.constexpr, OF_SUMS: gl.constexpr,
) -> "Any":
    """(acc, top, total) after the keys k, rest from `start` on; see `scores.attend_block`.

    shared: memory for the weights, which one warpgroup computes and both read.
    """
    n = start + gl.arange(0, k.shape[0], gl.SliceLayout(0, OF_SCORES))
    behind = gl.expand_dims(positions, 1) - gl.expand_dims(n, 0)
    scores = gl.zeros(behind.shape, gl.float32, OF_SCORES)
    scores = warpgroup_mma(queries, k.permute((1, 0)), scores, use_acc=False, is_async=True)
    scores = warpgroup_mma(others, rest.permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,)) * scale
    scores = gl.where((behind >= 0) & (behind < window), scores, NEVER)
    higher = gl.maximum(top, gl.max(scores, 1))
    weights = gl.exp2(scores - gl.expand_dims(higher, 1))
    shrunk = gl.exp2(top - higher)
    total = total * shrunk + gl.sum(weights, 1)
    acc *= gl.expand_dims(gl.convert_layout(shrunk, gl.SliceLayout(1, OF_SUMS)), 1)
    shared.store(weights.to(k.dtype))
    fence_async_shared()
    debug_barrier()
    acc = warpgroup_mma(shared, k, acc, is_async=True)
    return warpgroup_mma_wait(0, deps=(acc,)), higher, total


@gluon.jit  # type: ignore[untyped-decorator]
def _store(
    acc: "Any", total: "Any", memory: "Any", lines: "Any", live: "Any", factor: "Any",
    VALUE_DIM: gl.constexpr, OF_SUMS: gl.constexpr,
) -> None:
    """Store a tile's results through `memory`, so that a warp stores numbers side by side.

    lines: [M], where each one's begins. live: [M], which of them there are.
    """
    ratio = gl.convert_layout(factor / total, gl.SliceLayout(1, OF_SUMS))
    debug_barrier()
    memory.store((acc * gl.expand_dims(ratio, 1)).to(memory.dtype))
    d = gl.arange(0, VALUE_DIM, gl.SliceLayout(0, COPIED))
    to = gl.expand_dims(lines, 1) + gl.expand_dims(d, 0)
    gl.store(to, memory.load(COPIED), mask=gl.expand_dims(live, 1))


@gluon.jit(do_not_specialize=["tiles", "tables", "window"])  # type: ignore[untyped-decorator]
def latent_tile_kernel(
    q: "Any", keys: "Any", _values: "Any", out: "Any", _sinks: "Any", _slopes: "Any",
    tiles: "Any", tables: "Any", window: "Any", scale: "Any", _cap: "Any", factor: "Any",
    Q_STRIDE: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PACKED: gl.constexpr,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_REST: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    WORDS: gl.constexpr, PAGE: gl.constexpr,
    CAPPED: gl.constexpr, SINKS: gl.constexpr, ALIBI: gl.constexpr, PDL: gl.constexpr,
) -> None:
    """As `latents.latent_prefill_kernel`, for VALUE_DIM == BLOCK_D and a rest of BLOCK_REST."""
    if PDL:
        gdc_launch_dependents()
    gl.static_assert(KV_HEADS == 1 and not (CAPPED or SINKS or ALIBI))
    gl.static_assert(VALUE_DIM == BLOCK_D and HEAD_DIM == BLOCK_D + BLOCK_REST)
    TOKENS: gl.constexpr = BLOCK_M // PACKED
    OF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_N // 2, 16])
    OF_SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, VALUE_DIM // 2, 16])
    record = tiles + gl.program_id(1) * WORDS
    table = tables + gl.load(record)
    token = gl.load(record + 1).to(gl.int64)
    num_queries = gl.load(record + 2)
    length = gl.load(record + 3)
    first = gl.load(record + 4)
    earliest = length - num_queries + first
    stop = gl.minimum(earliest + TOKENS, length)
    start = gl.maximum(earliest - window + 1, 0)
    pages = _pages(table, start, stop, BLOCK_N, PAGE)
    queries, others, shared, blocks, rests = _memory(
        keys.dtype.element_ty, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_REST
    )
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, COPIED))
    query, group = first + m // PACKED, gl.program_id(0) * PACKED + m % PACKED
    live = (m // PACKED < TOKENS) & (query < num_queries) & (group < GROUP)
    # Lines beyond these compute what another one does.
    query, head = gl.minimum(query, num_queries - 1), gl.minimum(group, GROUP - 1)
    if PDL:
        gdc_wait()
    _copy(queries, others, q + (token + query) * Q_STRIDE + head * HEAD_DIM, BLOCK_D, BLOCK_REST)
    _copy_keys(blocks.index(0), rests.index(0), keys, pages, start, stop, BLOCK_N, PAGE, BLOCK_D,
               BLOCK_REST)
    pages = _pages(table, start + BLOCK_N, stop, BLOCK_N, PAGE)
    own = gl.arange(0, BLOCK_M, gl.SliceLayout(1, OF_SCORES))
    positions = earliest + own // PACKED
    acc, top, total = _nothing(BLOCK_M, BLOCK_D, OF_SCORES, OF_SUMS)
    slot = 0
    for block in range(start, stop, BLOCK_N):
        _arrived()
        following = block + BLOCK_N
        if following < stop:
            _copy_keys(blocks.index(1 - slot), rests.index(1 - slot), keys, pages, following, stop,
                       BLOCK_N, PAGE, BLOCK_D, BLOCK_REST)
        pages = _pages(table, following + BLOCK_N, stop, BLOCK_N, PAGE)
        acc, top, total = _attend(
            queries, others, shared, acc, top, total, blocks.index(slot), rests.index(slot),
            positions, block, window, scale, OF_SCORES, OF_SUMS,
        )
        slot = 1 - slot
    lines = out + ((token + query) * GROUP + head) * HEAD_DIM
    _store(acc, total, queries, lines, live, factor, VALUE_DIM, OF_SUMS)


@gluon.jit  # type: ignore[untyped-decorator]
def _next(
    start: "Any", split: "Any", first: "Any", width: "Any", programs: "Any", length: "Any",
    BLOCK_N: gl.constexpr,
) -> "Any":
    """(start, split) of the block behind the one at `start`, and whether that ends its split."""
    ends = start + BLOCK_N >= gl.minimum(first + (split + 1) * width, length)
    following = gl.where(ends, split + programs, split)
    return gl.where(ends, first + following * width, start + BLOCK_N), following, ends


@gluon.jit  # type: ignore[untyped-decorator]
def _add(
    partials: "Any", sums: "Any", index: "Any", live: "Any", count: "Any", lines: "Any",
    factor: "Any", VALUE_DIM: gl.constexpr, CHUNK: gl.constexpr,
) -> None:
    """Add the results of a row's splits for eight lines and store them; see `decode.added`.

    index: [8], of the lines' first results. lines: [8], where the sums go.
    """
    d = gl.expand_dims(gl.arange(0, VALUE_DIM, gl.SliceLayout(0, ADDED)), 0)
    mask = gl.expand_dims(live, 1)
    acc = gl.zeros([8, VALUE_DIM], gl.float32, ADDED)
    top = gl.full([8], NEVER, gl.float32, gl.SliceLayout(1, ADDED))
    total = gl.zeros([8], gl.float32, gl.SliceLayout(1, ADDED))
    for start in range(0, count, CHUNK):
        at = partials + gl.expand_dims(index + start, 1) * VALUE_DIM + d
        own = sums + (index + start) * 2
        accs, tops, totals = (), (), ()
        for each in gl.static_range(CHUNK):
            more = start + each < count
            part = gl.load(at + each * VALUE_DIM, mask & more, 0.0, cache_modifier=".cg")
            part_top = gl.load(own + each * 2, live & more, NEVER, cache_modifier=".cg")
            part_total = gl.load(own + each * 2 + 1, live & more, 0.0, cache_modifier=".cg")
            accs = accs + (part,)  # type: ignore[assignment]  # noqa: RUF005
            tops = tops + (part_top,)  # type: ignore[assignment]  # noqa: RUF005
            totals = totals + (part_total,)  # type: ignore[assignment]  # noqa: RUF005
        for each in gl.static_range(CHUNK):
            higher = gl.maximum(top, tops[each])
            kept, other = gl.exp2(top - higher), gl.exp2(tops[each] - higher)
            acc = gl.fma(acc, gl.expand_dims(kept, 1), accs[each] * gl.expand_dims(other, 1))
            total, top = gl.fma(total, kept, totals[each] * other), higher
    acc = acc * gl.expand_dims(factor / gl.where(live, total, 1.0), 1)
    gl.store(gl.expand_dims(lines, 1) + d, acc.to(lines.dtype.element_ty), mask=mask)


@gluon.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "tokens", "offsets", "lengths", "row_queries", "order", "arrived", "tables", "window",
        "max_count", "usual", "most_keys",
    ]
)
def latent_row_kernel(
    q: "Any", keys: "Any", _values: "Any", out: "Any", partials: "Any", sums: "Any",
    _sinks: "Any", _slopes: "Any",
    tokens: "Any", offsets: "Any", lengths: "Any", row_queries: "Any", order: "Any",
    arrived: "Any", tables: "Any", window: "Any", max_count: "Any", usual: "Any",
    most_keys: "Any", scale: "Any", _cap: "Any", factor: "Any",
    Q_STRIDE: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_REST: gl.constexpr, QUERIES: gl.constexpr, PACKED: gl.constexpr,
    BLOCK_M: gl.constexpr, LIVE_M: gl.constexpr, BLOCK_N: gl.constexpr, PAGE: gl.constexpr,
    MIN_SPLIT: gl.constexpr, MAX_SPLITS: gl.constexpr, CHUNK: gl.constexpr,
    CAPPED: gl.constexpr, SINKS: gl.constexpr, ALIBI: gl.constexpr, PDL: gl.constexpr,
) -> None:
    """As `latents.latent_decode_kernel`; results of a row of several splits are all in memory.

    LIVE_M and CHUNK are not read: sums are added for eight lines at a time.
    """
    if PDL:
        gdc_launch_dependents()
    gl.static_assert(KV_HEADS == 1 and not (CAPPED or SINKS or ALIBI))
    gl.static_assert(VALUE_DIM == BLOCK_D and HEAD_DIM == BLOCK_D + BLOCK_REST)
    OF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_N // 2, 16])
    OF_SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, VALUE_DIM // 2, 16])
    own = gl.load(order + gl.program_id(1))
    program = gl.program_id(2)
    length = gl.load(lengths + own)
    token = gl.load(tokens + own).to(gl.int64)
    table = tables + gl.load(offsets + own)
    num_queries = 1
    if QUERIES > 1:
        num_queries = gl.load(row_queries + own)
    first = first_key(length, num_queries, window)
    seen = length - first
    count, width = splits_of(seen, MIN_SPLIT, MAX_SPLITS, BLOCK_N)
    programs = gl.minimum(gl.maximum(usual, gl.cdiv(seen, most_keys)), count)
    programs = gl.minimum(programs, gl.num_programs(2))
    # These need not wait: the first program of each row does.
    if program >= programs:
        return
    split, start = program, first + program * width
    after, later, ends = _next(start, split, first, width, programs, length, BLOCK_N)
    pages = _pages(table, start, length, BLOCK_N, PAGE)
    following = _pages(table, after, length, BLOCK_N, PAGE)
    queries, others, shared, blocks, rests = _memory(
        keys.dtype.element_ty, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_REST
    )
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, COPIED))
    query, group = m // PACKED, gl.program_id(0) * PACKED + m % PACKED
    live = (query < QUERIES) & (group < GROUP)
    # Lines beyond these compute what another one does.
    query, head = gl.minimum(query, QUERIES - 1), gl.minimum(group, GROUP - 1)
    positions = gl.arange(0, BLOCK_M, gl.SliceLayout(1, OF_SCORES)) // PACKED + length - num_queries
    if PDL:
        gdc_wait()
    _copy(queries, others, q + (token + query) * Q_STRIDE + head * HEAD_DIM, BLOCK_D, BLOCK_REST)
    _copy_keys(blocks.index(0), rests.index(0), keys, pages, start, length, BLOCK_N, PAGE, BLOCK_D,
               BLOCK_REST)
    acc, top, total = _nothing(BLOCK_M, BLOCK_D, OF_SCORES, OF_SUMS)
    left = blocks_of(seen, count, width, program, programs, BLOCK_N)
    slot = 0
    while left > 0:
        _arrived()
        if left > 1:
            _copy_keys(blocks.index(1 - slot), rests.index(1 - slot), keys, following, after,
                       length, BLOCK_N, PAGE, BLOCK_D, BLOCK_REST)
        second, third, then_ends = _next(after, later, first, width, programs, length, BLOCK_N)
        following = _pages(table, second, length, BLOCK_N, PAGE)
        acc, top, total = _attend(
            queries, others, shared, acc, top, total, blocks.index(slot), rests.index(slot),
            positions, start, window, scale, OF_SCORES, OF_SUMS,
        )
        if ends and count > 1:
            part = gl.arange(0, BLOCK_M, gl.SliceLayout(1, OF_SUMS))
            part_query, part_group = part // PACKED, gl.program_id(0) * PACKED + part % PACKED
            there = (part_query < QUERIES) & (part_group < GROUP)
            at = ((own.to(gl.int64) * QUERIES + part_query) * GROUP + part_group) * max_count
            d = gl.arange(0, VALUE_DIM, gl.SliceLayout(0, OF_SUMS))
            to = partials + gl.expand_dims((at + split) * VALUE_DIM, 1) + gl.expand_dims(d, 0)
            gl.store(to, acc, mask=gl.expand_dims(there, 1))
            to = sums + (at + split) * 2
            gl.store(to, gl.convert_layout(top, gl.SliceLayout(1, OF_SUMS)), mask=there)
            gl.store(to + 1, gl.convert_layout(total, gl.SliceLayout(1, OF_SUMS)), mask=there)
            acc, top, total = _nothing(BLOCK_M, BLOCK_D, OF_SCORES, OF_SUMS)
        start, split, ends = after, later, then_ends
        after, later = second, third
        slot = 1 - slot
        left -= 1
    if count == 1:
        lines = out + ((token + query) * GROUP + head) * HEAD_DIM
        _store(acc, total, queries, lines, live, factor, VALUE_DIM, OF_SUMS)
    else:
        # One thread counts the arrival for all: the barrier puts every thread's stores before it,
        # and acq_rel makes them visible to the program that finds itself last.
        debug_barrier()
        cell = arrived + own * gl.num_programs(0) + gl.program_id(0)
        if gl.atomic_add(cell, 1, sem="acq_rel") == programs - 1:
            # Zero again for the next launch, which begins to add only after this one has ended.
            gl.atomic_xchg(cell, 0, sem="relaxed")
            for line in range(0, QUERIES * PACKED, 8):
                eight = line + gl.arange(0, 8, gl.SliceLayout(1, ADDED))
                each, one = eight // PACKED, gl.program_id(0) * PACKED + eight % PACKED
                here = (each < QUERIES) & (one < GROUP)
                index = ((own.to(gl.int64) * QUERIES + each) * GROUP + one) * max_count
                to = out + ((token + each) * GROUP + one) * HEAD_DIM
                _add(partials, sums, index, here, count, to, factor, VALUE_DIM, 2048 // VALUE_DIM)

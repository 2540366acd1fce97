"""What adapters of the embedding read: rank rows of A at the tokens' ids.

    embed:  s[p, r] = A[row(p, r), id(token(p))], 0 for another rank's ids

It runs instead of the shrink (shrink.py), before the expand: an id is a vector of zeros
with a one.
"""

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modeling.adapters.kernels.shrink import pages_of, pool_rows

# Arguments are grouped by what they describe; a line for each would hide the kernel.
# fmt: off


@triton.jit(do_not_specialize=["projection", "width"])  # type: ignore[untyped-decorator]
def embed_kernel(
    ids: "Any", foreign: "Any", a: "Any",
    records: "Any", page_table: "Any", ranks: "Any",
    partials: "Any", projection: "Any", width: "Any",
    PROJECTIONS: tl.constexpr, TABLE_PAGES: tl.constexpr, TABLE_LAYERS: tl.constexpr,
    LAYERS: tl.constexpr, MAX_RANK: tl.constexpr, HEADER: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, HAS_FOREIGN: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """Program (tiles): partials[p, r] of the first split; ids: int64, width: this rank's ids."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    m = tl.arange(0, BLOCK_M)
    num_tiles = tl.load(records + tl.program_id(0) * (HEADER + BLOCK_M) + 2)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        record = records + tile * (HEADER + BLOCK_M)
        entry = tl.load(record) * PROJECTIONS + projection
        rank = tl.load(ranks + entry * TABLE_LAYERS)
        table = page_table + entry * TABLE_PAGES
        tokens = tl.load(record + HEADER + m)
        live = tokens >= 0
        own = tl.load(ids + tokens, mask=live, other=0)
        wanted = live
        if HAS_FOREIGN:
            wanted = live & (tl.load(foreign + tokens, mask=live, other=1) == 0)
        out = partials + (tl.load(record + 1) + m) * MAX_RANK
        r = tl.arange(0, ROWS)
        for _ in range(0, rank, ROWS):
            rows = pool_rows(a, pages_of(table, r, TABLE_PAGES), 0, r, width, LAYERS)
            mask = (r < rank)[:, None] & wanted[None, :]
            found = tl.load(rows[:, None] + own[None, :], mask=mask, other=0.0)
            # Zeros too: the expand reads what another launch has left here.
            out_mask = (r < rank)[:, None] & live[None, :]
            tl.store(out[None, :] + r[:, None], found.to(tl.float32), mask=out_mask)
            r += ROWS

"""What trained tokens set in a captured step: rows that are embedded, and logits.

    embedding:  y[token(p), o] = R[row(p, r), o]    where id(token(p)) = id(r)
    head:       z[token(p), id(r)] = s[p, r]        s = R x, which the shrink has left

A row's id lies in Bt, in digits (peft/tokens.py). Tiles, records and pools are those of the shrink
(shrink.py). No kernel here starts before the one ahead of it has ended.
"""

from typing import Any

import triton
import triton.language as tl

from modeling.adapters.kernels.expand import sums_of
from modeling.adapters.kernels.shrink import pages_of, pool_rows

UNSPECIALIZED = ["projection", "width", "stride", "num_splits", "positions"]

# Arguments are grouped by what they describe; a line for each would hide the kernels.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def _token_ids(
    bt: "Any", table: "Any", r: "Any", rank: "Any",
    TABLE_PAGES: tl.constexpr, LAYERS: tl.constexpr, DIGITS: tl.constexpr, DIGIT: tl.constexpr,
) -> "Any":
    """The token ids of rows r; -2 beyond the adapter's own."""
    digits = pool_rows(bt, pages_of(table, r, TABLE_PAGES), 0, r, DIGITS, LAYERS)
    ids = tl.zeros_like(r)
    for n in tl.static_range(DIGITS):
        digit = tl.load(digits + (DIGITS - 1 - n), mask=r < rank, other=0.0)
        ids = ids * DIGIT + digit.to(tl.float32).to(tl.int32)
    return tl.where(r < rank, ids, -2)


@triton.jit(do_not_specialize=UNSPECIALIZED)  # type: ignore[untyped-decorator]
def set_embedded_kernel(
    y: "Any", input_ids: "Any", a: "Any", bt: "Any",
    records: "Any", page_table: "Any", ranks: "Any",
    projection: "Any", width: "Any", stride: "Any",
    PROJECTIONS: tl.constexpr, TABLE_PAGES: tl.constexpr, TABLE_LAYERS: tl.constexpr,
    LAYERS: tl.constexpr, HEADER: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DIGITS: tl.constexpr, DIGIT: tl.constexpr,
) -> None:
    """Program (tiles): y[token] = R[r] where the token is r's; input_ids: int64."""
    m = tl.arange(0, BLOCK_M)
    num_tiles = tl.load(records + tl.program_id(0) * (HEADER + BLOCK_M) + 2)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        record = records + tile * (HEADER + BLOCK_M)
        entry = tl.load(record) * PROJECTIONS + projection
        rank = tl.load(ranks + entry * TABLE_LAYERS)
        table = page_table + entry * TABLE_PAGES
        tokens = tl.load(record + HEADER + m)
        own = tl.load(input_ids + tokens, mask=tokens >= 0, other=-1).to(tl.int32)
        found = tl.full([BLOCK_M], -1, dtype=tl.int32)
        r = tl.arange(0, ROWS)
        for _ in range(0, rank, ROWS):
            ids = _token_ids(bt, table, r, rank, TABLE_PAGES, LAYERS, DIGITS, DIGIT)
            same = ids[:, None] == own[None, :]
            found = tl.maximum(found, tl.max(tl.where(same, r[:, None], -1), axis=0))
            r += ROWS
        if tl.max(found, axis=0) >= 0:
            row = tl.maximum(found, 0)
            rows = pool_rows(a, tl.load(table + row // 8), 0, row, width, LAYERS)
            out = y + tokens.to(tl.int64) * stride
            for first in range(0, width, COLUMNS):
                k = first + tl.arange(0, COLUMNS)
                mask = (found >= 0)[:, None] & (k < width)[None, :]
                value = tl.load(rows[:, None] + k[None, :], mask=mask, other=0.0)
                tl.store(out[:, None] + k[None, :], value, mask=mask)


@triton.jit(do_not_specialize=UNSPECIALIZED)  # type: ignore[untyped-decorator]
def set_logits_kernel(
    z: "Any", bt: "Any",
    records: "Any", page_table: "Any", ranks: "Any", partials: "Any",
    projection: "Any", stride: "Any", num_splits: "Any", positions: "Any",
    PROJECTIONS: tl.constexpr, TABLE_PAGES: tl.constexpr, TABLE_LAYERS: tl.constexpr,
    LAYERS: tl.constexpr, MAX_RANK: tl.constexpr, HEADER: tl.constexpr,
    SPLITS: tl.constexpr, SUMMED: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, DIGITS: tl.constexpr, DIGIT: tl.constexpr,
) -> None:
    """Program (tiles): z[token, id(r)] = s[p, r]."""
    m = tl.arange(0, BLOCK_M)
    num_tiles = tl.load(records + tl.program_id(0) * (HEADER + BLOCK_M) + 2)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        record = records + tile * (HEADER + BLOCK_M)
        entry = tl.load(record) * PROJECTIONS + projection
        rank = tl.load(ranks + entry * TABLE_LAYERS)
        table = page_table + entry * TABLE_PAGES
        tokens = tl.load(record + HEADER + m)
        live = tokens >= 0
        rows = (tl.load(record + 1) + m) * MAX_RANK
        out = z + tokens.to(tl.int64) * stride
        r = tl.arange(0, ROWS)
        for _ in range(0, rank, ROWS):
            ids = _token_ids(bt, table, r, rank, TABLE_PAGES, LAYERS, DIGITS, DIGIT)
            stride_of_split = positions * MAX_RANK
            s = sums_of(
                partials, rows, live, r, rank, num_splits, stride_of_split, SPLITS, SUMMED,
            )
            mask = (r < rank)[:, None] & live[None, :]
            tl.store(out[None, :] + ids[:, None], s.to(z.dtype.element_ty), mask=mask)
            r += ROWS

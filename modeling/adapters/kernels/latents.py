"""Adapters of a linear map from latents, by heads: both products of a tile in one program.

    queries:  y[t, h, l] += sum_r (sum_i x[t, h, i] B[r, h, i]) A[r, l]
                            + sum_i c[h, i] x[t, h, i] U[h, i, l]
    values:   y[t, h, i] += c[h, i] y[t, h, i] + d[h, i]
                            + sum_r (sum_l x[t, h, l] A[r, l]) B[r, h, i]

See adapters/latents.py; c and d are of few adapters. B of a head: its keys, then its values.
"""

from typing import Any

import triton
import triton.language as tl

from modeling.adapters.kernels.shrink import pages_of, pool_rows

UNSPECIALIZED = ["projection", "layer"]

# Arguments are grouped by what they describe; a line for each would hide the kernel.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def _product(a: "Any", b: "Any", acc: "Any") -> "Any":
    """acc + a b of two tiles of the pool's type."""
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit  # type: ignore[untyped-decorator]
def _second(s: "Any", factor: "Any", acc: "Any") -> "Any":
    """acc + s factor; s, in float32, keeps its precision as a sum of two in factor's type."""
    if factor.dtype == tl.float32:
        acc = _product(s, factor, acc)
    else:
        high = s.to(factor.dtype)
        low = (s - high.to(tl.float32)).to(factor.dtype)
        acc = _product(high, factor, acc)
        acc = _product(low, factor, acc)
    return acc


@triton.jit  # type: ignore[untyped-decorator]
def _scaled_queries(
    acc: "Any", x_rows: "Any", live: "Any", scales: "Any", weight: "Any", out: "Any", is_out: "Any",
    KEYS: tl.constexpr, LATENT: tl.constexpr, BLOCK_K: tl.constexpr,
) -> "Any":
    """acc[m, l] + sum_i c[i] x[m, i] U[i, l]; scales, weight: where the head's begin."""
    for k0 in range(0, KEYS, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        inside = k < KEYS
        x = tl.load(x_rows[:, None] + k[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        c = tl.load(scales + k, mask=inside, other=0.0)
        w_mask = inside[:, None] & is_out[None, :]
        w = tl.load(weight + k[:, None] * LATENT + out[None, :], mask=w_mask, other=0.0)
        acc = _second(x.to(tl.float32) * c.to(tl.float32)[None, :], w, acc)
    return acc


@triton.jit(do_not_specialize=UNSPECIALIZED)  # type: ignore[untyped-decorator]
def latents_kernel(
    y: "Any", x: "Any", weight: "Any", a: "Any", bt: "Any",
    records: "Any", page_table: "Any", ranks: "Any", output_rows: "Any",
    projection: "Any", layer: "Any",
    y_token: "Any", y_head: "Any", x_token: "Any", x_head: "Any",
    OF_QUERIES: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, LATENT: tl.constexpr,
    BLOCK_IN: tl.constexpr, BLOCK_OUT: tl.constexpr,
    PROJECTIONS: tl.constexpr, TABLE_PAGES: tl.constexpr, TABLE_LAYERS: tl.constexpr,
    LAYERS: tl.constexpr, HEADER: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr,
) -> None:
    """Program (head, tiles): all of a tile's tokens.

    y, x: [tokens, heads, latent or keys or values]. weight: [heads, keys + values, latent].
    a, bt: the pools, [pages, layers, 8, latent] and [.., heads * (keys + values)].
    """
    EACH: tl.constexpr = KEYS + VALUES
    WIDTH: tl.constexpr = HEADS * EACH
    INPUTS: tl.constexpr = KEYS if OF_QUERIES else LATENT
    OUTPUTS: tl.constexpr = LATENT if OF_QUERIES else VALUES
    head = tl.program_id(0)
    # Of a rank row of B: where the head's numbers are.
    at_head = head * EACH + (0 if OF_QUERIES else KEYS)
    m = tl.arange(0, BLOCK_M)
    i = tl.arange(0, BLOCK_IN)
    o = tl.arange(0, BLOCK_OUT)
    num_tiles = tl.load(records + tl.program_id(1) * (HEADER + BLOCK_M) + 2)
    for tile in range(tl.program_id(1), num_tiles, tl.num_programs(1)):
        record = records + tile * (HEADER + BLOCK_M)
        entry = tl.load(record) * PROJECTIONS + projection
        rank = tl.load(ranks + entry * TABLE_LAYERS + layer)
        if rank > 0:
            scale_row = tl.load(output_rows + entry * 2).to(tl.int64) + layer * 8
            bias_row = tl.load(output_rows + entry * 2 + 1).to(tl.int64) + layer * 8
            table = page_table + entry * TABLE_PAGES
            tokens = tl.load(record + HEADER + m).to(tl.int64)
            live = tokens >= 0
            x_rows = x + tokens * x_token + head * x_head
            x_mask = live[:, None] & (i < INPUTS)[None, :]
            x_tile = tl.load(x_rows[:, None] + i[None, :], mask=x_mask, other=0.0)
            acc = tl.zeros([BLOCK_M, BLOCK_OUT], dtype=tl.float32)
            for r0 in range(0, rank, ROWS):
                r = r0 + tl.arange(0, ROWS)
                pages = pages_of(table, r, TABLE_PAGES)
                a_rows = pool_rows(a, pages, layer, r, LATENT, LAYERS)
                b_rows = pool_rows(bt, pages, layer, r, WIDTH, LAYERS) + at_head
                first = b_rows if OF_QUERIES else a_rows
                second = a_rows if OF_QUERIES else b_rows
                is_row = (r < rank)[:, None]
                f1_mask = is_row & (i < INPUTS)[None, :]
                f1 = tl.load(first[:, None] + i[None, :], mask=f1_mask, other=0.0)
                f2_mask = is_row & (o < OUTPUTS)[None, :]
                f2 = tl.load(second[:, None] + o[None, :], mask=f2_mask, other=0.0)
                s = _product(x_tile, tl.trans(f1), tl.zeros([BLOCK_M, ROWS], dtype=tl.float32))
                acc = _second(s, f2, acc)
            out = y + tokens * y_token + head * y_head
            mask = live[:, None] & (o < OUTPUTS)[None, :]
            old = tl.load(out[:, None] + o[None, :], mask=mask, other=0.0)
            total = old.to(tl.float32)
            # Rows of layer 0 are none where they are negative.
            if scale_row >= layer * 8:
                if OF_QUERIES:
                    acc = _scaled_queries(
                        acc, x_rows, live, bt + scale_row * WIDTH + at_head,
                        weight + head.to(tl.int64) * EACH * LATENT, o, o < OUTPUTS,
                        KEYS, LATENT, 32,
                    )
                else:
                    at = bt + scale_row * WIDTH + at_head + o
                    c = tl.load(at, mask=o < OUTPUTS, other=0.0)
                    total += c.to(tl.float32)[None, :] * total
            if (bias_row >= layer * 8) & (not OF_QUERIES):
                at = bt + bias_row * WIDTH + at_head + o
                total += tl.load(at, mask=o < OUTPUTS, other=0.0).to(tl.float32)[None, :]
            tl.store(out[:, None] + o[None, :], (total + acc).to(old.dtype), mask=mask)

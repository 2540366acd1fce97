"""What the decode and the prefill kernel share: scores, the running softmax, cache addresses.

A tile is some query heads (and tokens) of one KV head against a block of keys. Weights are powers
of two: scores come times log2(e).
"""

from typing import Any

import triton
import triton.language as tl

NEVER = tl.constexpr(-1.0e30)
"""A hidden key's score. Finite: a tile that has seen nothing yet must not make NaN of it."""

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit  # type: ignore[untyped-decorator]
def product(a: "Any", b: "Any", acc: "Any") -> "Any":
    """acc + a b, in float32; b is brought to the type of a."""
    return tl.dot(a, b.to(a.dtype), acc, input_precision="ieee")


@triton.jit  # type: ignore[untyped-decorator]
def pages_of(
    table: "Any", start: "Any", stop: "Any", BLOCK_N: tl.constexpr, PAGE: tl.constexpr
) -> "Any":
    """Pages of the positions start .. start + BLOCK_N - 1 of a row; 0 from `stop` on.

    Found a block ahead: a load that waits for another's result in the same iteration of a loop
    would leave fewer loads on their way.
    """
    at = start + tl.arange(0, BLOCK_N)
    return tl.load(table + at // PAGE, mask=at < stop, other=0)


@triton.jit  # type: ignore[untyped-decorator]
def attend_block(
    q: "Any",
    acc: "Any",
    top: "Any",
    total: "Any",
    keys: "Any",
    values: "Any",
    pages: "Any",
    start: "Any",
    stop: "Any",
    kv_head: "Any",
    positions: "Any",
    slopes: "Any",
    window: "Any",
    scale: "Any",
    cap: "Any",
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    CAPPED: tl.constexpr,
    ALIBI: tl.constexpr,
    ENDS: tl.constexpr,
    CAUSAL: tl.constexpr,
) -> "Any":
    """(acc, top, total) after the keys start .. start + BLOCK_N - 1, those below `stop` only.

    pages: as `pages_of` found them.

    acc: [M, BLOCK_D], weights times values; top: [M], the largest score; total: [M], the sum of
    weights. positions: [M], the queries'. scale: of the scores, with log2(e); CAPPED: as
    cap * tanh(x / 2) takes it. slopes: [M], with log2(e). ENDS: some keys may be beyond `stop`.
    CAUSAL: some keys may be behind a query, or before its window.
    """
    at = start + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    inside = at < stop
    mask = (d < HEAD_DIM)[None, :]
    if ENDS:
        mask = mask & inside[:, None]
    rows = ((pages.to(tl.int64) * PAGE + at % PAGE) * KV_HEADS + kv_head) * HEAD_DIM
    k = tl.load(keys + rows[:, None] + d[None, :], mask=mask, other=0.0)
    scores = product(q, tl.trans(k), tl.zeros([q.shape[0], BLOCK_N], dtype=tl.float32)) * scale
    if CAPPED:
        scores = cap * (2 * tl.sigmoid(scores) - 1)  # tanh
    if ALIBI:
        scores += slopes[:, None] * (at[None, :] - positions[:, None]).to(tl.float32)
    if ENDS:
        scores = tl.where(inside[None, :], scores, NEVER)
    if CAUSAL:
        behind = positions[:, None] - at[None, :]
        scores = tl.where((behind >= 0) & (behind < window), scores, NEVER)
    higher = tl.maximum(top, tl.max(scores, axis=1))
    weights = tl.exp2(scores - higher[:, None])
    shrunk = tl.exp2(top - higher)
    total = total * shrunk + tl.sum(weights, axis=1)
    v = tl.load(values + rows[:, None] + d[None, :], mask=mask, other=0.0)
    acc = product(weights.to(q.dtype), v, acc * shrunk[:, None])
    return acc, higher, total


@triton.jit  # type: ignore[untyped-decorator]
def with_sinks(acc: "Any", top: "Any", total: "Any", sinks: "Any", factor: "Any") -> "Any":
    """acc / (total + the sinks' weights) * factor; sinks: [M], with log2(e)."""
    higher = tl.maximum(top, sinks)
    shrunk = tl.exp2(top - higher)
    total = total * shrunk + tl.exp2(sinks - higher)
    return acc * (shrunk / total * factor)[:, None]

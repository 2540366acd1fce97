"""One token of the gated delta rule, in Triton, on states that stay where they are.

    S = exp(g) S        S += k (beta (v - S^T k))^T        o = S^T q / sqrt(K)

A step's rows have their states [K, V] among those of all batch slots. A program reads some columns
of one head's state, changes and writes them: each number of it moves twice, where copies of the
rows' states to and from a function would move it six times.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from modeling.kernels.launch import Launcher, aligned

BLOCK_V = 32
"""Columns of a state that one program has."""

EPS = 1e-6
"""Beside the sum of squares where q and k are divided by their norms, as in transformers."""

Pointer = Any

# Arguments are grouped by what they describe.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def _delta_rule(
    q: "Pointer", k: "Pointer", v: "Pointer", g: "Pointer", beta: "Pointer",
    states: "Pointer", slots: "Pointer", out: "Pointer",
    root: float, eps: float,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    K_WIDTH: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
) -> None:
    """Some columns of one head of one row. K_WIDTH: the power of two that holds K."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, K_WIDTH)
    j = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    in_k, in_v = i < K, j < V
    at_key = (row * KEY_HEADS + head // (HEADS // KEY_HEADS)) * K + i
    query = tl.load(q + at_key, mask=in_k, other=0.0).to(tl.float32)
    key = tl.load(k + at_key, mask=in_k, other=0.0).to(tl.float32)
    if NORM:
        query *= tl.rsqrt(tl.sum(query * query, axis=0) + eps)
        key *= tl.rsqrt(tl.sum(key * key, axis=0) + eps)
    query = query / root
    at_head = row * HEADS + head
    value = tl.load(v + at_head * V + j, mask=in_v, other=0.0).to(tl.float32)
    gate = tl.exp(tl.load(g + at_head).to(tl.float32))
    share = tl.load(beta + at_head).to(tl.float32)
    first = (tl.load(slots + row) * HEADS + head) * (K * V)
    at = states + first + i[:, None] * V + j[None, :]
    inside = in_k[:, None] & in_v[None, :]
    state = tl.load(at, mask=inside, other=0.0) * gate
    delta = (value - tl.sum(state * key[:, None], axis=0)) * share
    state += key[:, None] * delta[None, :]
    tl.store(at, state, mask=inside)
    found = tl.sum(state * query[:, None], axis=0)
    tl.store(out + at_head * V + j, found.to(out.dtype.element_ty), mask=in_v)


# fmt: on

_launch = Launcher(_delta_rule)


def delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
    norm: bool,
) -> Tensor:
    """Return o [rows, 1, heads, V] of q's type, and change the states of the rows' batch slots.

    q, k: [rows, 1, key heads, K]; v: [rows, 1, heads, V], some of which share a key head. g, beta:
    [rows, 1, heads]. states: float32 [batch slots, heads, K, V], contiguous. slots: int64 [rows];
    where two rows have the same, its state is undefined. norm: whether q and k are divided by their
    norms.
    """
    assert states.is_contiguous(), states.stride()
    assert states.dtype is torch.float32, states.dtype
    (rows, tokens, key_heads, size), (_, heads, _, width) = k.shape, states.shape
    assert tokens == 1, k.shape
    given = [each.contiguous() for each in (q, k, v, g, beta)]
    out = q.new_empty(v.shape)
    block = min(BLOCK_V, triton.next_power_of_2(width))
    key = (
        q.device, *(each.dtype for each in given), aligned(*given, states, slots, out), heads,
        key_heads, size, width, norm,
    )  # fmt: skip
    _launch(
        key,
        (rows, heads, triton.cdiv(width, block)),
        (*given, states, slots, out, size**0.5, EPS),
        {
            "HEADS": heads, "KEY_HEADS": key_heads, "K": size, "V": width,
            "K_WIDTH": triton.next_power_of_2(size), "BLOCK": block, "NORM": norm,
        },
        {"num_warps": 4},
    )  # fmt: skip
    return out

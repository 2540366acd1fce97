"""Experts in mxfp4 of steps of one or two tokens, in Triton: every pair reads for itself.

So few tokens share few experts, and tiles of the tensor cores would be nearly empty: each pair of a
token and an expert is summed without them, as `experts.py` does it. No table of pairs is needed,
and a token's pairs are added where they are computed: two launches instead of four.
"""

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modeling.kernels.fp4_tiles import ASSEMBLY, factors_of, made_of_codes
from modeling.kernels.launch import Launcher, aligned, has_dependent_launch, launch_options
from modeling.layers.kernels.stored_weights import Gate, StoredWeight


@dataclass(frozen=True)
class PairCut:
    """What a program of one pair reads: columns or outputs, and chunks of 128 inputs at once."""

    outputs: int
    turn: int
    warps: int


FEW_TOKENS = 2
"""Up to which the pairs of experts in mxfp4 are read each for itself."""

UP_OF_PAIR, DOWN_OF_TOKEN = PairCut(4, 8, 4), PairCut(2, 32, 4)
"""The best of those that an H200 compared, with the experts of gpt-oss-20b."""

# Arguments are grouped by what they describe.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def gated(
    gate: "Any", up: "Any", limit: "Any", alpha: "Any", CLAMPED: tl.constexpr
) -> "Any":
    """What an expert computes of both; see `Gate`."""
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1
        gate = gate * tl.sigmoid(alpha * gate)
    else:
        gate = gate * tl.sigmoid(gate)
    return gate * up


@triton.jit  # type: ignore[untyped-decorator]
def _quarter(
    part: "Any", words: "Any", scales: "Any", x: "Any", k: "Any",
    INPUTS: tl.constexpr, QUARTER: tl.constexpr, ASM: tl.constexpr,
) -> "Any":
    """part [chunks, rows, 32] and the products of the codes at one quarter."""
    k += 32 * QUARTER
    own = tl.load(x + k, mask=k < INPUTS, other=0.0).to(tl.float32)
    made = made_of_codes(words, factors_of(scales, QUARTER, False, 0)[:, :, None], ASM)
    return part + made.to(tl.float32) * own[:, None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _sums(
    x: "Any", codes: "Any", scales: "Any", expert: "Any", row: "Any",
    HEIGHT: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr, TURN: tl.constexpr,
    ASM0: tl.constexpr, ASM1: tl.constexpr, ASM2: tl.constexpr, ASM3: tl.constexpr,
) -> "Any":
    """Sums [ROWS] of an expert's rows and one row of x; TURN: chunks that are read at once."""
    CHUNKS: tl.constexpr = (INPUTS + 127) // 128
    word = tl.arange(0, 32)
    acc = tl.zeros([ROWS], dtype=tl.float32)
    for start in tl.static_range(0, CHUNKS, TURN):
        chunk = start + tl.arange(0, TURN)
        inside = (chunk < CHUNKS)[:, None]
        at = (expert * CHUNKS + chunk)[:, None] * HEIGHT + row[None, :]
        words = tl.load(
            codes + at[:, :, None] * 32 + word[None, None, :], mask=inside[:, :, None], other=0
        )
        own = tl.load(scales + at, mask=inside, other=0)
        k = chunk[:, None] * 128 + word[None, :]
        part = tl.zeros([TURN, ROWS, 32], dtype=tl.float32)
        part = _quarter(part, words, own, x, k, INPUTS, 0, ASM0)
        part = _quarter(part, words, own, x, k, INPUTS, 1, ASM1)
        part = _quarter(part, words, own, x, k, INPUTS, 2, ASM2)
        part = _quarter(part, words, own, x, k, INPUTS, 3, ASM3)
        acc += tl.sum(tl.sum(part, axis=2), axis=0)
    return acc


@triton.jit  # type: ignore[untyped-decorator]
def up_of_pair_kernel(
    x: "Any", codes: "Any", scales: "Any", bias: "Any", ids: "Any", inner: "Any",
    limit: "Any", alpha: "Any",
    INPUTS: tl.constexpr, WIDTH: tl.constexpr, ACTIVE: tl.constexpr,
    BLOCK_N: tl.constexpr, TURN: tl.constexpr,
    HAS_BIAS: tl.constexpr, INTERLEAVED: tl.constexpr, CLAMPED: tl.constexpr,
    ASM0: tl.constexpr, ASM1: tl.constexpr, ASM2: tl.constexpr, ASM3: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (block, pair): inner [pairs, WIDTH]."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.program_id(1)
    expert = tl.load(ids + pair).to(tl.int64)
    # Gate and up of a column are neighbours among the rows of the product.
    r = tl.arange(0, 2 * BLOCK_N)
    column = tl.program_id(0) * BLOCK_N + r // 2
    row = 2 * column + r % 2 if INTERLEAVED else r % 2 * WIDTH + column
    acc = _sums(
        x + pair // ACTIVE * INPUTS, codes, scales, expert, row,
        2 * WIDTH, INPUTS, 2 * BLOCK_N, TURN, ASM0, ASM1, ASM2, ASM3,
    )
    if HAS_BIAS:
        acc += tl.load(bias + expert * (2 * WIDTH) + row).to(tl.float32)
    gate, up = tl.split(tl.reshape(acc, [BLOCK_N, 2]))
    value = gated(gate, up, limit, alpha, CLAMPED)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(inner + pair * WIDTH + n, value.to(inner.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def down_of_token_kernel(
    inner: "Any", codes: "Any", scales: "Any", bias: "Any", ids: "Any", shares: "Any", y: "Any",
    INPUTS: tl.constexpr, WIDTH: tl.constexpr, ACTIVE: tl.constexpr,
    BLOCK_N: tl.constexpr, TURN: tl.constexpr, HAS_BIAS: tl.constexpr,
    ASM0: tl.constexpr, ASM1: tl.constexpr, ASM2: tl.constexpr, ASM3: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (block, token): y [tokens, WIDTH], the sum of the token's pairs by their weights."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for each in tl.static_range(ACTIVE):
        pair = token * ACTIVE + each
        expert = tl.load(ids + pair).to(tl.int64)
        acc = _sums(
            inner + pair * INPUTS, codes, scales, expert, n,
            WIDTH, INPUTS, BLOCK_N, TURN, ASM0, ASM1, ASM2, ASM3,
        )
        if HAS_BIAS:
            acc += tl.load(bias + expert * WIDTH + n).to(tl.float32)
        total += acc * tl.load(shares + pair).to(tl.float32)
    tl.store(y + token * WIDTH + n, total.to(y.dtype.element_ty))


# fmt: on

_UP_OF_PAIR, _DOWN_OF_TOKEN = Launcher(up_of_pair_kernel), Launcher(down_of_token_kernel)


def experts_by_pair(
    x: Tensor, up: StoredWeight, down: StoredWeight, gate: Gate, ids: Tensor, shares: Tensor
) -> Tensor:
    """[tokens, hidden] to the same shape; see `stored_experts`."""
    (tokens, hidden), active, width = x.shape, ids.shape[1], down.shape[1]
    inner = torch.empty(tokens * active, width, dtype=x.dtype, device=x.device)
    y = torch.empty_like(x)
    pdl = has_dependent_launch(x.device)
    kinds = (x.device, x.dtype, ids.dtype)
    cut, columns = UP_OF_PAIR, gcd(UP_OF_PAIR.outputs, width)
    constants: dict[str, Any] = {"INPUTS": hidden, "WIDTH": width, "ACTIVE": active}
    constants |= {"BLOCK_N": columns, "TURN": cut.turn, "HAS_BIAS": up.bias is not None}
    constants |= {"INTERLEAVED": gate.interleaved, "CLAMPED": gate.limit is not None}
    constants |= {**ASSEMBLY, "PDL": pdl}
    bias = up.scales if up.bias is None else up.bias
    tensors = [x, up.codes, up.scales, bias, ids, inner]
    _UP_OF_PAIR(
        (*kinds, bias.dtype, aligned(*tensors), *constants.values()),
        *((width // columns, tokens * active), [*tensors, gate.limit or 0.0, gate.alpha]),
        *(constants, {"num_warps": cut.warps, **launch_options(pdl)}),
    )
    cut, columns = DOWN_OF_TOKEN, gcd(DOWN_OF_TOKEN.outputs, hidden)
    constants = {"INPUTS": width, "WIDTH": hidden, "ACTIVE": active, "BLOCK_N": columns}
    constants |= {"TURN": cut.turn, "HAS_BIAS": down.bias is not None}
    constants |= {**ASSEMBLY, "PDL": pdl}
    bias = down.scales if down.bias is None else down.bias
    tensors = [inner, down.codes, down.scales, bias, ids, shares, y]
    _DOWN_OF_TOKEN(
        (*kinds, shares.dtype, bias.dtype, aligned(*tensors), *constants.values()),
        *((hidden // columns, tokens), tensors, constants),
        {"num_warps": cut.warps, **launch_options(pdl)},
    )
    return y

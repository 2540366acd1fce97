"""Products of few tokens with quantised weights, in Triton: what libraries do slower than bfloat16.

    fp8:       y[m, n] = a[m] * b[n] * sum_k X[m, k] W[n, k]         codes of both in e4m3
    integers:  y[m, n] = sum_g s[n, g] * sum_k x[m, k] (W[n, k] - z[n, g])     k of group g

Such a product takes the time in which its weights are read. Tokens are the narrow side of the
tensor cores' instruction. With shares, the programs of a block of outputs share the inputs and
leave float32 partial sums; the last to arrive adds them in a fixed order, so that equal inputs give
equal bits.

All are programmatic dependent launches (PDL), as `modeling.layers.triton` says: the first lines of
the weights, which no kernel writes, are fetched while the kernel before still runs.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modeling.triton_launch import Launcher, aligned, has_dependent_launch, launch_options

Pointer = Any

MAX_BLOCKS = 1024
MAX_SUMS = 4 * 2**20
"""Counters and partial sums that a shared product takes at most."""


@dataclass(frozen=True)
class ProductCut:
    """How a product of up to `rows` tokens is cut.

    outputs, inputs: of a tile of W. blocks: about how many programs share the product; a matrix of
    fewer blocks of outputs is shared along its inputs too, by eight programs at most.
    """

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    blocks: int = 256

    def shares(self, num_outputs: int, num_inputs: int) -> int:
        """Return how many programs share a block's inputs: a power of two."""
        num_blocks = -(-num_outputs // self.outputs)
        shares = 1
        while (
            shares < 8
            and num_blocks * shares * 2 <= self.blocks * 4 // 3
            and num_inputs % (shares * 2 * self.inputs) == 0
        ):
            shares *= 2
        return shares


FP8_CUTS = (ProductCut(16, 64, 256, 4, 4), ProductCut(64, 64, 128, 4, 5))
INTEGER_CUTS = (ProductCut(16, 128, 128, 4, 4), ProductCut(32, 128, 128, 4, 4))

RAISED = {torch.bfloat16: (128, 0x4300), torch.float16: (1024, 0x6400)}
"""Numbers, and their bits, of which the lowest four are the lowest four of a whole number."""

# Arguments are grouped by what they describe; a line for each would hide the kernels.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def _prefetch(pointers: "Any") -> None:
    """Prefetch the cache lines at some addresses into the second-level cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _store(
    acc: "Any", y: "Any", bias: "Any", sums: "Any", arrived: "Any", block: "Any", share: "Any",
    num_blocks: "Any", m: "Any", n: "Any", live: "Any", inside: "Any", y_stride: "Any",
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SHARES: tl.constexpr, HAS_BIAS: tl.constexpr,
) -> None:
    """Store a block of y, or this share of it; the last share to arrive adds all."""
    out = y + m[None, :].to(tl.int64) * y_stride + n[:, None]
    mask = live[None, :] & inside[:, None]
    added = tl.zeros([BLOCK_N], dtype=tl.float32)
    if HAS_BIAS:
        added = tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if SHARES == 1:
        tl.store(out, (acc + added[:, None]).to(y.dtype.element_ty), mask=mask)
    else:
        cell = (block * BLOCK_N + tl.arange(0, BLOCK_N))[:, None] * ROWS + m[None, :]
        stride = num_blocks * BLOCK_N * ROWS
        tl.store(sums + share * stride + cell, acc)
        # One thread counts the arrival for all: the barrier puts every thread's stores before it,
        # and acq_rel makes them visible to the program that finds itself last.
        tl.debug_barrier()
        before = tl.atomic_add(arrived + block, 1, sem="acq_rel")
        if before == SHARES - 1:
            total = tl.zeros([BLOCK_N, ROWS], dtype=tl.float32)
            for other in tl.static_range(SHARES):
                # .cg: past the first-level cache, which may lack other programs' stores.
                total += tl.load(sums + other * stride + cell, cache_modifier=".cg")
            tl.store(out, (total + added[:, None]).to(y.dtype.element_ty), mask=mask)
            # Zero again for the next launch, which begins to add only after this one has ended.
            tl.atomic_xchg(arrived + block, 0, sem="relaxed")


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _fp8(
    x: "Pointer", x_scales: "Pointer", codes: "Pointer", scales: "Pointer", bias: "Pointer",
    y: "Pointer", sums: "Pointer", arrived: "Pointer",
    num_rows: int, num_outputs: int, y_stride: int,
    INPUTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, SHARES: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """One block of outputs, all tokens, one share of the inputs; x: codes [tokens, INPUTS].

    GROUP: inputs that share a scale, of which BLOCK_K are; scales are then [blocks, groups] of W
    and [groups, tokens] of x. 0: all do.
    """
    if PDL:
        gdc_launch_dependents()
    num_blocks = tl.num_programs(0) // SHARES
    block, share = tl.program_id(0) % num_blocks, tl.program_id(0) // num_blocks
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    inside, live = n < num_outputs, m < num_rows
    width: tl.constexpr = INPUTS // SHARES
    start = share * width
    w_rows = codes + tl.minimum(n, num_outputs - 1).to(tl.int64) * INPUTS + start
    x_rows = x + m.to(tl.int64) * INPUTS + start
    if GROUP == 0:
        factors = tl.load(scales + n, mask=inside, other=0.0)
    if PDL:
        ahead = tl.minimum(tl.arange(0, 4) * 128, width - 1)
        _prefetch(w_rows[:, None] + ahead[None, :])
        gdc_wait()
    acc = tl.zeros([BLOCK_N, ROWS], dtype=tl.float32)
    for k0 in range(0, width, BLOCK_K):
        at = k0 + k
        x_mask = live[None, :]
        if width % BLOCK_K != 0:
            x_mask = x_mask & (at < width)[:, None]
            w_tile = tl.load(w_rows[:, None] + at[None, :], mask=(at < width)[None, :], other=0.0)
        else:
            w_tile = tl.load(w_rows[:, None] + at[None, :])
        x_tile = tl.load(x_rows[None, :] + at[:, None], mask=x_mask, other=0.0)
        if GROUP == 0:
            acc = tl.dot(w_tile, x_tile, acc)
        else:
            group = (start + k0) // GROUP
            own = tl.load(scales + n // GROUP * (INPUTS // GROUP) + group, mask=inside, other=0.0)
            tokens = tl.load(x_scales + group * num_rows + m, mask=live, other=0.0)
            acc += tl.dot(w_tile, x_tile) * own[:, None] * tokens[None, :]
    if GROUP == 0:
        acc *= factors[:, None] * tl.load(x_scales + m, mask=live, other=0.0)[None, :]
    _store(
        acc, y, bias, sums, arrived, block, share,
        num_blocks, m, n, live, inside, y_stride, ROWS, BLOCK_N, SHARES, HAS_BIAS,
    )


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _integers(
    x: "Pointer", codes: "Pointer", scales: "Pointer", zeros: "Pointer", bias: "Pointer",
    y: "Pointer", sums: "Pointer", arrived: "Pointer",
    num_rows: int, num_outputs: int, x_stride: int, y_stride: int,
    INPUTS: tl.constexpr, GROUP: tl.constexpr, MIDDLE: tl.constexpr, HAS_ZEROS: tl.constexpr,
    RAISED: tl.constexpr, BITS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SHARES: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """The same with codes of 4 bits, four in a word; BLOCK_K divides GROUP, and GROUP a share.

    BITS: of the number RAISED in x's type. A code in its lowest bits adds to it, so no conversion
    is needed; what all codes are raised by leaves the sum with the zero points.
    """
    if PDL:
        gdc_launch_dependents()
    num_blocks = tl.num_programs(0) // SHARES
    block, share = tl.program_id(0) % num_blocks, tl.program_id(0) // num_blocks
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, ROWS)
    word = tl.arange(0, BLOCK_K // 4)
    inside, live = n < num_outputs, m < num_rows
    width: tl.constexpr = INPUTS // SHARES
    start = share * width
    row = tl.minimum(n, num_outputs - 1).to(tl.int64)
    w_rows = codes + row * (INPUTS // 4) + start // 4
    s_rows = scales + row * (INPUTS // GROUP)
    z_rows = zeros + row * (INPUTS // GROUP)
    x_rows = x + m.to(tl.int64) * x_stride + start
    if PDL:
        ahead = tl.minimum(tl.arange(0, 2) * 64, width // 4 - 1)
        _prefetch(w_rows[:, None] + ahead[None, :])
        gdc_wait()
    acc = tl.zeros([BLOCK_N, ROWS], dtype=tl.float32)
    for k0 in range(0, width, BLOCK_K):
        words = tl.load(w_rows[:, None] + (k0 // 4 + word)[None, :])
        group = (start + k0) // GROUP
        factors = tl.load(s_rows + group).to(tl.float32)
        middle = tl.full([BLOCK_N], RAISED + MIDDLE, tl.float32)
        if HAS_ZEROS:
            middle = tl.load(z_rows + group).to(tl.float32) + RAISED
        part = tl.zeros([BLOCK_N, ROWS], dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        for place in tl.static_range(4):
            at = k0 + place + 4 * word
            x_tile = tl.load(x_rows[None, :] + at[:, None], mask=live[None, :], other=0.0)
            raised = ((words >> (4 * place)) & 15) | BITS
            part = tl.dot(raised.to(tl.int16).to(x.dtype.element_ty, bitcast=True), x_tile, part)
            total += tl.sum(x_tile.to(tl.float32), axis=0)
        acc += (part - middle[:, None] * total[None, :]) * factors[:, None]
    _store(
        acc, y, bias, sums, arrived, block, share,
        num_blocks, m, n, live, inside, y_stride, ROWS, BLOCK_N, SHARES, HAS_BIAS,
    )


# fmt: on

_launch_fp8 = Launcher(_fp8)
_launch_integers = Launcher(_integers)


@cache
def _memory(device: torch.device, _stream: int) -> tuple[Tensor, Tensor]:
    """Return memory for partial sums, and counters of zeros; one for each stream."""
    sums = torch.empty(MAX_SUMS, dtype=torch.float32, device=device)
    return sums, torch.zeros(MAX_BLOCKS, dtype=torch.int32, device=device)


def cut_of(cuts: tuple[ProductCut, ...], rows: int) -> ProductCut | None:
    """Return how a product of so many tokens is cut; None where a library's is faster."""
    return next((cut for cut in cuts if rows <= cut.rows), None)


def takes_groups(cut: ProductCut, group: int) -> bool:
    """Return whether tiles lie in groups of so many inputs: a tile's width is a power of two."""
    wide = min(cut.inputs, group)
    return wide >= 64 and wide & (wide - 1) == 0 and group % wide == 0


def fp8_product(
    x: Tensor,
    x_scales: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    y: Tensor,
    cut: ProductCut,
    group: int = 0,
) -> Tensor:
    """Write the product of fp8 x [tokens, in] and codes [out, in] into y [tokens, out].

    group: outputs and inputs of a block of the codes that has a scale, of which x's groups of
    inputs have one too; x_scales: [tokens, groups], a group's side by side. 0: there are none.
    """
    (rows, inputs), outputs = x.shape, len(codes)
    shares, dependent = cut.shares(outputs, inputs), has_dependent_launch(x.device)
    sums, arrived = _memory(x.device, torch.cuda.current_stream(x.device).cuda_stream)
    blocks = -(-outputs // cut.outputs)
    height = max(16, triton.next_power_of_2(rows))
    _launch_fp8(
        (x.device, y.dtype, inputs, outputs, height, cut, shares, bias is None,
         aligned(x, codes, y), y.stride(0), group),
        (blocks * shares,),
        (x, x_scales, codes, scales, y if bias is None else bias, y, sums, arrived, rows, outputs,
         y.stride(0)),
        {"INPUTS": inputs, "ROWS": height, "BLOCK_N": cut.outputs,
         "BLOCK_K": group or cut.inputs, "GROUP": group, "SHARES": shares,
         "HAS_BIAS": bias is not None, "PDL": dependent},
        {"num_warps": cut.warps, "num_stages": cut.stages, **launch_options(dependent)},
    )  # fmt: skip
    return y


def integer_product(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    middle: int,
    group: int,
    bias: Tensor | None,
    y: Tensor,
    cut: ProductCut,
) -> Tensor:
    """Write the product of x [tokens, in] and packed codes [out, in / 2] into y [tokens, out]."""
    (rows, inputs), outputs = x.shape, len(codes)
    dependent = has_dependent_launch(x.device)
    shares = cut.shares(outputs, inputs)
    while inputs % (shares * group):
        shares //= 2
    wide = min(cut.inputs, group)
    raised, raised_bits = RAISED[x.dtype]
    words = codes.view(torch.int16)
    sums, arrived = _memory(x.device, torch.cuda.current_stream(x.device).cuda_stream)
    height = max(16, triton.next_power_of_2(rows))
    _launch_integers(
        (x.device, x.dtype, y.dtype, inputs, outputs, height, cut, shares, bias is None, group,
         middle, zeros is None, scales.dtype, aligned(x, codes, y), x.stride(0), y.stride(0)),
        (-(-outputs // cut.outputs) * shares,),
        (x, words, scales, codes if zeros is None else zeros, y if bias is None else bias, y, sums,
         arrived, rows, outputs, x.stride(0), y.stride(0)),
        {"INPUTS": inputs, "GROUP": group, "MIDDLE": middle, "HAS_ZEROS": zeros is not None,
         "RAISED": raised, "BITS": raised_bits, "ROWS": height, "BLOCK_N": cut.outputs,
         "BLOCK_K": wide, "SHARES": shares,
         "HAS_BIAS": bias is not None, "PDL": dependent},
        {"num_warps": cut.warps, "num_stages": cut.stages, **launch_options(dependent)},
    )  # fmt: skip
    return y

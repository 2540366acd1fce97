"""Products of few tokens in Triton: what kernels of several rooms are made of.

Such a product takes the time in which its weights are read. Tokens are the narrow side of the
tensor cores' instruction. With shares, the programs of a block of outputs share the inputs and
leave float32 partial sums; the last to arrive adds them in a fixed order, so that equal inputs give
equal bits.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


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


SCALED_CUTS = (ProductCut(16, 64, 256, 4, 4), ProductCut(64, 64, 128, 4, 5))


def cut_of(cuts: tuple[ProductCut, ...], rows: int) -> ProductCut | None:
    """Return how a product of so many tokens is cut; None where a library's is faster."""
    return next((cut for cut in cuts if rows <= cut.rows), None)


# Arguments are grouped by what they describe; a line for each would hide the kernels.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def divided(x: "Any", by: "Any", inverse: "Any") -> "Any":
    """x / by, rounded as a division is, in three operations; inverse: 1 / by, rounded.

    The GPU's own division takes about twelve. (P. Markstein, Computation of elementary functions on
    the IBM RISC System/6000 processor, 1990.)
    """
    quotient = x * inverse
    return tl.fma(tl.fma(-quotient, by, x), inverse, quotient)


@triton.jit  # type: ignore[untyped-decorator]
def nearest(x: "Any") -> "Any":
    """The nearest whole number, ties to even: what is left of a number beside 1.5 * 2 ** 23."""
    return (x + 12582912.0) - 12582912.0


@triton.jit  # type: ignore[untyped-decorator]
def store_codes(
    values: "Any", scale: "Any", most: float, codes: "Any", inside: "Any"
) -> None:
    """Store values / scale in the codes' type, e4m3 or int8; most: the largest number of e4m3.

    values: float32. scale: of its shape, or of one that it is spread to.
    """
    quotients = divided(values, scale, tl.div_rn(1.0, scale))
    if codes.dtype.element_ty == tl.int8:
        found = nearest(tl.minimum(tl.maximum(quotients, -128.0), 127.0))
    else:
        found = tl.minimum(tl.maximum(quotients, -most), most)
    tl.store(codes, found.to(codes.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def prefetch(pointers: "Any") -> None:
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
def store_tile(
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


@triton.jit  # type: ignore[untyped-decorator]
def scaled_tile(
    block: "Any", share: "Any", num_blocks: "Any",
    x: "Any", x_scales: "Any", codes: "Any", scales: "Any", bias: "Any",
    y: "Any", sums: "Any", arrived: "Any",
    num_rows: "Any", num_outputs: "Any", y_stride: "Any",
    INPUTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, SHARES: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """y[m, n] = a[m] b[n] sum_k X[m, k] W[n, k]: one block of outputs, all tokens, one share of k.

    x, codes: e4m3 or int8, [tokens, INPUTS] and [out, INPUTS]; scales: b, x_scales: a. GROUP:
    inputs that share a scale, of which BLOCK_K are; scales are then [blocks, groups] of W and
    [groups, tokens] of x. 0: all do, as they must in int8.
    """
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
        prefetch(w_rows[:, None] + ahead[None, :])
        gdc_wait()
    sums_of: tl.constexpr = tl.int32 if codes.dtype.element_ty == tl.int8 else tl.float32
    acc = tl.zeros([BLOCK_N, ROWS], dtype=sums_of)
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
            acc = tl.dot(w_tile, x_tile, acc, out_dtype=sums_of)
        else:
            group = (start + k0) // GROUP
            own = tl.load(scales + n // GROUP * (INPUTS // GROUP) + group, mask=inside, other=0.0)
            tokens = tl.load(x_scales + group * num_rows + m, mask=live, other=0.0)
            acc += tl.dot(w_tile, x_tile) * own[:, None] * tokens[None, :]
    total = acc.to(tl.float32)
    if GROUP == 0:
        total *= factors[:, None] * tl.load(x_scales + m, mask=live, other=0.0)[None, :]
    store_tile(
        total, y, bias, sums, arrived, block, share,
        num_blocks, m, n, live, inside, y_stride, ROWS, BLOCK_N, SHARES, HAS_BIAS,
    )

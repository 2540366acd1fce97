"""Products of up to 16 tokens with weights of 4 bits, in Gluon: as integer_tiles.py, faster.

Gluon is Triton with the layouts of tensors in the program's hands. A thread loads 16 bytes of codes
straight into the registers in which the tensor cores take them, and the same 16 inputs' x beside
them: the order in which a product adds its inputs is free. Each warp has inputs of its own, so that
it reads x once and waits for no other warp before their sums are added at the end. The first
weights are loaded before the wait for the kernel ahead, those of each next turn before the
products of this one.
"""

from dataclasses import dataclass, replace
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_wait

from sharding.linear_weight import OperandGroups


@dataclass(frozen=True)
class RowsCut:
    """How a product of up to `rows` tokens is cut.

    outputs: of a program. warps: at most, each with inputs of its own. turn: chunks at most that a
    warp loads at once. blocks: about how many programs are enough; a matrix of fewer blocks of
    outputs is shared along its inputs too.
    """

    rows: int
    outputs: int
    warps: int
    turn: int
    blocks: int = 128

    def parts(self, num_outputs: int, chunks: int) -> tuple[int, int, int]:
        """Return warps, chunks of a turn, and programs that share a block's inputs."""
        warps, shares = self.warps, 1
        while chunks % warps:
            warps //= 2
        chunks //= warps
        while num_outputs // self.outputs * shares * 2 <= self.blocks and chunks % 2 == 0:
            shares, chunks = shares * 2, chunks // 2
        turn = next(each for each in range(min(self.turn, chunks), 0, -1) if chunks % each == 0)
        return warps, turn, shares


CUTS = (RowsCut(8, 16, 4, 8), RowsCut(16, 16, 4, 4))

FEW, MANY = RowsCut(8, 32, 4, 8), RowsCut(8, 16, 4, 16)
"""Of up to eight tokens without zero points, from LONG inputs on: programs that all run at once,
each of more outputs, where there are as many as an H200 runs (AT_ONCE), else many."""

AT_ONCE = range(160, 265)
LONG, LONGEST = 8192, 16384


def rows_cut(rows: int, groups: OperandGroups, inputs: int, outputs: int) -> RowsCut | None:
    """Return how a product of so many tokens is cut; None where `integer_tile` computes it.

    That is faster from nine tokens on where no zero points cost it a sum of x.
    """
    if groups.zeros is not None:
        return next((cut for cut in CUTS if rows <= cut.rows), None)
    if rows > CUTS[0].rows:
        return None
    if inputs < LONG:
        return CUTS[0]
    if -(-outputs // FEW.outputs) in AT_ONCE:
        return FEW if inputs < LONGEST else replace(FEW, turn=4)
    return MANY if inputs < LONGEST else CUTS[0]


def rows_options(
    cut: RowsCut, num_outputs: int, chunks: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Return a kernel's sizes and its options of compilation."""
    warps, turn, shares = cut.parts(num_outputs, chunks)
    sizes = {"ROWS": cut.rows, "BLOCK_N": cut.outputs, "TURN": turn, "SHARES": shares}
    return sizes, {"num_warps": warps}


# Arguments are grouped by what they describe; a line for each would hide the kernels.
# fmt: off


@gluon.jit  # type: ignore[untyped-decorator]
def _numbers(
    words: "Any", middle: "Any", ASM: gl.constexpr
) -> "Any":
    """Codes at one place of the words, less `middle`, in middle's type."""
    return gl.inline_asm_elementwise(
        ASM, "=r,r,r", [words, middle], dtype=middle.dtype, is_pure=True, pack=2
    )


@gluon.jit  # type: ignore[untyped-decorator]
def words_of(rows: "Any", step: "Any", TURN: gl.constexpr) -> "Any":
    """The words of TURN chunks."""
    found = ()
    for each in gl.static_range(TURN):
        found = found + (gl.load(rows + each * step),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit  # type: ignore[untyped-decorator]
def _shared(
    rows: "Any", chunks: "Any", num_outputs: "Any", CHUNKS: gl.constexpr, TURN: gl.constexpr
) -> "Any":
    """What groups share, for TURN chunks from `chunks` [parts, 1] on."""
    found = ()
    for each in gl.static_range(TURN):
        at = (chunks + each) // CHUNKS * num_outputs
        found = found + (gl.load(rows + at),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit  # type: ignore[untyped-decorator]
def _turn(
    acc: "Any", words: "Any", factors: "Any", zeros: "Any", x_rows: "Any", live: "Any",
    CHUNK: gl.constexpr, TURN: gl.constexpr, MIDDLE: gl.constexpr, RAISED: gl.constexpr,
    HAS_ZEROS: gl.constexpr, LAYOUT: gl.constexpr, OF_W: gl.constexpr,
    ASM0: gl.constexpr, ASM1: gl.constexpr, ASM2: gl.constexpr, ASM3: gl.constexpr,
) -> "Any":
    """acc and the products of TURN chunks."""
    WORDS: gl.constexpr = CHUNK // 4
    for each in gl.static_range(TURN):
        own = words[each]
        xs = x_rows + each * CHUNK
        x0 = gl.load(xs, mask=live, other=0.0)
        x1 = gl.load(xs + WORDS, mask=live, other=0.0)
        x2 = gl.load(xs + 2 * WORDS, mask=live, other=0.0)
        x3 = gl.load(xs + 3 * WORDS, mask=live, other=0.0)
        if HAS_ZEROS:
            # Whole numbers up to 143, or 1039 in float16: exact.
            raised = (zeros[each].to(gl.float32) + RAISED).to(x0.dtype)
            middle = gl.expand_dims(raised, 2).broadcast_to(own.shape)
        else:
            middle = gl.full(own.shape, RAISED + MIDDLE, x0.dtype, OF_W)
        part = gl.zeros(acc.shape, gl.float32, LAYOUT)
        part = mma_v2(_numbers(own, middle, ASM0), x0, part)
        part = mma_v2(_numbers(own, middle, ASM1), x1, part)
        part = mma_v2(_numbers(own, middle, ASM2), x2, part)
        part = mma_v2(_numbers(own, middle, ASM3), x3, part)
        acc += part * gl.expand_dims(factors[each].to(gl.float32), 2)
    return acc


@gluon.jit  # type: ignore[untyped-decorator]
def store_rows(
    found: "Any", y: "Any", bias: "Any", sums: "Any", arrived: "Any", block: "Any", share: "Any",
    num_blocks: "Any", num_rows: "Any", num_outputs: "Any", y_stride: "Any",
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, SHARES: gl.constexpr, HAS_BIAS: gl.constexpr,
    LAYOUT: gl.constexpr,
) -> None:
    """Store a block of y, or this share of it; the last share to arrive adds all."""
    own = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
    m = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT)), 0)
    n = block * BLOCK_N + own
    inside = n < num_outputs
    out = y + m.to(gl.int64) * y_stride + gl.expand_dims(n, 1)
    mask = (m < num_rows) & gl.expand_dims(inside, 1)
    if SHARES > 1:
        cell = gl.expand_dims((block * BLOCK_N + own) * ROWS, 1) + m
        stride = num_blocks * BLOCK_N * ROWS
        gl.store(sums + share * stride + cell, found)
        # One thread counts the arrival for all: the barrier puts every thread's stores before it,
        # and acq_rel makes them visible to the program that finds itself last.
        gl.thread_barrier()
        before = gl.atomic_add(arrived + block, 1, sem="acq_rel")
        if before == SHARES - 1:
            total = gl.zeros([BLOCK_N, ROWS], gl.float32, LAYOUT)
            for other in gl.static_range(SHARES):
                # .cg: past the first-level cache, which may lack other programs' stores.
                total += gl.load(sums + other * stride + cell, cache_modifier=".cg")
            if HAS_BIAS:
                added = gl.load(bias + n, mask=inside, other=0.0).to(gl.float32)
                total += gl.expand_dims(added, 1)
            gl.store(out, total.to(y.dtype.element_ty), mask=mask)
            # Zero again for the next launch, which begins to add only after this one has ended.
            gl.atomic_xchg(arrived + block, 0, sem="relaxed")
    else:
        if HAS_BIAS:
            added = gl.load(bias + n, mask=inside, other=0.0).to(gl.float32)
            found += gl.expand_dims(added, 1)
        gl.store(out, found.to(y.dtype.element_ty), mask=mask)


@gluon.jit  # type: ignore[untyped-decorator]
def row_tile(
    block: "Any", share: "Any", num_blocks: "Any",
    x: "Any", codes: "Any", scales: "Any", zeros: "Any", bias: "Any",
    y: "Any", sums: "Any", arrived: "Any",
    num_rows: "Any", num_outputs: "Any", x_stride: "Any", y_stride: "Any",
    INPUTS: gl.constexpr, CHUNK: gl.constexpr, CHUNKS: gl.constexpr, MIDDLE: gl.constexpr,
    HAS_ZEROS: gl.constexpr, RAISED: gl.constexpr,
    ASM0: gl.constexpr, ASM1: gl.constexpr, ASM2: gl.constexpr, ASM3: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, TURN: gl.constexpr, SHARES: gl.constexpr,
    HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
) -> None:
    """One block of outputs, all tokens, one share of the inputs, of which each warp has a part.

    x: [tokens, INPUTS]. codes: int16 [INPUTS / CHUNK, out, CHUNK / 4]. CHUNKS: chunks of a group.
    TURN: chunks that a warp loads at once; it divides those of its part.
    """
    PARTS: gl.constexpr = gl.num_warps()
    WORDS: gl.constexpr = CHUNK // 4
    PART: gl.constexpr = INPUTS // CHUNK // SHARES // PARTS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [PARTS, 1, 1], [1, 16, 8])
    # Four lanes load a row's words, each as many neighbours as it has.
    OF_W: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, WORDS // 4)
    OF_X: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, WORDS // 4)
    first = share * (PART * PARTS)
    # Axes: parts, outputs, words; parts, words, tokens for x.
    part = first + gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, OF_W))) * PART
    row = block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, OF_W)))
    word = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, OF_W)))
    row = gl.expand_dims(gl.minimum(row, num_outputs - 1), 0)
    part = gl.expand_dims(part, 1)
    step = num_outputs * WORDS
    inner = gl.expand_dims(row * WORDS, 2) + gl.expand_dims(gl.expand_dims(word, 0), 1)
    w_rows = codes + gl.expand_dims(part.to(gl.int64) * step, 2) + inner
    z_rows = zeros + row
    # Factors of the sums, not of the numbers.
    of_sum = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    out = gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    out = gl.minimum(block * BLOCK_N + out, num_outputs - 1)
    of_scale = gl.expand_dims(first + of_sum * PART, 1)
    s_rows = scales + gl.expand_dims(out, 0)
    words = words_of(w_rows, step, TURN)
    factors = _shared(s_rows, of_scale, num_outputs, CHUNKS, TURN)
    zero = factors
    if HAS_ZEROS:
        zero = _shared(z_rows, part, num_outputs, CHUNKS, TURN)
    of_x = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, OF_X)))
    k = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(2, OF_X)))
    m = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, OF_X))), 0)
    live = gl.expand_dims(m < num_rows, 1)
    at = gl.expand_dims((first + of_x * PART) * CHUNK, 1) + gl.expand_dims(k, 0)
    x_rows = x + gl.expand_dims(m * x_stride, 1) + gl.expand_dims(at, 2)
    acc = gl.zeros([PARTS, BLOCK_N, ROWS], gl.float32, LAYOUT)
    if PDL:
        gdc_wait()
    for chunk in range(TURN, PART, TURN):
        w_rows += TURN * step
        next_words = words_of(w_rows, step, TURN)
        next_factors = _shared(s_rows, of_scale + chunk, num_outputs, CHUNKS, TURN)
        next_zero = next_factors
        if HAS_ZEROS:
            next_zero = _shared(z_rows, part + chunk, num_outputs, CHUNKS, TURN)
        acc = _turn(
            acc, words, factors, zero, x_rows, live,
            CHUNK, TURN, MIDDLE, RAISED, HAS_ZEROS, LAYOUT, OF_W, ASM0, ASM1, ASM2, ASM3,
        )
        words = next_words
        factors = next_factors
        zero = next_zero
        x_rows += TURN * CHUNK
    acc = _turn(
        acc, words, factors, zero, x_rows, live,
        CHUNK, TURN, MIDDLE, RAISED, HAS_ZEROS, LAYOUT, OF_W, ASM0, ASM1, ASM2, ASM3,
    )
    FLAT: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, PARTS], [0, 1])
    store_rows(
        gl.convert_layout(gl.sum(acc, axis=0), FLAT), y, bias, sums, arrived, block, share,
        num_blocks, num_rows, num_outputs, y_stride, ROWS, BLOCK_N, SHARES, HAS_BIAS, FLAT,
    )

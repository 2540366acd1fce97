"""Products of up to 16 tokens with weights in nvfp4 and mxfp4, in Gluon.

As integer_rows.py has those of integers: each warp has inputs of its own and loads codes straight
into the registers of the tensor cores. Four threads have a row's 128 codes of a chunk, of each
quarter eight neighbours, so that a thread needs one word of scales. What numbers are:
fp4_tiles.py.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_wait

from modeling.kernels.fp4_tiles import ASSEMBLY, MANY
from modeling.kernels.integer_rows import RowsCut, store_rows, words_of

FEW, FEW_OF_MANY, MORE = RowsCut(8, 32, 4, 8), RowsCut(8, 16, 8, 4), RowsCut(16, 16, 4, 4)
"""As measured on an H200; OF_MANY: inputs, or outputs."""

JOINED = RowsCut(8, 16, 4, 4)
"""Where a launch has other work too, which takes more registers: of eight warps, too few would run
at once."""


def rows_cut(rows: int, inputs: int, outputs: int) -> RowsCut | None:
    """Return how a product of so many tokens is cut; None where `fp4_tile` computes it."""
    if rows > FEW.rows:
        return MORE if rows <= MORE.rows else None
    return FEW_OF_MANY if max(inputs, outputs) >= MANY else FEW


def joined_cut(rows: int) -> RowsCut | None:
    """Return the same of a product that an adapter's shrink joins."""
    return JOINED if rows <= JOINED.rows else MORE if rows <= MORE.rows else None


NVFP4_FACTORS = gl.constexpr(
    tuple(
        "{.reg .b32 t, k; "
        f"prmt.b32 t, $1, 0, 0x4{place}4{place}; shl.b32 t, t, 4; mov.b32 k, 0x7b007b00; "
        "mul.bf16x2 t, t, k; mul.bf16x2 $0, t, k;}"
        for place in range(4)
    )
)
MXFP4_FACTORS = gl.constexpr(
    tuple(
        "{.reg .b32 t; "
        f"prmt.b32 t, $1, 0, 0x4{place}4{place}; add.u32 t, t, 0x00760076; shl.b32 $0, t, 7;}}"
        for place in range(4)
    )
)
"""Makes twice the factor of the scales at a quarter, 2 ** 118 times the scale.

The bits of a scale of nvfp4, four places up, are a number of bfloat16 of 2 ** -120 of what it
stands for. It is multiplied by 2 ** 119 twice.
"""

NUMBERS = gl.constexpr(tuple(ASSEMBLY.values()))
"""Makes two numbers of the codes at a quarter in two words."""

# Arguments are grouped by what they describe; a line for each would hide the kernels.
# fmt: off


@gluon.jit  # type: ignore[untyped-decorator]
def _numbers(
    words: "Any", scales: "Any", PLACE: gl.constexpr, IS_NVFP4: gl.constexpr
) -> "Any":
    """Numbers of the codes at one place of the words; scales: of each."""
    ASM: gl.constexpr = NVFP4_FACTORS[PLACE] if IS_NVFP4 else MXFP4_FACTORS[PLACE]
    factors = gl.inline_asm_elementwise(
        ASM, "=r,r", [scales], dtype=gl.int32, is_pure=True, pack=1
    )
    # $2 and $3 are alike.
    return gl.inline_asm_elementwise(
        NUMBERS[PLACE], "=r,r,r,r", [words, factors], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit  # type: ignore[untyped-decorator]
def _turn(
    acc: "Any", words: "Any", first: "Any", second: "Any", x_rows: "Any", live: "Any",
    TURN: gl.constexpr, IS_NVFP4: gl.constexpr, OF_W: gl.constexpr,
) -> "Any":
    """acc and the products of TURN chunks."""
    for each in gl.static_range(TURN):
        scales = gl.expand_dims(first[each], 2)
        if IS_NVFP4:
            # Eight neighbours, a thread's, are all in the same half.
            word = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, OF_W)))
            is_first = gl.expand_dims(gl.expand_dims(word // 8 < 2, 0), 1)
            scales = gl.where(is_first, scales, gl.expand_dims(second[each], 2))
        scales = scales.broadcast_to(words[each].shape)
        for place in gl.static_range(4):
            x = gl.load(x_rows + (each * 128 + place * 32), mask=live, other=0.0)
            acc = mma_v2(_numbers(words[each], scales, place, IS_NVFP4), x, acc)
    return acc


@gluon.jit  # type: ignore[untyped-decorator]
def fp4_row_tile(
    block: "Any", share: "Any", num_blocks: "Any",
    x: "Any", codes: "Any", scales: "Any", outer: "Any", bias: "Any",
    y: "Any", sums: "Any", arrived: "Any",
    num_rows: "Any", num_outputs: "Any", x_stride: "Any", y_stride: "Any",
    INPUTS: gl.constexpr, IS_NVFP4: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, TURN: gl.constexpr, SHARES: gl.constexpr,
    HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
) -> None:
    """One block of outputs, all tokens, one share of the inputs, of which each warp has a part.

    x: [tokens, INPUTS]. codes, scales, outer: see fp4_tiles.fp4_tile. TURN: chunks that a warp
    loads at once; it divides those of its part.
    """
    PARTS: gl.constexpr = gl.num_warps()
    PART: gl.constexpr = INPUTS // 128 // SHARES // PARTS
    EACH: gl.constexpr = 2 if IS_NVFP4 else 1
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [PARTS, 1, 1], [1, 16, 8])
    OF_W: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 8)
    OF_X: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, 8)
    first = share * (PART * PARTS)
    # Axes: parts, outputs, words; parts, words, tokens for x.
    part = first + gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, OF_W))) * PART
    row = block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, OF_W)))
    word = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, OF_W)))
    row = gl.expand_dims(gl.minimum(row, num_outputs - 1), 0)
    part = gl.expand_dims(part, 1)
    step = num_outputs * 32
    s_step = num_outputs * EACH
    inner = gl.expand_dims(row * 32, 2) + gl.expand_dims(gl.expand_dims(word, 0), 1)
    w_rows = codes + gl.expand_dims(part.to(gl.int64) * step, 2) + inner
    s_rows = scales + part * s_step + row
    words = words_of(w_rows, step, TURN)
    s0 = words_of(s_rows, s_step, TURN)
    s1 = s0
    if IS_NVFP4:
        s1 = words_of(s_rows + num_outputs, s_step, TURN)
    of_x = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, OF_X)))
    k = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, OF_X)))
    m = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, OF_X))), 0)
    live = gl.expand_dims(m < num_rows, 1)
    at = gl.expand_dims((first + of_x * PART) * 128, 1) + gl.expand_dims(k, 0)
    x_rows = x + gl.expand_dims(m * x_stride, 1) + gl.expand_dims(at, 2)
    acc = gl.zeros([PARTS, BLOCK_N, ROWS], gl.float32, LAYOUT)
    if PDL:
        gdc_wait()
    for _ in range(TURN, PART, TURN):
        w_rows += TURN * step
        s_rows += TURN * s_step
        next_words = words_of(w_rows, step, TURN)
        next_s0 = words_of(s_rows, s_step, TURN)
        next_s1 = next_s0
        if IS_NVFP4:
            next_s1 = words_of(s_rows + num_outputs, s_step, TURN)
        acc = _turn(acc, words, s0, s1, x_rows, live, TURN, IS_NVFP4, OF_W)
        words = next_words
        s0 = next_s0
        s1 = next_s1
        x_rows += TURN * 128
    acc = _turn(acc, words, s0, s1, x_rows, live, TURN, IS_NVFP4, OF_W)
    FLAT: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, PARTS], [0, 1])
    found = gl.convert_layout(gl.sum(acc, axis=0), FLAT) * 256.0
    if IS_NVFP4:
        out = block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, FLAT))
        factor = gl.load(outer + gl.minimum(out, num_outputs - 1)).to(gl.float32)
        found = found * gl.expand_dims(factor, 1)
    store_rows(
        found, y, bias, sums, arrived, block, share,
        num_blocks, num_rows, num_outputs, y_stride, ROWS, BLOCK_N, SHARES, HAS_BIAS, FLAT,
    )

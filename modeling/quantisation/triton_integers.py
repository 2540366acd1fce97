"""Products with weights of 4 bits, in Triton.

    y[m, n] = sum_g s[g, n] * sum_k x[m, k] (W[n, k] - z[g, n])     k of group g
    y[m, n] = sum_k x[m, k] round(table[W[n, k]] * s[g(k), n])      where codes stand for numbers

Codes lie in chunks of inputs, see `integers.pack`: a word of 16 bits has four codes whose inputs
are a quarter of a chunk apart, so that the codes of one place in neighbouring words belong to
neighbouring inputs. A code in the lowest bits of a raised number of half precision adds to it:
two are made of a register by a shift, a mask and a subtraction, exactly.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modeling.quantisation.triton_product import product_memory
from modeling.triton_launch import Launcher, aligned, has_dependent_launch, launch_options
from modeling.triton_tiles import ProductCut, prefetch, store_tile

Pointer = Any

CUTS = (
    ProductCut(8, 64, 128, 4, 4, blocks=680),
    ProductCut(16, 64, 128, 4, 4, blocks=680),
    ProductCut(64, 128, 128, 4, 4, blocks=192),
)
"""Eight tokens take the tensor cores' instruction of a warp, more that of four warps. Beyond 64
numbers are made and multiplied by a library."""

LEAST_CHUNK = 64
"""Inputs: the tensor cores take 16 at a time, a quarter of a chunk."""

RAISED = {torch.bfloat16: 128, torch.float16: 1024}
"""Numbers of which the lowest four bits are the lowest four of a whole number."""

_BITS = {torch.bfloat16: ("0x43004300", "bf16x2"), torch.float16: ("0x64006400", "f16x2")}
"""Two of them in a register, and what PTX calls the pair."""


def _assembly(dtype: torch.dtype) -> list[str]:
    """Return what makes two numbers of the codes at each of the four places in two words.

    $1: the words. $2: twice what is subtracted.
    """
    bits, pair = _BITS[dtype]
    return [
        f"{{.reg .b32 t; shr.u32 t, $1, {4 * place}; lop3.b32 t, t, 0x000f000f, {bits}, 0xea; "
        f"sub.{pair} $0, t, $2;}}"
        for place in range(4)
    ]


# Arguments are grouped by what they describe; a line for each would hide the kernels.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(
    words: "Any", middle: "Any", table: "Pointer", factors: "Any",
    PLACE: tl.constexpr, ASM: tl.constexpr, HAS_TABLE: tl.constexpr,
) -> "Any":
    """Codes at one place of the words, less `middle`, in middle's type.

    HAS_TABLE: what they stand for, by the factor of each row.
    """
    if HAS_TABLE:
        found = tl.load(table + ((words.to(tl.int32) >> (4 * PLACE)) & 15))
        numbers = (found * factors[:, None]).to(middle.dtype)
    else:
        numbers = tl.inline_asm_elementwise(
            ASM, "=r,r,r", [words, middle], dtype=middle.dtype, is_pure=True, pack=2
        )
    return numbers


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _integers(
    x: "Pointer", codes: "Pointer", scales: "Pointer", zeros: "Pointer", table: "Pointer",
    bias: "Pointer", y: "Pointer", sums: "Pointer", arrived: "Pointer",
    num_rows: "Any", num_outputs: "Any", x_stride: int, y_stride: int,
    INPUTS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    MIDDLE: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_TABLE: tl.constexpr, RAISED: tl.constexpr,
    ASM0: tl.constexpr, ASM1: tl.constexpr, ASM2: tl.constexpr, ASM3: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    SHARES: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """One block of outputs, all tokens, one share of the inputs.

    CHUNK: inputs of a chunk. CHUNKS: chunks of a group. MIDDLE: the zero point, or with zeros what
    is subtracted of codes first.
    """
    if PDL:
        gdc_launch_dependents()
    num_blocks = tl.num_programs(0) // SHARES
    block, share = tl.program_id(0) % num_blocks, tl.program_id(0) // num_blocks
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, ROWS)
    WORDS: tl.constexpr = CHUNK // 4
    word = tl.arange(0, WORDS)
    inside, live = n < num_outputs, m < num_rows
    chunks: tl.constexpr = INPUTS // CHUNK // SHARES
    first = share * chunks
    row = tl.minimum(n, num_outputs - 1)
    step = num_outputs.to(tl.int64) * WORDS
    w_rows = codes + first * step + row * WORDS
    x_rows = x + m.to(tl.int64) * x_stride + first * CHUNK
    if PDL:
        ahead = tl.minimum(tl.arange(0, 4), chunks - 1) * step
        prefetch(w_rows[:, None] + ahead[None, :])
        gdc_wait()
    acc = tl.zeros([BLOCK_N, ROWS], dtype=tl.float32)
    at_group = first // CHUNKS * num_outputs + row
    factors = tl.load(scales + at_group)
    zero = row
    if HAS_ZEROS:
        zero = tl.load(zeros + at_group)
    middle = tl.full([BLOCK_N, WORDS], RAISED + MIDDLE, x.dtype.element_ty)
    for chunk in range(chunks):
        # The next chunk's are loaded now: loads that no product takes are not pipelined.
        at_group = tl.minimum(first + chunk + 1, INPUTS // CHUNK - 1) // CHUNKS * num_outputs + row
        next_factors = tl.load(scales + at_group)
        next_zero = row
        if HAS_ZEROS:
            next_zero = tl.load(zeros + at_group)
        words = tl.load(w_rows[:, None] + word[None, :])
        xs = x_rows[None, :] + word[:, None]
        x0 = tl.load(xs, mask=live[None, :], other=0.0)
        w = _numbers(words, middle, table, factors, 0, ASM0, HAS_TABLE)
        part = tl.dot(w, x0)
        x1 = tl.load(xs + WORDS, mask=live[None, :], other=0.0)
        w = _numbers(words, middle, table, factors, 1, ASM1, HAS_TABLE)
        part = tl.dot(w, x1, part)
        x2 = tl.load(xs + 2 * WORDS, mask=live[None, :], other=0.0)
        w = _numbers(words, middle, table, factors, 2, ASM2, HAS_TABLE)
        part = tl.dot(w, x2, part)
        x3 = tl.load(xs + 3 * WORDS, mask=live[None, :], other=0.0)
        w = _numbers(words, middle, table, factors, 3, ASM3, HAS_TABLE)
        part = tl.dot(w, x3, part)
        if HAS_ZEROS:
            # A number for each output would keep the codes from going straight to the product.
            total = tl.sum(x0.to(tl.float32) + x1.to(tl.float32), axis=0)
            total += tl.sum(x2.to(tl.float32) + x3.to(tl.float32), axis=0)
            part -= (zero.to(tl.float32) - MIDDLE)[:, None] * total[None, :]
        if HAS_TABLE:
            acc += part
        else:
            acc += part * factors.to(tl.float32)[:, None]
        factors, zero = next_factors, next_zero
        w_rows += step
        x_rows += CHUNK
    store_tile(
        acc, y, bias, sums, arrived, block, share,
        num_blocks, m, n, live, inside, y_stride, ROWS, BLOCK_N, SHARES, HAS_BIAS,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _dequantise(
    codes: "Pointer", scales: "Pointer", zeros: "Pointer", table: "Pointer", y: "Pointer",
    num_outputs: int,
    INPUTS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    MIDDLE: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_TABLE: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:
    """y = (code - zero) * scale, or table[code] * scale, for one chunk of BLOCK_N outputs.

    y: [out, in].
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    chunk = tl.program_id(1)
    WORDS: tl.constexpr = CHUNK // 4
    word = tl.arange(0, WORDS)
    inside = n < num_outputs
    mask = inside[:, None] & (word >= 0)[None, :]
    row = chunk.to(tl.int64) * num_outputs + n
    words = tl.load(codes + row[:, None] * WORDS + word[None, :], mask=mask, other=0).to(tl.int32)
    at_group = chunk // CHUNKS * num_outputs + n
    factors = tl.load(scales + at_group, mask=inside, other=0.0).to(tl.float32)
    middle = tl.full([BLOCK_N], MIDDLE, tl.float32)
    if HAS_ZEROS:
        middle = tl.load(zeros + at_group, mask=inside, other=0).to(tl.float32)
    out = y + n.to(tl.int64)[:, None] * INPUTS + chunk * CHUNK + word[None, :]
    for place in tl.static_range(4):
        code = (words >> (4 * place)) & 15
        if HAS_TABLE:
            found = tl.load(table + code) * factors[:, None]
        else:
            found = (code.to(tl.float32) - middle[:, None]) * factors[:, None]
        tl.store(out + place * WORDS, found.to(y.dtype.element_ty), mask=mask)


# fmt: on

_launch_integers = Launcher(_integers)
_launch_dequantise = Launcher(_dequantise)


def dequantise(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    table: Tensor | None,
    middle: int,
    size: int,
    y: Tensor,
) -> Tensor:
    """Write codes [chunks, out, n] as numbers into y [out, in]; size: inputs of a group."""
    chunks, outputs, _ = codes.shape
    inputs = y.shape[1]
    block, chunk = 64, inputs // chunks
    _launch_dequantise(
        (y.device, y.dtype, scales.dtype, inputs, outputs % 16, chunk, size, middle, zeros is None,
         table is None, aligned(codes, y)),
        (-(-outputs // block), chunks),
        (codes.view(torch.int16), scales, codes if zeros is None else zeros,
         scales if table is None else table, y, outputs),
        {"INPUTS": inputs, "CHUNK": chunk, "CHUNKS": size // chunk, "MIDDLE": middle,
         "HAS_ZEROS": zeros is not None, "HAS_TABLE": table is not None, "BLOCK_N": block},
        {"num_warps": 4},
    )  # fmt: skip
    return y


def integer_product(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    table: Tensor | None,
    middle: int,
    size: int,
    bias: Tensor | None,
    y: Tensor,
    cut: ProductCut,
) -> Tensor:
    """Write the product of x [tokens, in] and codes [chunks, out, n] into y [tokens, out]."""
    (rows, inputs), (chunks, outputs, _) = x.shape, codes.shape
    chunk, dependent = inputs // chunks, has_dependent_launch(x.device)
    shares = cut.shares(outputs, inputs)
    sums, arrived = product_memory(x.device, torch.cuda.current_stream(x.device).cuda_stream)
    height = max(min(cut.rows, 16), triton.next_power_of_2(rows))
    assembly = {f"ASM{place}": text for place, text in enumerate(_assembly(x.dtype))}
    _launch_integers(
        (x.device, x.dtype, y.dtype, inputs, outputs, height, cut, shares, bias is None, chunk,
         size, middle, zeros is None, table is None, scales.dtype, aligned(x, codes, y),
         x.stride(0), y.stride(0)),
        (-(-outputs // cut.outputs) * shares,),
        (x, codes.view(torch.int16), scales, codes if zeros is None else zeros,
         scales if table is None else table, y if bias is None else bias, y, sums, arrived,
         rows, outputs, x.stride(0), y.stride(0)),
        {"INPUTS": inputs, "CHUNK": chunk, "CHUNKS": size // chunk,
         "MIDDLE": middle if zeros is None else 8,
         "HAS_ZEROS": zeros is not None, "HAS_TABLE": table is not None,
         "RAISED": RAISED[x.dtype], **assembly,
         "ROWS": height, "BLOCK_N": cut.outputs, "SHARES": shares,
         "HAS_BIAS": bias is not None, "PDL": dependent},
        {"num_warps": cut.warps, "num_stages": cut.stages, **launch_options(dependent)},
    )  # fmt: skip
    return y

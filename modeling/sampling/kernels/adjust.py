"""Changes of logits in a float32 copy, in Triton; the definitions are in `adjustments`."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from modeling.sampling.kernels.exact import EXACT, vocabulary_hash
from modeling.sampling.rows import Allowed, Penalties, Watermarks
from modeling.sampling.watermark import GREEN_BONUS, GREEN_LIMIT, KEY

COLUMNS = 4096
TOKENS = 256
"""What one program changes, and how many of a row's own tokens it reads."""

Pointer = Any


@triton.jit  # type: ignore[untyped-decorator]
def copy_kernel(
    logits: "Pointer", result: "Pointer", vocab: "Any", stride: "Any", width: tl.constexpr
) -> None:
    """Program (row, part): copy it to float32, contiguous; torch's own copy takes twice as long."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * width + tl.arange(0, width)
    inside = columns < vocab
    x = tl.load(logits + row * stride + columns, mask=inside).to(tl.float32)
    tl.store(result + row * vocab + columns, x, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _own_tokens(
    buffer: "Pointer", starts: "Pointer", lengths: "Pointer", vocab: "Any", width: tl.constexpr
) -> "Any":
    """(a part of the program's row's tokens, their positions, which of them count)."""
    own = tl.program_id(0)
    positions = tl.program_id(1) * width + tl.arange(0, width)
    inside = positions < tl.load(lengths + own)
    tokens = tl.load(buffer + tl.load(starts + own) + positions, mask=inside, other=0)
    return tokens, positions, inside & (tokens < vocab)


@triton.jit  # type: ignore[untyped-decorator]
def clear_kernel(
    counts: "Pointer", buffer: "Pointer", starts: "Pointer", lengths: "Pointer", vocab: "Any",
    width: tl.constexpr,
) -> None:  # fmt: skip
    """Program (penalised row, part of its tokens): its counts become zeros, those that are read."""
    tokens, _, inside = _own_tokens(buffer, starts, lengths, vocab, width)
    at = counts + tl.program_id(0).to(tl.int64) * vocab + tokens
    tl.store(at, tl.zeros([width], tl.int32), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def mark_kernel(
    counts: "Pointer", buffer: "Pointer", starts: "Pointer", lengths: "Pointer",
    prompt_lengths: "Pointer", vocab: "Any", width: tl.constexpr,
) -> None:  # fmt: skip
    """Program (penalised row, part of its tokens): count them: int32 [rows, vocab], cleared.

    Bit 0: it is in the prompt; the rest: how often it is in the output.
    """
    tokens, positions, inside = _own_tokens(buffer, starts, lengths, vocab, width)
    at = counts + tl.program_id(0).to(tl.int64) * vocab + tokens
    output = positions >= tl.load(prompt_lengths + tl.program_id(0))
    one = tl.full([width], 1, tl.int32)
    tl.atomic_or(at, one, mask=inside & (output == 0))
    tl.atomic_add(at, one + one, mask=inside & output)


@triton.jit  # type: ignore[untyped-decorator]
def penalise_kernel(
    logits: "Pointer", rows: "Pointer", counts: "Pointer", buffer: "Pointer", starts: "Pointer",
    lengths: "Pointer", repetition: "Pointer", frequency: "Pointer", presence: "Pointer",
    vocab: "Any", width: tl.constexpr,
) -> None:  # fmt: skip
    """Program (penalised row, part of its tokens): penalise each of its tokens once.

    The first to take a token's count leaves none, so its other occurrences change nothing.
    """
    own = tl.program_id(0)
    tokens, _, inside = _own_tokens(buffer, starts, lengths, vocab, width)
    at = counts + own.to(tl.int64) * vocab + tokens
    found = tl.atomic_xchg(at, tl.zeros([width], tl.int32), mask=inside)
    first = inside & (found > 0)
    address = logits + tl.load(rows + own) * vocab + tokens
    x = tl.load(address, mask=first, other=0.0)
    factor = tl.load(repetition + own)
    x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
    number = found >> 1
    x = x - number.to(tl.float32) * tl.load(frequency + own)
    x = x - tl.where(number > 0, tl.load(presence + own), 0.0)
    tl.store(address, x, mask=first)


@triton.jit  # type: ignore[untyped-decorator]
def watermark_kernel(
    logits: "Pointer", rows: "Pointer", previous: "Pointer", vocab: "Any",
    key: tl.constexpr, limit: tl.constexpr, bonus: tl.constexpr, width: tl.constexpr,
) -> None:  # fmt: skip
    """Program (marked row, part): raise the green tokens."""
    own = tl.program_id(0)
    ids = tl.program_id(1) * width + tl.arange(0, width)
    address = logits + tl.load(rows + own) * vocab + ids
    x = tl.load(address, mask=ids < vocab, other=0.0)
    is_green = vocabulary_hash(tl.load(previous + own).to(tl.int32), key, ids) < limit
    tl.store(address, x + bonus, mask=(ids < vocab) & is_green)


@triton.jit  # type: ignore[untyped-decorator]
def allow_kernel(
    logits: "Pointer", rows: "Pointer", words: "Pointer", vocab: "Any", num_words: "Any",
    width: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row with a mask, part): exclude the tokens without a bit."""
    own = tl.program_id(0)
    ids = tl.program_id(1) * width + tl.arange(0, width)
    word = tl.load(words + own * num_words + ids // 32, mask=ids // 32 < num_words, other=0)
    barred = ((word >> (ids % 32)) & 1) == 0
    address = logits + tl.load(rows + own) * vocab + ids
    tl.store(address, tl.full([width], -float("inf"), tl.float32), mask=(ids < vocab) & barred)


def copied(logits: Tensor) -> Tensor:
    """Copy logits [n, vocab] to float32."""
    count, vocab = logits.shape
    result = torch.empty(count, vocab, dtype=torch.float32, device=logits.device)
    grid = (count, triton.cdiv(vocab, COLUMNS))
    copy_kernel[grid](logits, result, vocab, logits.stride(0), width=COLUMNS)
    return result


def penalise(logits: Tensor, penalties: Penalties) -> None:
    """Penalise the tokens that rows have already; logits: [n, vocab], contiguous."""
    count, vocab = len(penalties.rows), logits.shape[1]
    counts = torch.empty(count, vocab, dtype=torch.int32, device=logits.device)
    grid = (count, triton.cdiv(penalties.longest, TOKENS))
    own = (penalties.buffer, penalties.starts, penalties.lengths)
    clear_kernel[grid](counts, *own, vocab, width=TOKENS)
    mark_kernel[grid](counts, *own, penalties.prompt_lengths, vocab, width=TOKENS)
    penalise_kernel[grid](
        logits, penalties.rows, counts, *own, penalties.repetition, penalties.frequency,
        penalties.presence, vocab, width=TOKENS, **EXACT,
    )  # fmt: skip


def mark(logits: Tensor, marked: Watermarks) -> None:
    """Raise the green tokens of rows with a watermark; logits: [n, vocab], contiguous."""
    vocab = logits.shape[1]
    grid = (len(marked.rows), triton.cdiv(vocab, COLUMNS))
    watermark_kernel[grid](
        logits, marked.rows, marked.previous, vocab,
        key=KEY, limit=GREEN_LIMIT, bonus=GREEN_BONUS, width=COLUMNS,
    )  # fmt: skip


def allow(logits: Tensor, allowed: Allowed) -> None:
    """Exclude the tokens that masks do not allow; logits: [n, vocab], contiguous."""
    vocab = logits.shape[1]
    grid = (len(allowed.rows), triton.cdiv(vocab, COLUMNS))
    allow_kernel[grid](
        logits, allowed.rows, allowed.words, vocab, allowed.words.shape[1], width=COLUMNS
    )

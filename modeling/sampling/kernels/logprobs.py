"""Logprobs of single tokens and of each row's best, without a copy of the logits, in Triton."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDTH = 4096
"""Columns of a part."""

MOST = 32
"""Alternatives that the kernels report at most."""

Pointer = Any


@triton.jit(do_not_specialize=["num_top"])  # type: ignore[untyped-decorator]
def parts_kernel(
    logits: "Pointer", peaks: "Pointer", sums: "Pointer", values: "Pointer", ids: "Pointer",
    vocab: "Any", stride: "Any", num_top: "Any", width: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row, part): its largest logit, the sum of e**(x - that), and its best tokens."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * width + tl.arange(0, width)
    x = tl.load(logits + row * stride + columns, mask=columns < vocab, other=-float("inf"))
    x = x.to(tl.float32)
    out = row * tl.num_programs(1) + tl.program_id(1)
    peak = tl.max(x, axis=0)
    tl.store(peaks + out, peak)
    tl.store(sums + out, tl.sum(tl.where(x > -float("inf"), tl.exp(x - peak), 0.0), axis=0))
    for index in range(num_top):
        value, at = tl.max(x, axis=0, return_indices=True)
        tl.store(values + out * num_top + index, value)
        tl.store(ids + out * num_top + index, tl.program_id(1) * width + at)
        x = tl.where(columns == tl.program_id(1) * width + at, -float("inf"), x)


@triton.jit(do_not_specialize=["num_top"])  # type: ignore[untyped-decorator]
def rows_kernel(
    logits: "Pointer", tokens: "Pointer", peaks: "Pointer", sums: "Pointer", values: "Pointer",
    ids: "Pointer", own: "Pointer", top_ids: "Pointer", top_logprobs: "Pointer",
    stride: "Any", parts: "Any", num_top: "Any", spread: tl.constexpr, width: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row): its token's logprob, and the best of its parts' best tokens."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, spread)
    peak = tl.load(peaks + row * parts + part, mask=part < parts, other=-float("inf"))
    total = tl.load(sums + row * parts + part, mask=part < parts, other=0.0)
    top = tl.max(peak, axis=0)
    rest = tl.log(tl.sum(tl.where(total > 0, total * tl.exp(peak - top), 0.0), axis=0))
    x = tl.load(logits + row * stride + tl.load(tokens + row)).to(tl.float32)
    tl.store(own + row, (x - top) - rest)
    index = tl.arange(0, width)
    start = row * parts * num_top
    inside = index < parts * num_top
    found = tl.load(values + start + index, mask=inside, other=-float("inf"))
    for number in range(num_top):
        value, at = tl.max(found, axis=0, return_indices=True)
        tl.store(top_logprobs + row * num_top + number, (value - top) - rest)
        tl.store(top_ids + row * num_top + number, tl.load(ids + start + at).to(tl.int64))
        found = tl.where(index == at, -float("inf"), found)


def logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logprobs of tokens int64 [n] under logits [n, vocab], and the best tokens'.

    They are float32 [n], int64 [n, num_top] and float32 [n, num_top], best first; num_top: up to
    the vocabulary's size, and to MOST.
    """
    (count, vocab), device = logits.shape, logits.device
    parts = triton.cdiv(vocab, WIDTH)
    peaks, sums = torch.empty(2, count, parts, dtype=torch.float32, device=device)
    values = torch.empty(count, parts, num_top, dtype=torch.float32, device=device)
    ids = torch.empty(count, parts, num_top, dtype=torch.int32, device=device)
    own = torch.empty(count, dtype=torch.float32, device=device)
    top_ids = torch.empty(count, num_top, dtype=torch.int64, device=device)
    top_logprobs = torch.empty(count, num_top, dtype=torch.float32, device=device)
    stride = logits.stride(0)
    parts_kernel[count, parts](
        logits, peaks, sums, values, ids, vocab, stride, num_top, width=WIDTH
    )
    rows_kernel[(count,)](
        logits, tokens, peaks, sums, values, ids, own, top_ids, top_logprobs, stride, parts,
        num_top, spread=triton.next_power_of_2(parts),
        width=triton.next_power_of_2(parts * MOST),
    )  # fmt: skip
    return own, top_ids, top_logprobs

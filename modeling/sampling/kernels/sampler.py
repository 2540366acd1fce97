"""The launches that draw a step's random rows' tokens."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from modeling.sampling.kernels.candidates import cut_kernel
from modeling.sampling.kernels.cuts import (
    BINS,
    FEW,
    LAST,
    bracket_kernel,
    count_kernel,
    gather_kernel,
    moments_kernel,
)
from modeling.sampling.kernels.draw import (
    best_kernel,
    choose_kernel,
    draw_kernel,
    peaks_kernel,
)
from modeling.sampling.kernels.exact import EXACT
from modeling.sampling.kernels.guess import check_kernel
from modeling.sampling.rows import RandomRows
from modeling.sampling.warpers import BY_RANK, BY_SURPRISE, FilteredRows

WIDTH = 4096
"""Columns of a part."""

CANDIDATES = 8192
"""Tokens that a bisection holds in registers: nearly always all that there are."""

GUESSES = 2
"""How often a token is drawn before a filter's cut is known."""


@dataclass(frozen=True)
class _Launch:
    """What all launches over one step's logits share.

    logits: [n, vocab]. peaks: float32 [m, parts], the random rows' largest logits by part. tokens:
    int64 [n], where their tokens go.
    """

    logits: Tensor
    random: RandomRows
    peaks: Tensor
    tokens: Tensor

    @property
    def parts(self) -> int:
        """How many parts a row has."""
        return self.peaks.shape[1]

    @property
    def sizes(self) -> tuple[int, int]:
        """The logits' columns, and elements from row to row."""
        return self.logits.shape[1], self.logits.stride(0)

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """What the kernels read of the random rows."""
        return self.logits, self.random.rows, self.peaks, self.random.inverse

    @property
    def constants(self) -> dict[str, Any]:
        """What kernels that read parts are compiled for."""
        spread = triton.next_power_of_2(self.parts)
        return {"width": WIDTH, "spread": spread, "num_warps": 8, **EXACT}

    def draw(self, cuts: "_Cuts", guessed: int = 0) -> tuple[Tensor, Tensor]:
        """Return the parts' best scores and their ids, [m, parts]; guessed: see draw_kernel."""
        random, filtered = self.random, self.random.filtered
        least, stages = random.inverse, random.filters
        if filtered is not None:
            least, stages = filtered.least, filtered.guessed
        scores, ids = torch.empty_like(self.peaks), torch.empty_like(self.peaks, dtype=torch.int32)
        draw_kernel[tuple(self.peaks.shape)](
            *self.rows, random.keys, random.filters, cuts.ends, least, cuts.moments, stages,
            scores, ids, *self.sizes, GUESSED=guessed, **self.constants,
        )  # fmt: skip
        return scores, ids


@dataclass(frozen=True)
class _Cuts:
    """Where the filtered rows' kept tokens end; see draw_kernel."""

    ends: Tensor
    moments: Tensor


def best(logits: Tensor) -> Tensor:
    """Return each row's best token, int64 [n], of logits [n, vocab]."""
    count, vocab = logits.shape
    parts = triton.cdiv(vocab, WIDTH)
    scores = torch.empty(count, parts, dtype=torch.float32, device=logits.device)
    ids = torch.empty_like(scores, dtype=torch.int32)
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    best_kernel[count, parts](logits, scores, ids, vocab, logits.stride(0), width=WIDTH)
    rows = torch.arange(count, device=logits.device)
    spread = triton.next_power_of_2(parts)
    choose_kernel[(count,)](scores, ids, rows, tokens, parts, spread=spread, num_warps=1)
    return tokens


def draw(logits: Tensor, random: RandomRows, tokens: Tensor) -> None:
    """Draw the random rows' tokens from logits [n, vocab] into `tokens`, int64 [n]."""
    vocab, count = logits.shape[1], len(random.rows)
    parts = triton.cdiv(vocab, WIDTH)
    peaks = torch.empty(count, parts, dtype=torch.float32, device=logits.device)
    launch = _Launch(logits, random, peaks, tokens)
    grid = (count, parts)
    peaks_kernel[grid](logits, random.rows, peaks, *launch.sizes, width=WIDTH)
    scores, ids = launch.draw(_cuts(launch, random.filtered))
    spread = triton.next_power_of_2(parts)
    choose_kernel[(count,)](scores, ids, random.rows, tokens, parts, spread=spread, num_warps=1)


def _cuts(launch: _Launch, filtered: FilteredRows | None) -> _Cuts:
    device = launch.logits.device
    count = 1 if filtered is None else len(filtered.rows)
    ends = torch.full((count, 4), LAST, dtype=torch.int32, device=device)
    cuts = _Cuts(ends, torch.ones(count, 2, dtype=torch.int64, device=device))
    if filtered is None:
        return cuts
    if filtered.ranks:
        _guess(launch, filtered, cuts, typical=False)
        _cut(launch, filtered, cuts, typical=False)
    if filtered.typical:
        cuts = replace(cuts, moments=torch.zeros_like(cuts.moments))
        moments_kernel[count, launch.parts](
            *launch.rows, filtered.rows, cuts.ends, filtered.least, cuts.moments, *launch.sizes,
            **launch.constants,
        )  # fmt: skip
        _guess(launch, filtered, cuts, typical=True)
        _cut(launch, filtered, cuts, typical=True)
    return cuts


def _guess(launch: _Launch, filtered: FilteredRows, cuts: _Cuts, typical: bool) -> None:
    """Draw tokens that a filter is likely to keep, and keep those that it keeps; changes `cuts`."""
    stage = BY_SURPRISE if typical else BY_RANK
    if stage not in filtered.guesses:
        return
    count = len(filtered.rows)
    share = filtered.typical_p if typical else filtered.top_p
    sums = torch.zeros(count, 3, dtype=torch.int64, device=launch.logits.device)
    for _ in range(GUESSES):
        scores, ids = launch.draw(cuts, stage)
        check_kernel[count, launch.parts](
            *launch.rows, filtered.rows, cuts.ends, filtered.least, cuts.moments,
            filtered.guessed, share, scores, ids, sums, launch.tokens, *launch.sizes,
            TYPICAL=typical, GUESSED=stage, **launch.constants,
        )  # fmt: skip


def _cut(launch: _Launch, filtered: FilteredRows, cuts: _Cuts, typical: bool) -> None:
    """Find where the filtered rows' tokens end by one order; changes `cuts`.

    Rows that keep few tokens get theirs at once.
    """
    count, vocab, device = len(filtered.rows), launch.logits.shape[1], launch.logits.device
    shared = (*launch.rows, filtered.rows, cuts.ends, filtered.least, cuts.moments)
    kind = {"TYPICAL": typical, "bins": BINS}
    share = filtered.typical_p if typical else filtered.top_p
    counts = torch.zeros(count, 2 * BINS if typical else BINS, dtype=torch.int32, device=device)
    plans = torch.empty(count, 5, dtype=torch.int32, device=device)
    totals = torch.empty(count, 3, dtype=torch.int64, device=device)
    values = torch.empty(count, vocab, dtype=torch.float32, device=device)
    candidates = torch.empty(count, vocab, dtype=torch.int32, device=device)
    grid = (count, launch.parts)
    count_kernel[grid](*shared, counts, *launch.sizes, **kind, **launch.constants)
    bracket_kernel[(count,)](
        counts, filtered.top_k, share, cuts.moments, plans, totals, few=FEW, num_warps=4, **kind
    )
    gather_kernel[grid](
        *shared, plans, totals, values, candidates, *launch.sizes, **kind, **launch.constants
    )
    cut_kernel[(count,)](
        share, cuts.moments, plans, totals, values, candidates, cuts.ends, filtered.least,
        filtered.typical_p, launch.random.keys, filtered.rows, launch.random.rows, launch.tokens,
        vocab, block=CANDIDATES, few=FEW, num_warps=16, **kind, **EXACT,
    )  # fmt: skip

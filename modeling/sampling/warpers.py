"""Temperature and token filters, over [n, vocab] with one parameter a row.

A dropped token's logit is minus infinity. Among equal logits the lower id counts as better: every
rank must drop the same tokens, however it finds them. Probabilities are integers (`weights`), for a
sum of floats depends on its order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from configs.wire.sampling import Sampling
from modeling.sampling.exact import LEAST_EXPONENT, scaled_exp, weights

SMALLEST_TEMPERATURE = 1e-5
"""Below this, dividing could overflow; the best token leads by far anyway."""

LARGEST_TEMPERATURE = 1e30
"""Above this all tokens are equally likely in float32."""

TOP_K_OFF = 2**31 - 1

GUESSED_SHARE = 0.5
"""Kernels draw a token before they know what a filter keeps if it keeps this share."""

BY_RANK, BY_SURPRISE = 1, 2
"""The filter that a token is drawn before: top-p, or typical-p."""


@dataclass(frozen=True)
class FilteredRows:
    """The random rows that drop tokens; each tensor is [f] for f rows.

    rows: int64 indices into the random rows. top_k: int32, TOP_K_OFF where off.
    top_p, least, typical_p: float32; 1, minus infinity and 1 where off. least: ln min_p.
    ranks: whether a row has top_k or top_p. typical: whether a row has typical_p.
    guessed: int32, BY_RANK or BY_SURPRISE where a row's token is drawn before that filter's cut is
    known, else 0. guesses: those of any row.
    """

    rows: Tensor
    top_k: Tensor
    top_p: Tensor
    least: Tensor
    typical_p: Tensor
    guessed: Tensor
    ranks: bool
    typical: bool
    guesses: frozenset[int]


def guess_of(params: Sampling) -> int:
    """Return before which filter's cut the row's token is drawn; see FilteredRows.guessed."""
    if params.typical_p < 1:
        return BY_SURPRISE if params.typical_p >= GUESSED_SHARE else 0
    return BY_RANK if not params.top_k and GUESSED_SHARE <= params.top_p < 1 else 0


def filter_columns(filtered: Sequence[Sampling]) -> list[npt.NDArray[Any]]:
    """Return top_k, top_p, least, typical_p and guessed of filtered rows, as in FilteredRows."""
    min_p = np.array([p.min_p for p in filtered], dtype=np.float32)
    with np.errstate(divide="ignore"):
        least = np.log(min_p)
    return [
        np.array([p.top_k or TOP_K_OFF for p in filtered], dtype=np.int32),
        np.array([p.top_p for p in filtered], dtype=np.float32),
        least,
        np.array([p.typical_p for p in filtered], dtype=np.float32),
        np.array([guess_of(p) for p in filtered], dtype=np.int32),
    ]


def drop_tokens(warped: Tensor, rows: FilteredRows) -> Tensor:
    """Drop tokens by each row's filters, in this order, [f, vocab]."""
    if rows.ranks:
        warped = keep_best(warped, rows.top_k, rows.top_p)
    warped = keep_likely(warped, rows.least)
    return keep_typical(warped, rows.typical_p) if rows.typical else warped


def warp_temperature(logits: Tensor, inverse: Tensor) -> Tensor:
    """Multiply each row by the inverse [n] of its temperature.

    The row's largest logit becomes 0 first, which changes no probability and overflows nothing.
    """
    return _shifted(logits) * inverse[:, None]


def keep_best(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Drop all but each row's best tokens: first top-k, then top-p of what is left.

    top_k: integers [n], the number kept; at or above the vocabulary's size it is off.
    top_p: float32 [n], 1 is off. Tokens are kept, best first, until their probability reaches
    top_p; the one that crosses is kept.
    """
    # Stable: equal logits keep the order of their ids on every rank.
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    kept = torch.ones_like(ordered, dtype=torch.bool)
    if top_k is not None:
        kept &= torch.arange(logits.shape[-1], device=logits.device) < top_k[:, None]
        ordered = ordered.masked_fill(~kept, float("-inf"))
    if top_p is not None:
        kept &= _within(weights(_shifted(ordered)), top_p)
    dropped = torch.empty_like(kept).scatter_(1, ids, ~kept)
    return logits.masked_fill(dropped, float("-inf"))


def keep_likely(logits: Tensor, least: Tensor) -> Tensor:
    """Drop tokens less likely than e**least [n] times the likeliest one."""
    limit = logits.amax(dim=-1) + least
    return logits.masked_fill(logits < limit[:, None], float("-inf"))


def keep_typical(logits: Tensor, typical_p: Tensor) -> Tensor:
    """Keep the tokens with a surprise (-logprob) nearest to its mean, the entropy.

    typical_p: float32 [n], 1 is off. Tokens are kept, nearest first, until their probability
    reaches typical_p; the one that crosses is kept (Meister et al., TACL 2023).
    """
    # A surprise differs by the same from -x / T, so the mean of that stands for the entropy.
    surprise = -_shifted(logits)
    parts = weights(-surprise)
    # The weights are 0 beyond it, and 0 times infinity would be NaN.
    near = surprise < -LEAST_EXPONENT
    moments = torch.where(near, scaled_exp(-surprise) * surprise, 0.0).to(torch.int64)
    mean = moments.sum(dim=-1).double() / parts.sum(dim=-1).double()
    distance = (surprise - mean.float()[:, None]).abs()
    ids = distance.sort(dim=-1, stable=True).indices
    kept = _within(parts.gather(1, ids), typical_p)
    dropped = torch.empty_like(kept).scatter_(1, ids, ~kept)
    return logits.masked_fill(dropped, float("-inf"))


def _shifted(logits: Tensor) -> Tensor:
    return logits - logits.amax(dim=-1, keepdim=True)


def _within(ordered: Tensor, share: Tensor) -> Tensor:
    """Return which tokens, in that order, come before their share of all weights; 1 keeps all.

    ordered: weights [n, vocab]. share: float32 [n].
    """
    before = ordered.cumsum(dim=-1) - ordered
    limit = (share.double() * ordered.sum(dim=-1).double()).to(torch.int64).clamp(min=1)
    return (before < limit[:, None]) | (share >= 1)[:, None]

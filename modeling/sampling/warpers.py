"""Temperature and token filters, over [n, vocab] with one parameter a row.

A dropped token's logit is minus infinity. Among equal logits the lower id counts as better: every
rank must drop the same tokens, however it sorts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.wire.sampling import Sampling
from modeling.transfer import floats, ints

FIXED_POINT = 2.0**40
"""Scale of probabilities as integers; the rounding of 2**17 tokens adds up to 1e-7."""

SMALLEST_TEMPERATURE = 1e-5
"""Below this, dividing could overflow; the best token leads by far anyway."""

LARGEST_TEMPERATURE = 1e30
"""Above this all tokens are equally likely in float32."""

TOP_K_OFF = 2**31 - 1


@dataclass(frozen=True)
class FilteredRows:
    """The random rows that drop tokens; each tensor is [f] for f rows, None if off in all rows.

    rows: int64 indices into the random rows. top_k: int64, TOP_K_OFF where off.
    top_p, min_p, typical_p: float32; 1, 0 and 1 where off.
    """

    rows: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    typical_p: Tensor | None


def filtered_rows(params: Sequence[Sampling], device: torch.device) -> FilteredRows | None:
    """Gather the filters of the random rows; None where no row drops tokens."""
    rows = [index for index, p in enumerate(params) if p.filtered]
    if not rows:
        return None
    filtered = [params[index] for index in rows]
    top_k = None
    if any(p.top_k for p in filtered):
        top_k = ints([p.top_k or TOP_K_OFF for p in filtered], device)
    return FilteredRows(
        rows=ints(rows, device),
        top_k=top_k,
        top_p=_unless_off([p.top_p for p in filtered], 1.0, device),
        min_p=_unless_off([p.min_p for p in filtered], 0.0, device),
        typical_p=_unless_off([p.typical_p for p in filtered], 1.0, device),
    )


def drop_tokens(warped: Tensor, rows: FilteredRows) -> Tensor:
    """Drop tokens by each row's filters, in this order, [f, vocab]."""
    if rows.top_k is not None or rows.top_p is not None:
        warped = keep_best(warped, rows.top_k, rows.top_p)
    if rows.min_p is not None:
        warped = keep_likely(warped, rows.min_p)
    if rows.typical_p is not None:
        warped = keep_typical(warped, rows.typical_p)
    return warped


def warp_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """Divide each row by its temperature [n], all > 0.

    The row's largest logit becomes 0 first, which changes no probability and overflows nothing.
    """
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    return shifted / temperature.clamp(min=SMALLEST_TEMPERATURE)[:, None]


def keep_best(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Drop all but each row's best tokens: first top-k, then top-p of what is left.

    top_k: int64 [n], the number kept; at or above the vocabulary's size it is off.
    top_p: float [n], 1 is off. Tokens are kept, best first, until their probability reaches
    top_p; the one that crosses is kept.
    """
    # Stable: equal logits keep the order of their ids on every rank.
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    kept = torch.ones_like(ordered, dtype=torch.bool)
    if top_k is not None:
        kept &= torch.arange(logits.shape[-1], device=logits.device) < top_k[:, None]
        ordered = ordered.masked_fill(~kept, float("-inf"))
    if top_p is not None:
        kept &= _within(ordered, top_p)
    dropped = torch.empty_like(kept).scatter_(1, ids, ~kept)
    return logits.masked_fill(dropped, float("-inf"))


def keep_likely(logits: Tensor, min_p: Tensor) -> Tensor:
    """Drop tokens less likely than min_p [n] times the likeliest one; 0 keeps all."""
    limit = logits.amax(dim=-1) + min_p.log()
    return logits.masked_fill(logits < limit[:, None], float("-inf"))


def keep_typical(logits: Tensor, typical_p: Tensor) -> Tensor:
    """Keep the tokens with a surprise (-logprob) nearest to its mean, the entropy.

    typical_p: float [n], 1 is off. Tokens are kept, nearest first, until their probability
    reaches typical_p; the one that crosses is kept (Meister et al., TACL 2023).
    """
    logprobs = logits.log_softmax(dim=-1)
    # Tokens that other filters dropped have probability 0, and 0 times infinity would be NaN.
    parts = (-logprobs * logprobs.exp()).masked_fill(logprobs == float("-inf"), 0.0)
    entropy = (parts * FIXED_POINT).round().to(torch.int64).sum(dim=-1, keepdim=True) / FIXED_POINT
    distance = (logprobs + entropy).abs()
    ids = distance.sort(dim=-1, stable=True).indices
    kept = _within(logits.gather(1, ids), typical_p)
    dropped = torch.empty_like(kept).scatter_(1, ids, ~kept)
    return logits.masked_fill(dropped, float("-inf"))


def _within(ordered: Tensor, top_p: Tensor) -> Tensor:
    """Return which tokens, in that order, come before probability top_p [n]; 1 keeps all."""
    # Integers: a sum of floats in parallel differs from run to run on CUDA, and ranks that
    # disagree about one token would go on with different sequences.
    parts = (ordered.softmax(dim=-1, dtype=torch.float32) * FIXED_POINT).round().to(torch.int64)
    before = parts.cumsum(dim=-1) - parts
    limit = (top_p.to(torch.float64) * FIXED_POINT).to(torch.int64).clamp(min=1)
    return (before < limit[:, None]) | (top_p >= 1)[:, None]


def _unless_off(values: list[float], off: float, device: torch.device) -> Tensor | None:
    """Return one value for each row; None where all are off."""
    return None if all(value == off for value in values) else floats(values, device)

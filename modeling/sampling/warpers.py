"""Temperature and token filters: pure functions over [n, vocab], one parameter a row.

A dropped token's logit is minus infinity. Among equal logits the lower id counts as better: every
rank must drop the same tokens, however it sorts.
"""

import torch
from torch import Tensor

FIXED_POINT = 2.0**40
"""Scale of probabilities as integers; the rounding of 2**17 tokens adds up to 1e-7."""

SMALLEST_TEMPERATURE = 1e-5
"""Below this, dividing could overflow; the best token leads by far anyway."""

LARGEST_TEMPERATURE = 1e30
"""Above this all tokens are equally likely in float32."""


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
    """Drop all but the tokens whose surprise is nearest to the mean of it, the entropy.

    typical_p: float [n], 1 is off. Tokens are kept, nearest first, until their probability
    reaches typical_p; the one that crosses is kept (Meister et al., TACL 2023).
    """
    logprobs = logits.log_softmax(dim=-1)
    # What is dropped already has no probability and no part in the mean.
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

"""Several sequences of one prompt: their seeds, and which of them are the best."""

from collections.abc import Sequence

from deployments.contract import SequenceOutcome

# Spreads the seeds of one prompt's choices, so that seed 1's second is not seed 2's first.
_SEED_STRIDE = 0x9E3779B97F4A7C15


def spread_seed(seed: int, choice: int) -> int:
    """The seed of a request's choice: the first one's is the request's own."""
    return (seed + choice * _SEED_STRIDE) % 2**64


def best_first(outcomes: Sequence[SequenceOutcome], num_tokens: Sequence[int]) -> list[int]:
    """Indices by mean logprob over the tokens that count, the earlier first among equals."""
    means = [_mean_logprob(outcome, n) for outcome, n in zip(outcomes, num_tokens, strict=True)]
    return sorted(range(len(means)), key=lambda index: -means[index])


def _mean_logprob(outcome: SequenceOutcome, num_tokens: int) -> float:
    counted = (outcome.logprobs or [])[:num_tokens]
    return sum(token.logprob for token in counted) / max(1, len(counted))

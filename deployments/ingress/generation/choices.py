"""Several sequences of one prompt: their seeds, and their order by quality."""

from collections.abc import Sequence

from deployments.contract import SequenceOutcome

# Makes the seeds of choices distinct: seed 1's second choice must not equal seed 2's first.
_SEED_STRIDE = 0x9E3779B97F4A7C15


def spread_seed(seed: int, choice: int) -> int:
    """The seed of a choice; the first choice has the request's own."""
    return (seed + choice * _SEED_STRIDE) % 2**64


def best_first(outcomes: Sequence[SequenceOutcome], num_tokens: Sequence[int]) -> list[int]:
    """Indices by falling mean logprob of the first num_tokens[i] tokens; stable."""
    means = [_mean_logprob(outcome, n) for outcome, n in zip(outcomes, num_tokens, strict=True)]
    return sorted(range(len(means)), key=lambda index: -means[index])


def _mean_logprob(outcome: SequenceOutcome, num_tokens: int) -> float:
    counted = (outcome.logprobs or [])[:num_tokens]
    return sum(token.logprob for token in counted) / max(1, len(counted))

"""The sampler: from logits to tokens, and to the logprobs that somebody asked for."""

from dataclasses import dataclass

import torch
from torch import Tensor

from modeling.sampling.adjust import adjust
from modeling.sampling.noise import exponential_noise
from modeling.sampling.tensors import FilteredRows, RandomRows, SamplingTensors
from modeling.sampling.warpers import keep_best, keep_likely, keep_typical, warp_temperature


@dataclass(frozen=True)
class ChosenLogprobs:
    """Natural logprobs under the model's own distribution, before any adjustment or warping.

    logprob: float32 [n], of the chosen tokens. top_ids: int64 [n, num_top] and top_logprobs:
    float32 [n, num_top], best first.
    """

    logprob: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


@dataclass(frozen=True)
class SampledStep:
    """Tokens int64 [n], and their logprobs where a row asked."""

    tokens: Tensor
    logprobs: ChosenLogprobs | None


def choose(logits: Tensor, sampling: SamplingTensors) -> SampledStep:
    """Choose each row's token: logits [n, vocab], without padded columns.

    Greedy rows take the best logit, the lowest id among equals.
    """
    asked = logits if sampling.adjustments is None else adjust(logits, sampling.adjustments)
    tokens = asked.argmax(dim=-1)
    random = sampling.random
    if random is not None:
        tokens[random.rows] = _sample(asked[random.rows].float(), random)
    if sampling.num_top < 0:
        return SampledStep(tokens, None)
    return SampledStep(tokens, logprobs_of(logits, tokens, sampling.num_top))


def _sample(logits: Tensor, random: RandomRows) -> Tensor:
    """Draw from softmax(logits / T) over the kept tokens, [m, vocab] to [m].

    argmin of E / p = argmax of logit / T - log E, with E exponential noise: the same token on
    every rank, from the request's own seed and position (the Gumbel-max trick).
    """
    warped = warp_temperature(logits, random.temperature)
    filtered = random.filtered
    if filtered is not None:
        warped[filtered.rows] = _filter(warped[filtered.rows], filtered)
    noise = exponential_noise(random.keys, logits.shape[-1])
    return (warped - noise.log()).argmax(dim=-1)


def _filter(warped: Tensor, asked: FilteredRows) -> Tensor:
    """Leave out what each row does not want, [f, vocab]."""
    if asked.top_k is not None or asked.top_p is not None:
        warped = keep_best(warped, asked.top_k, asked.top_p)
    if asked.min_p is not None:
        warped = keep_likely(warped, asked.min_p)
    if asked.typical_p is not None:
        warped = keep_typical(warped, asked.typical_p)
    return warped


def logprobs_of(logits: Tensor, tokens: Tensor, num_top: int) -> ChosenLogprobs:
    """What the model thinks of tokens int64 [n] under logits [n, vocab], and what it prefers."""
    logprobs = logits.float().log_softmax(dim=-1)
    best = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    return ChosenLogprobs(chosen, best.indices, best.values)


def no_rows(device: torch.device) -> SampledStep:
    """Return what a step without sampling rows chose."""
    return SampledStep(torch.empty(0, dtype=torch.int64, device=device), None)

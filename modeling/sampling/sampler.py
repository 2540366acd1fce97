"""Sample tokens from logits, with logprobs where requests want them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from modeling.sampling.adjustments import adjust
from modeling.sampling.exact import log
from modeling.sampling.kernels.select import sampling_kernels
from modeling.sampling.noise import exponential_noise
from modeling.sampling.rows import RandomRows
from modeling.sampling.tensors import SamplingTensors
from modeling.sampling.warpers import drop_tokens, warp_temperature


@dataclass(frozen=True)
class LogprobTensors:
    """Natural logprobs under the model's own distribution, before any adjustment or warping.

    logprob: float32 [n], of the sampled tokens. top_ids: int64 [n, num_top] and top_logprobs:
    float32 [n, num_top], best first.
    """

    logprob: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


@dataclass(frozen=True)
class SampledStep:
    """Tokens int64 [n], and their logprobs if a row wants them."""

    tokens: Tensor
    logprobs: LogprobTensors | None


def sample_tokens(logits: Tensor, sampling: SamplingTensors) -> SampledStep:
    """Sample each row's token: logits [n, vocab], without padded columns.

    Greedy rows take the best logit, the lowest id among equals.
    """
    adjusted = logits if sampling.adjustments is None else adjust(logits, sampling.adjustments)
    tokens = _choose(adjusted, sampling.random)
    if sampling.num_top < 0:
        return SampledStep(tokens, None)
    return SampledStep(tokens, logprobs_of(logits, tokens, sampling.num_top))


def _choose(logits: Tensor, random: RandomRows | None) -> Tensor:
    """Return the rows' tokens, int64 [n]."""
    kernels = sampling_kernels(logits.device)
    if random is not None and len(random.rows) == len(logits):
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    else:
        tokens = logits.argmax(dim=-1) if kernels is None else kernels.best(logits)
    if random is not None and kernels is not None:
        kernels.draw(logits, random, tokens)
    elif random is not None:
        # In float32 whatever the model's type: rounding would undo small differences of the noise.
        tokens[random.rows] = _sample(logits[random.rows].float(), random)
    return tokens


def _sample(logits: Tensor, random: RandomRows) -> Tensor:
    """Draw from softmax(logits / T) over the kept tokens, [m, vocab] to [m].

    argmin of E / p = argmax of logit / T - log E, E exponential noise (the Gumbel-max trick). The
    noise depends on the request's seed and position alone: every rank samples the same token.
    """
    warped = warp_temperature(logits, random.inverse)
    filtered = random.filtered
    if filtered is not None:
        warped[filtered.rows] = drop_tokens(warped[filtered.rows], filtered)
    # Noise of all tokens, kept or not: a token's noise must not depend on the filters.
    noise = exponential_noise(random.keys, logits.shape[-1])
    return (warped - log(noise)).argmax(dim=-1)


def logprobs_of(logits: Tensor, tokens: Tensor, num_top: int) -> LogprobTensors:
    """Return the logprobs of tokens int64 [n] under logits [n, vocab], and the best tokens'."""
    num_top = min(num_top, logits.shape[-1])
    kernels = sampling_kernels(logits.device)
    if kernels is not None and num_top <= kernels.most_logprobs:
        return LogprobTensors(*kernels.logprobs(logits, tokens, num_top))
    logprobs = logits.float().log_softmax(dim=-1)
    best = logprobs.topk(num_top, dim=-1)
    own = logprobs.gather(1, tokens[:, None])[:, 0]
    return LogprobTensors(own, best.indices, best.values)


def no_rows(device: torch.device) -> SampledStep:
    """Return the result of a step without sampling rows."""
    return SampledStep(torch.empty(0, dtype=torch.int64, device=device), None)

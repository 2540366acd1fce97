"""The sampler's definition, one row at a time in float64 and Python: the oracle."""

import math
from collections import Counter
from dataclasses import dataclass

import torch

from configs.wire.sampling import Sampling
from modeling.sampling.watermark import GREEN_BONUS, green


@dataclass(frozen=True)
class PlainRow:
    """One sequence before its next token: its parameters and the tokens that it has."""

    params: Sampling
    prompt: list[int]
    output: list[int]

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


def plain_adjusted(logits: list[float], row: PlainRow) -> list[float]:
    """Logits after biases, masks, penalties and watermark."""
    params, result = row.params, list(logits)
    for id, bias in params.logit_bias:
        result[id] += bias
    if len(row.output) < params.masked_tokens:
        for id in params.masked_ids:
            result[id] = -math.inf
    for id in set(row.tokens):
        penalty = params.repetition_penalty
        result[id] = result[id] / penalty if result[id] > 0 else result[id] * penalty
    for id, count in Counter(row.output).items():
        result[id] -= params.frequency_penalty * count + params.presence_penalty
    if params.watermark:
        raised = green(torch.tensor([row.tokens[-1]]), len(logits))[0].tolist()
        result = [x + GREEN_BONUS * up for x, up in zip(result, raised, strict=True)]
    for word in params.bad_words:
        *before, last = word
        if row.tokens[len(row.tokens) - len(before) :] == before:
            result[last] = -math.inf
    if params.allowed_ids:
        result = [x if id in params.allowed_ids else -math.inf for id, x in enumerate(result)]
    return result


def plain_kept(logits: list[float], params: Sampling, high_first: bool = False) -> list[int]:
    """Ids that stay after temperature, top-k, top-p, min-p and typical-p, ascending.

    high_first: of tokens that are equally typical, rounded to 1e-6, the higher id comes first. Of
    two tokens of probability 0.5 + d and 0.5 - d the distances differ by d ** 3 alone.
    """
    warped = [x / params.temperature for x in logits]
    kept = sorted(range(len(warped)), key=lambda i: (-warped[i], i))
    if params.top_k:
        kept = kept[: params.top_k]
    if params.top_p < 1:
        kept = _until(kept, _softmax(warped, kept), params.top_p)
    weights = _softmax(warped, kept)
    kept = [i for i in kept if weights[i] >= params.min_p * max(weights.values()) * (1 - 1e-6)]
    if params.typical_p < 1:
        weights = _softmax(warped, kept)
        surprise = {i: -math.log(weights[i]) for i in kept if weights[i] > 0}
        entropy = sum(weights[i] * surprise[i] for i in surprise)
        sign = -1 if high_first else 1
        order = sorted(surprise, key=lambda i: (round(abs(surprise[i] - entropy), 6), sign * i))
        kept = _until(order, weights, params.typical_p)
    return sorted(kept)


def _until(order: list[int], weights: dict[int, float], share: float) -> list[int]:
    kept, mass = [], 0.0
    for id in order:
        if mass >= share - 1e-7:
            break
        kept.append(id)
        mass += weights[id]
    return kept


def _softmax(logits: list[float], ids: list[int]) -> dict[int, float]:
    top = max(logits[i] for i in ids)
    weights = {i: math.exp(logits[i] - top) for i in ids}
    total = sum(weights.values())
    return {i: weight / total for i, weight in weights.items()}

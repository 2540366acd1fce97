"""Biases, penalties and watermark: changes of the logits that come before temperature."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from modeling.sampling.adjustments import Adjustments, Allowed, Biases, Penalties
from modeling.sampling.watermark import GREEN_BONUS, green


def adjust(logits: Tensor, asked: Adjustments) -> Tensor:
    """Change what rows ask to be changed: logits [n, vocab] to float32 [n, vocab], a copy.

    The order is biases and masks, repetition, frequency and presence, watermark, schema.
    """
    result = logits.to(torch.float32, copy=True)
    if asked.biases is not None:
        _bias(result, asked.biases)
    penalties = asked.penalties
    if penalties is not None:
        result[penalties.rows] = _penalise(result[penalties.rows], penalties)
    marked = asked.watermarks
    if marked is not None:
        result[marked.rows] += GREEN_BONUS * green(marked.previous, logits.shape[-1])
    if asked.allowed is not None:
        _allow(result, asked.allowed)
    return result


def _allow(logits: Tensor, asked: Allowed) -> None:
    """Mask in place what the rows' schemas do not allow."""
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    # Byte by byte, little end first, so that what is unpacked takes a byte a token and not four.
    barred = (((asked.words.view(torch.uint8)[:, :, None] >> bits) & 1) == 0).flatten(1)
    # Columns that no token of the tokenizer has are never allowed.
    barred = pad(barred, (0, logits.shape[-1] - barred.shape[-1]), value=True)
    logits[asked.rows] = logits[asked.rows].masked_fill(barred, float("-inf"))


def _bias(logits: Tensor, asked: Biases) -> None:
    """Add the biases in place; ids beyond the vocabulary are nobody's."""
    last = logits.shape[-1] - 1
    values = asked.values.masked_fill(asked.ids > last, 0.0)
    logits.index_put_((asked.rows, asked.ids.clamp(max=last)), values, accumulate=True)


def _penalise(logits: Tensor, asked: Penalties) -> Tensor:
    """Penalise tokens that a row has: [p, vocab] to the same.

    Repetition divides positive logits and multiplies negative ones, whether the token is the
    prompt's or the output's; frequency and presence look at the output alone.
    """
    tokens, output = _window(asked, logits.shape[-1])
    seen = _counts(tokens, torch.ones_like(output), logits.shape[-1]) > 0
    counts = _counts(tokens, output, logits.shape[-1])
    repetition = asked.repetition[:, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, repeated, logits)
    presence = (counts > 0) * asked.presence[:, None]
    return logits - counts * asked.frequency[:, None] - presence


def _window(asked: Penalties, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Each row's tokens, filled up with vocab_size, and which are output: both [p, longest]."""
    places = torch.arange(asked.longest, device=asked.buffer.device)
    own = places < asked.lengths[:, None]
    at = (asked.starts[:, None] + places).clamp(max=len(asked.buffer) - 1)
    # A token that the model's head does not know counts for nothing.
    tokens = asked.buffer[at].masked_fill(~own, vocab_size).clamp(max=vocab_size)
    return tokens, places >= asked.prompt_lengths[:, None]


def _counts(tokens: Tensor, counted: Tensor, vocab_size: int) -> Tensor:
    """How often each token is counted: [p, longest] twice to float32 [p, vocab_size].

    Sums of whole numbers below 2**24 are exact in any order, so all ranks agree.
    """
    counts = torch.zeros(len(tokens), vocab_size + 1, device=tokens.device)
    return counts.scatter_add_(1, tokens, counted.to(torch.float32))[:, :vocab_size]

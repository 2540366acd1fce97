"""Change logits before temperature: biases, penalties, watermark and grammar masks."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from modeling.sampling.adjustments import Adjustments, Allowed, Biases, Penalties
from modeling.sampling.watermark import GREEN_BONUS, green


def adjust(logits: Tensor, changes: Adjustments) -> Tensor:
    """Apply the rows' changes: logits [n, vocab] to float32 [n, vocab], a copy.

    The order is biases and masks, repetition, frequency and presence, watermark, grammar.
    """
    result = logits.to(torch.float32, copy=True)
    if changes.biases is not None:
        _bias(result, changes.biases)
    penalties = changes.penalties
    if penalties is not None:
        result[penalties.rows] = _penalise(result[penalties.rows], penalties)
    marked = changes.watermarks
    if marked is not None:
        result[marked.rows] += GREEN_BONUS * green(marked.previous, logits.shape[-1])
    if changes.allowed is not None:
        _allow(result, changes.allowed)
    return result


def _allow(logits: Tensor, allowed: Allowed) -> None:
    """Mask in place the tokens that the rows' grammars do not allow."""
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    # By bytes, not words: the unpacked bits then take one byte a token instead of four.
    barred = (((allowed.words.view(torch.uint8)[:, :, None] >> bits) & 1) == 0).flatten(1)
    # Columns that no token of the tokenizer has are never allowed.
    barred = pad(barred, (0, logits.shape[-1] - barred.shape[-1]), value=True)
    logits[allowed.rows] = logits[allowed.rows].masked_fill(barred, float("-inf"))


def _bias(logits: Tensor, biases: Biases) -> None:
    """Add the biases in place; ids beyond the vocabulary are ignored."""
    last = logits.shape[-1] - 1
    values = biases.values.masked_fill(biases.ids > last, 0.0)
    logits.index_put_((biases.rows, biases.ids.clamp(max=last)), values, accumulate=True)


def _penalise(logits: Tensor, penalties: Penalties) -> Tensor:
    """Penalise the tokens that a row has already: [p, vocab] to the same.

    Repetition divides positive logits and multiplies negative ones, for tokens of the prompt and
    of the output; frequency and presence count the output alone.
    """
    tokens, output = _window(penalties, logits.shape[-1])
    seen = _counts(tokens, torch.ones_like(output), logits.shape[-1]) > 0
    counts = _counts(tokens, output, logits.shape[-1])
    repetition = penalties.repetition[:, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, repeated, logits)
    presence = (counts > 0) * penalties.presence[:, None]
    return logits - counts * penalties.frequency[:, None] - presence


def _window(penalties: Penalties, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return each row's tokens, filled up with vocab_size, and which are output: [p, longest]."""
    positions = torch.arange(penalties.longest, device=penalties.buffer.device)
    own = positions < penalties.lengths[:, None]
    at = (penalties.starts[:, None] + positions).clamp(max=len(penalties.buffer) - 1)
    # Tokens beyond the head's vocabulary are not counted.
    tokens = penalties.buffer[at].masked_fill(~own, vocab_size).clamp(max=vocab_size)
    return tokens, positions >= penalties.prompt_lengths[:, None]


def _counts(tokens: Tensor, counted: Tensor, vocab_size: int) -> Tensor:
    """Count each row's tokens: [p, longest] twice to float32 [p, vocab_size].

    Sums of whole numbers below 2**24 are exact in any order, so all ranks agree.
    """
    counts = torch.zeros(len(tokens), vocab_size + 1, device=tokens.device)
    return counts.scatter_add_(1, tokens, counted.to(torch.float32))[:, :vocab_size]

"""Change logits before temperature: biases, penalties, watermark, bad words and masks.

`adjustments` gathers a step's changes as tensors, `adjust` applies them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from configs.wire.sampling import Sampling
from modeling.sampling.bad_words import BadWords, bad_words, exclude
from modeling.sampling.history import TokenHistory
from modeling.sampling.kernels.select import sampling_kernels
from modeling.sampling.rows import Allowed, Penalties, Watermarks
from modeling.sampling.watermark import GREEN_BONUS, green
from modeling.transfer import ints, pack_to_device, to_device

_LARGEST_REPETITION = 1e30
"""Penalties beyond it, or below its inverse, are clamped so that logits stay finite."""


@dataclass(frozen=True)
class Biases:
    """Values added to single logits, [b] for b of them; minus infinity masks a token.

    rows: int64 indices into the step's sampling rows. ids: int64. values: float32.
    """

    rows: Tensor
    ids: Tensor
    values: Tensor


@dataclass(frozen=True)
class Adjustments:
    """All changes of a step's logits; at least one is not None.

    allowed: masks of grammars. listed: masks of allowed_ids.
    """

    biases: Biases | None
    penalties: Penalties | None
    watermarks: Watermarks | None
    allowed: Allowed | None = None
    listed: Allowed | None = None
    bad_words: BadWords | None = None


def adjustments(
    params: Sequence[Sampling],
    positions: Sequence[int],
    history: TokenHistory,
    device: torch.device,
) -> Adjustments | None:
    """Gather the sampling rows' changes; positions: as in sampling_tensors."""
    adjusted = [row for row, p in enumerate(params) if p.adjusted]
    if not adjusted:
        return None
    generated = history.generated(positions).tolist()
    biases = _biases(params, adjusted, generated, device)
    penalties = _penalties(params, positions, history, device)
    watermarks = _watermarks(params, history, device)
    listed = _listed(params, device)
    excluded = bad_words(params, positions, history, device)
    allowed = _allowed(params, history, device)
    found = Adjustments(biases, penalties, watermarks, allowed, listed, excluded)
    return found if any(value is not None for value in vars(found).values()) else None


def _biases(
    params: Sequence[Sampling], rows: Sequence[int], generated: list[int], device: torch.device
) -> Biases | None:
    biased = [params[row].logit_bias + _masks(params[row], generated[row]) for row in rows]
    counts = [len(pairs) for pairs in biased]
    if not any(counts):
        return None
    # Flattened by itertools, as there may be 300 biases in every row of every step.
    flat = np.array(list(chain.from_iterable(chain.from_iterable(biased)))).reshape(-1, 2)
    return Biases(
        rows=to_device(np.repeat(np.array(rows, dtype=np.int64), counts), device),
        ids=to_device(flat[:, 0].astype(np.int64), device),
        values=to_device(flat[:, 1].astype(np.float32), device),
    )


def _masks(params: Sampling, generated: int) -> tuple[tuple[int, float], ...]:
    """Return biases of minus infinity for the tokens that the row must not sample yet."""
    if generated >= params.masked_tokens:
        return ()
    return tuple((id, float("-inf")) for id in params.masked_ids)


def _penalties(
    params: Sequence[Sampling],
    positions: Sequence[int],
    history: TokenHistory,
    device: torch.device,
) -> Penalties | None:
    rows = [row for row, p in enumerate(params) if p.penalised]
    if not rows:
        return None
    penalised = [params[row] for row in rows]
    lengths = np.array(positions, dtype=np.int64)[rows]
    factors = [(_bounded(p.repetition_penalty), p.frequency_penalty, p.presence_penalty)
               for p in penalised]  # fmt: skip
    own, starts, ends, prompts, repetition, frequency, presence = pack_to_device(
        [
            np.array(rows, dtype=np.int64),
            history.targets[rows] - lengths,
            lengths,
            history.prompt_lengths[rows],
            *np.array(factors, dtype=np.float32).T,
        ],
        device,
    )
    longest = int(lengths.max())
    return Penalties(
        own, history.buffer, starts, ends, prompts, longest, repetition, frequency, presence
    )


def _bounded(repetition: float) -> float:
    return min(max(repetition, 1 / _LARGEST_REPETITION), _LARGEST_REPETITION)


def _watermarks(
    params: Sequence[Sampling], history: TokenHistory, device: torch.device
) -> Watermarks | None:
    rows = [row for row, p in enumerate(params) if p.watermark]
    if not rows:
        return None
    # Read on the device: the step that samples this token may still be in flight.
    newest = to_device(history.targets[rows] - 1, device)
    return Watermarks(ints(rows, device), history.buffer[newest])


def _listed(params: Sequence[Sampling], device: torch.device) -> Allowed | None:
    rows = [row for row, p in enumerate(params) if p.allowed_ids]
    if not rows:
        return None
    longest = max(max(params[row].allowed_ids) for row in rows)
    words = np.zeros((len(rows), longest // 32 + 1), dtype=np.uint32)
    for index, row in enumerate(rows):
        ids = np.array(params[row].allowed_ids)
        np.bitwise_or.at(words[index], ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return Allowed(ints(rows, device), to_device(words.view(np.int32), device))


def _allowed(
    params: Sequence[Sampling], history: TokenHistory, device: torch.device
) -> Allowed | None:
    """Get the grammars' masks; waits for the tokens of the step before."""
    rows = [row for row, p in enumerate(params) if p.constraint]
    if not rows or history.grammars is None:
        return None
    words = history.grammars.masks(history.batch_slots[rows].tolist(), device)
    return Allowed(ints(rows, device), words)


def adjust(logits: Tensor, changes: Adjustments) -> Tensor:
    """Apply the rows' changes: logits [n, vocab] to float32 [n, vocab], a copy.

    The order is biases and masks, repetition, frequency and presence, watermark, bad words, allowed
    ids, grammar.
    """
    kernels = sampling_kernels(logits.device)
    copied, penalise, mark, allow = (
        (_copied, _penalise_rows, _mark, _allow)
        if kernels is None
        else (kernels.copied, kernels.penalise, kernels.mark, kernels.allow)
    )
    result = copied(logits)
    if changes.biases is not None:
        _bias(result, changes.biases)
    if changes.penalties is not None:
        penalise(result, changes.penalties)
    if changes.watermarks is not None:
        mark(result, changes.watermarks)
    if changes.bad_words is not None:
        exclude(result, changes.bad_words)
    for allowed in (changes.listed, changes.allowed):
        if allowed is not None:
            allow(result, allowed)
    return result


def _copied(logits: Tensor) -> Tensor:
    return logits.to(torch.float32, copy=True)


def _mark(logits: Tensor, marked: Watermarks) -> None:
    """Raise the green tokens; changes `logits`."""
    logits[marked.rows] += GREEN_BONUS * green(marked.previous, logits.shape[-1])


def _allow(logits: Tensor, allowed: Allowed) -> None:
    """Mask the tokens that the rows' masks do not allow; changes `logits`."""
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    # By bytes, not words: the unpacked bits then take one byte per token instead of four.
    barred = (((allowed.words.view(torch.uint8)[:, :, None] >> bits) & 1) == 0).flatten(1)
    # Columns that no token of the tokenizer has are never allowed.
    barred = pad(barred, (0, logits.shape[-1] - barred.shape[-1]), value=True)
    logits[allowed.rows] = logits[allowed.rows].masked_fill(barred, float("-inf"))


def _bias(logits: Tensor, biases: Biases) -> None:
    """Add the biases to `logits`; ids beyond the vocabulary are ignored."""
    # Ignored on the device, as adding 0: a mask of ids would make the host wait for its size.
    last = logits.shape[-1] - 1
    values = biases.values.masked_fill(biases.ids > last, 0.0)
    logits.index_put_((biases.rows, biases.ids.clamp(max=last)), values, accumulate=True)


def _penalise_rows(logits: Tensor, penalties: Penalties) -> None:
    """Penalise the tokens that rows have already; changes `logits`."""
    logits[penalties.rows] = _penalise(logits[penalties.rows], penalties)


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
    """Return each row's tokens, padded with vocab_size, and which are output: [p, longest].

    vocab_size is a column of its own in `_counts`, which is dropped.
    """
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

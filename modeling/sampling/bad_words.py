"""Bad words: tokens that must not follow certain others, as transformers' NoBadWords processor.

The tokens before may be the prompt's. They are read on the device: the step that samples the newest
one may still be in flight.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from configs.wire.sampling import Sampling
from modeling.sampling.history import TokenHistory
from modeling.transfer import ints, to_device


@dataclass(frozen=True)
class BadWords:
    """The k words that rows may be about to end; all tensors are int64.

    rows: [k], indices into the step's sampling rows.
    buffer: as in TokenHistory.
    targets: [k], the index in `buffer` of the row's next token.
    before: [k, longest], the word's tokens before its last one, right-aligned after -1s.
    last: [k].
    """

    rows: Tensor
    buffer: Tensor
    targets: Tensor
    before: Tensor
    last: Tensor


def bad_words(
    params: Sequence[Sampling],
    positions: Sequence[int],
    history: TokenHistory,
    device: torch.device,
) -> BadWords | None:
    """Gather the words that are not longer than their rows; None if there are none."""
    found = [
        (row, word)
        for row, p in enumerate(params)
        for word in p.bad_words
        if len(word) <= positions[row] + 1
    ]
    if not found:
        return None
    rows = np.array([row for row, _ in found], dtype=np.int64)
    before = np.full((len(found), max(len(word) for _, word in found) - 1), -1, dtype=np.int64)
    for index, (_, word) in enumerate(found):
        before[index, before.shape[1] - len(word) + 1 :] = word[:-1]
    return BadWords(
        rows=to_device(rows, device),
        buffer=history.buffer,
        targets=to_device(history.targets[rows], device),
        before=to_device(before, device),
        last=ints([word[-1] for _, word in found], device),
    )


def exclude(logits: Tensor, words: BadWords) -> None:
    """Mask the last token of each word that a row is about to end: logits [n, vocab], changed."""
    length = words.before.shape[1]
    at = words.targets[:, None] + torch.arange(-length, 0, device=logits.device)
    ends = words.buffer[at.clamp(min=0)]
    ended = ((ends == words.before) | (words.before < 0)).all(dim=1)
    # A token beyond the head's vocabulary is never sampled anyway.
    inside = words.last < logits.shape[-1]
    values = torch.zeros_like(words.last, dtype=torch.float32)
    values = values.masked_fill(ended & inside, float("-inf"))
    last = words.last.clamp(max=logits.shape[-1] - 1)
    logits.index_put_((words.rows, last), values, accumulate=True)

"""What heads guess behind a step's samples, from the hidden states that those were sampled from.

A row with a draft has several samples; heads guess behind the last right one, which only the device
knows when the step is launched.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from configs.wire.plan import StepRow
from configs.wire.sampling import Sampling
from modeling.adapters.bank import AdapterBank
from modeling.adapters.projection import ProjectionKind
from modeling.adapters.token_rows import groups_of
from modeling.models.medusa import MedusaHeads
from modeling.runner.block_tables import Ints
from modeling.runner.input_batch import StepLayout
from modeling.sampling.noise import noise_keys
from modeling.sampling.sampler import sample_tokens
from modeling.sampling.tensors import SamplingTensors, sampling_tensors
from modeling.transfer import pack_to_device


@dataclass(frozen=True)
class GuessedRows:
    """What heads guess: int64 [m, count] for m rows that sample. rows: whether each row does."""

    tokens: Tensor
    rows: Sequence[bool]

    def by_row(self, copied: Tensor) -> list[list[int]]:
        """Return each row's guesses, [] for rows that do not sample; copied: `tokens`."""
        found = iter(copied.tolist())
        return [next(found) if samples else [] for samples in self.rows]


class Guesser:
    """The model's heads, and those of adapters in their stead."""

    def __init__(self, heads: MedusaHeads, bank: AdapterBank) -> None:
        self.heads = heads
        self._bank = bank
        kinds = [projection.kind for projection in bank.projections]
        kind = ProjectionKind.DRAFT_HEADS
        self._index = kinds.index(kind) if kind in kinds else -1

    def logits(self, x: Tensor, slots: Ints, count: int) -> Tensor:
        """[m, width] to [m, count, vocab_size]; slots: each row's adapter (-1: base)."""
        heads = self.heads
        logits = heads.logits(heads.states(x, count))
        for group in groups_of(self._bank, slots, self._index):
            own = _adapted(x[group.rows], group.adapter.matrix(self._index), count)
            logits[group.rows] = heads.shared_logits(own)
        return logits


def _adapted(x: Tensor, rows: Tensor, count: int) -> Tensor:
    """[m, width] to [m, count, width] by heads of version 2; rows: their page."""
    width = x.shape[1]
    parts = rows[: count * (width + 1)].view(count, width + 1, width)
    found = torch.stack([F.linear(x, part[:width], part[width]) for part in parts], dim=1)
    return x.unsqueeze(1) + F.silu(found)


class RightSamples(NamedTuple):
    """The last right sample of each row that samples, m rows.

    at: int64 [m], among the step's samples. keys: int32 [m, count, 2], the noise with which the
    model will sample the `count` positions behind it. sampling: the rows' parameters. rows: of each
    row of the plan, whether it samples.
    """

    at: Tensor
    keys: Tensor
    sampling: Sequence[Sampling]
    rows: Sequence[bool]


def right_samples(
    count: int, rows: Sequence[StepRow], layout: StepLayout, sampled: Tensor
) -> RightSamples:
    """Find them; sampled: int64 [s], the step's samples."""
    firsts, drafts = _drafts([row for row in rows if row.num_samples])
    keys = _keys(layout.sampling, layout.sample_positions, count)
    first, draft, key = pack_to_device([firsts, drafts, keys], sampled.device)
    last = first
    if draft.shape[1]:
        behind = first.unsqueeze(1) + torch.arange(draft.shape[1], device=sampled.device)
        right = sampled[behind.clamp(max=len(sampled) - 1)] == draft
        last = first + right.cumprod(1).sum(1)
    own = [layout.sampling[at] for at in firsts]
    return RightSamples(last, key[last], own, [row.num_samples > 0 for row in rows])


def draw(logits: Tensor, right: RightSamples, first: int = 0) -> Tensor:
    """Draw tokens int64 [m, n] from logits [m, n, vocab_size]; first: position of the first."""
    shape = logits.shape[:2]
    params = [each for each in right.sampling for _ in range(shape[1])]
    random = sampling_tensors(params, [0] * len(params), logits.device).random
    if random is not None:
        keys = right.keys[:, first : first + shape[1]].flatten(0, 1)
        random = replace(random, keys=keys[random.rows])
    return sample_tokens(logits.flatten(0, 1), SamplingTensors(random, -1)).tokens.view(shape)


def guess(
    guesser: Guesser,
    count: int,
    rows: Sequence[StepRow],
    slots: Ints,
    layout: StepLayout,
    hidden: Tensor,
    sampled: Tensor,
) -> GuessedRows:
    """Guess up to `count` tokens behind each row's last right sample.

    slots: the rows' adapters, -1 for the base model. hidden: [s, width], from which the step's s
    tokens were `sampled`, int64 [s]. Noise is that with which the model will sample there.
    """
    count = min(count, guesser.heads.count)
    right = right_samples(count, rows, layout, sampled)
    logits = guesser.logits(hidden[right.at], slots[np.array(right.rows)], count)
    return GuessedRows(draw(logits, right), right.rows)


def _drafts(rows: Sequence[StepRow]) -> tuple[Ints, Ints]:
    """Return each row's first sample and its draft, [m] and [m, longest]; -1 behind its end."""
    counts = np.array([row.num_samples for row in rows], dtype=np.int64)
    longest = max((len(row.drafts) for row in rows), default=0)
    drafts = np.full((len(rows), longest), -1, dtype=np.int64)
    for own, row in zip(drafts, rows, strict=True):
        own[: len(row.drafts)] = row.drafts
    return counts.cumsum() - counts, drafts


def _keys(params: Sequence[Sampling], positions: Sequence[int], count: int) -> np.ndarray:
    """Return the noise keys of `count` positions behind each sample's, int32 [s, count, 2]."""
    seeds = np.array([each.seed for each in params], dtype=np.uint64).repeat(count)
    at = np.add.outer(np.array(positions, dtype=np.int64), np.arange(1, count + 1)).ravel()
    return noise_keys(seeds, at).reshape(-1, count, 2)

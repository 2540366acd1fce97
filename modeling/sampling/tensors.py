"""A step's sampling parameters as tensors; None where no row needs them, which skips the work."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from configs.wire.sampling import Sampling
from modeling.sampling.adjustments import Adjustments, adjustments
from modeling.sampling.history import TokenHistory
from modeling.sampling.noise import noise_keys
from modeling.sampling.rows import RandomRows
from modeling.sampling.warpers import (
    LARGEST_TEMPERATURE,
    SMALLEST_TEMPERATURE,
    FilteredRows,
    filter_columns,
    guess_of,
)
from modeling.transfer import pack_to_device


@dataclass(frozen=True)
class SamplingTensors:
    """How each of a step's n sampling rows samples its token.

    random: None for a greedy batch.
    num_top: alternatives to report with each logprob, the most of any row; -1 without logprobs.
    adjustments: None where no row changes the model's logits.
    """

    random: RandomRows | None
    num_top: int
    adjustments: Adjustments | None = None

    @property
    def plain(self) -> bool:
        """Return whether each row only needs its best logit."""
        return self.random is None and self.num_top < 0 and self.adjustments is None


def sampling_tensors(
    params: Sequence[Sampling],
    positions: Sequence[int],
    device: torch.device,
    history: TokenHistory | None = None,
) -> SamplingTensors:
    """Gather the parameters of a step's sampling rows.

    positions: of each row's next token, 0 for the first token of the prompt. history: None if no
    row's logits are adjusted.
    """
    num_top = max((p.logprobs for p in params), default=-1)
    adjusted = None
    if history is not None:
        adjusted = adjustments(params, positions, history, device)
    rows = [index for index, p in enumerate(params) if p.temperature > 0]
    if not rows:
        return SamplingTensors(None, num_top, adjusted)
    random_params = [params[index] for index in rows]
    random = _random_rows(rows, random_params, [positions[index] for index in rows], device)
    return SamplingTensors(random, num_top, adjusted)


def _random_rows(
    rows: Sequence[int], params: Sequence[Sampling], positions: Sequence[int], device: torch.device
) -> RandomRows:
    """Gather the random rows' parameters, in one transfer."""
    seeds = np.array([p.seed for p in params], dtype=np.uint64)
    temperature = np.array([p.temperature for p in params])
    at = [index for index, p in enumerate(params) if p.filtered]
    filters = np.full(len(params), -1, dtype=np.int32)
    filters[at] = np.arange(len(at))
    filtered = [params[index] for index in at]
    own, inverse, keys, owners, kept, top_k, top_p, least, typical, guessed = pack_to_device(
        [
            np.array(rows, dtype=np.int64),
            (1 / temperature.clip(SMALLEST_TEMPERATURE, LARGEST_TEMPERATURE)).astype(np.float32),
            noise_keys(seeds, np.array(positions, dtype=np.int64)),
            filters,
            np.array(at, dtype=np.int64),
            *filter_columns(filtered),
        ],
        device,
    )
    found = None
    if at:
        ranks = any(p.top_k or p.top_p < 1 for p in filtered)
        has_typical = any(p.typical_p < 1 for p in filtered)
        guesses = frozenset(map(guess_of, filtered))
        found = FilteredRows(
            kept, top_k, top_p, least, typical, guessed, ranks, has_typical, guesses
        )
    return RandomRows(own, inverse, keys, owners, found)

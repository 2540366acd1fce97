"""A step's sampling parameters as tensors; None where no row needs them, which skips the work."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from configs.wire.sampling import Sampling
from modeling.sampling.adjustments import Adjustments, adjustments
from modeling.sampling.history import TokenHistory
from modeling.sampling.noise import noise_keys
from modeling.sampling.warpers import LARGEST_TEMPERATURE, FilteredRows, filtered_rows
from modeling.transfer import floats, ints, to_device


@dataclass(frozen=True)
class RandomRows:
    """The rows with a temperature; each tensor is [m] for m rows.

    rows: int64 indices into the step's sampling rows. temperature: float32, > 0.
    keys: int32 [m, 2], see noise_keys. filtered: None where no row drops tokens.
    """

    rows: Tensor
    temperature: Tensor
    keys: Tensor
    filtered: FilteredRows | None


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
    keys = noise_keys(
        np.array([p.seed for p in random_params], dtype=np.uint64),
        np.array([positions[index] for index in rows], dtype=np.int64),
    )
    random = RandomRows(
        rows=ints(rows, device),
        temperature=floats(
            [min(p.temperature, LARGEST_TEMPERATURE) for p in random_params], device
        ),
        keys=to_device(keys, device),
        filtered=filtered_rows(random_params, device),
    )
    return SamplingTensors(random, num_top, adjusted)

"""A step's sampling parameters as tensors; None where no row needs them, to skip the work."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from configs.wire.sampling import Sampling
from modeling.sampling.adjustments import Adjustments, adjustments
from modeling.sampling.history import TokenHistory
from modeling.sampling.noise import noise_keys
from modeling.sampling.warpers import LARGEST_TEMPERATURE
from modeling.transfer import to_device


@dataclass(frozen=True)
class FilteredRows:
    """The random rows that drop tokens; each tensor is [f] for f rows, None if off in all rows.

    rows: int64 indices into the random rows. top_k: int64, TOP_K_OFF where off.
    top_p, min_p, typical_p: float32; 1, 0 and 1 where off.
    """

    rows: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    typical_p: Tensor | None


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


TOP_K_OFF = 2**31 - 1


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
        rows=_tensor(rows, np.int64, device),
        temperature=_tensor(
            [min(p.temperature, LARGEST_TEMPERATURE) for p in random_params], np.float32, device
        ),
        keys=to_device(keys, device),
        filtered=_filtered(random_params, device),
    )
    return SamplingTensors(random, num_top, adjusted)


def _filtered(params: Sequence[Sampling], device: torch.device) -> FilteredRows | None:
    rows = [index for index, p in enumerate(params) if p.filtered]
    if not rows:
        return None
    filtered = [params[index] for index in rows]
    top_k = None
    if any(p.top_k for p in filtered):
        top_k = _tensor([p.top_k or TOP_K_OFF for p in filtered], np.int64, device)
    return FilteredRows(
        rows=_tensor(rows, np.int64, device),
        top_k=top_k,
        top_p=_floats([p.top_p for p in filtered], 1.0, device),
        min_p=_floats([p.min_p for p in filtered], 0.0, device),
        typical_p=_floats([p.typical_p for p in filtered], 1.0, device),
    )


def _floats(values: list[float], off: float, device: torch.device) -> Tensor | None:
    """Return one value a row; None where all are off."""
    if all(value == off for value in values):
        return None
    return _tensor(values, np.float32, device)


def _tensor(
    values: Sequence[float], dtype: type[np.int64 | np.float32], device: torch.device
) -> Tensor:
    return to_device(np.array(values, dtype=dtype), device)

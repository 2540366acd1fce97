"""A step's sampling parameters as tensors; None where no row asks, so that work is skipped."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from configs.sampling import Sampling
from modeling.sampling.noise import noise_keys
from modeling.transfer import to_device


@dataclass(frozen=True)
class FilteredRows:
    """Those of the random rows that ask for top-k or top-p; everything is [f] for f of them.

    rows: int64 indices into the random rows. top_k: int64, TOP_K_OFF where off; None if off
    everywhere. top_p: float32, 1 where off; None if off everywhere.
    """

    rows: Tensor
    top_k: Tensor | None
    top_p: Tensor | None


@dataclass(frozen=True)
class RandomRows:
    """The rows that sample; everything is [m] for m of them.

    rows: int64 indices into the step's sampling rows. temperature: float32, > 0.
    keys: int32 [m, 2], see noise_keys.
    """

    rows: Tensor
    temperature: Tensor
    keys: Tensor
    filtered: FilteredRows | None


@dataclass(frozen=True)
class SamplingTensors:
    """How each of a step's n sampling rows chooses its token.

    random: None for a greedy batch. num_top: how many alternatives to report with each
    logprob, the most that any row asks; -1 when no row asks for logprobs.
    """

    random: RandomRows | None
    num_top: int


TOP_K_OFF = 2**31 - 1


def sampling_tensors(
    params: Sequence[Sampling], positions: Sequence[int], device: torch.device
) -> SamplingTensors:
    """Gather the parameters of a step's sampling rows.

    positions: of each row's token to be, 0 for the first token of the prompt.
    """
    num_top = max((p.logprobs for p in params), default=-1)
    rows = [index for index, p in enumerate(params) if p.temperature > 0]
    if not rows:
        return SamplingTensors(None, num_top)
    chosen = [params[index] for index in rows]
    keys = noise_keys(
        np.array([p.seed for p in chosen], dtype=np.uint64),
        np.array([positions[index] for index in rows], dtype=np.int64),
    )
    random = RandomRows(
        rows=_tensor(rows, np.int64, device),
        temperature=_tensor([p.temperature for p in chosen], np.float32, device),
        keys=to_device(keys, device),
        filtered=_filtered(chosen, device),
    )
    return SamplingTensors(random, num_top)


def _filtered(params: Sequence[Sampling], device: torch.device) -> FilteredRows | None:
    rows = [index for index, p in enumerate(params) if p.top_k or p.top_p < 1]
    if not rows:
        return None
    top_k = top_p = None
    if any(params[index].top_k for index in rows):
        top_k = _tensor([params[i].top_k or TOP_K_OFF for i in rows], np.int64, device)
    if any(params[index].top_p < 1 for index in rows):
        top_p = _tensor([params[index].top_p for index in rows], np.float32, device)
    return FilteredRows(_tensor(rows, np.int64, device), top_k, top_p)


def _tensor(
    values: Sequence[float], dtype: type[np.int64 | np.float32], device: torch.device
) -> Tensor:
    return to_device(np.array(values, dtype=dtype), device)

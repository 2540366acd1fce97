"""What changes a step's logits before anything is chosen, as tensors; None where no row asks."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from configs.wire.sampling import Sampling
from modeling.sampling.history import TokenHistory
from modeling.transfer import to_device

_LARGEST_REPETITION = 1e30
"""A penalty beyond it, or below its inverse, means the same, and leaves logits finite."""


@dataclass(frozen=True)
class Biases:
    """Single logits that are moved: [b] for b of them; minus infinity masks a token.

    rows: int64 indices into the step's sampling rows. ids: int64. values: float32.
    """

    rows: Tensor
    ids: Tensor
    values: Tensor


@dataclass(frozen=True)
class Penalties:
    """The rows whose own tokens change their logits; everything is [p] for p of them.

    rows: int64 indices into the step's sampling rows. starts, lengths, prompt_lengths: int64,
    where a row's tokens begin in `buffer` and how many they are. longest: the largest length.
    repetition, frequency, presence: float32; 1, 0 and 0 are off.
    """

    rows: Tensor
    buffer: Tensor
    starts: Tensor
    lengths: Tensor
    prompt_lengths: Tensor
    longest: int
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


@dataclass(frozen=True)
class Watermarks:
    """The rows that bear a watermark: int64 indices and the tokens that they go on from, [w]."""

    rows: Tensor
    previous: Tensor


@dataclass(frozen=True)
class Allowed:
    """The rows whose answers have a schema: int64 indices [g], and int32 [g, words] bits."""

    rows: Tensor
    words: Tensor


@dataclass(frozen=True)
class Adjustments:
    """All changes of a step's logits; at least one is there."""

    biases: Biases | None
    penalties: Penalties | None
    watermarks: Watermarks | None
    allowed: Allowed | None = None


def adjustments(
    params: Sequence[Sampling],
    positions: Sequence[int],
    history: TokenHistory,
    device: torch.device,
) -> Adjustments | None:
    """Gather what the sampling rows ask for; positions: as in sampling_tensors."""
    asking = [row for row, p in enumerate(params) if p.adjusted]
    if not asking:
        return None
    generated = history.generated(positions).tolist()
    biases = _biases(params, asking, generated, device)
    penalties = _penalties(params, positions, history, device)
    watermarks = _watermarks(params, history, device)
    allowed = _allowed(params, history, device)
    if biases is None and penalties is None and watermarks is None and allowed is None:
        return None
    return Adjustments(biases, penalties, watermarks, allowed)


def _biases(
    params: Sequence[Sampling], asking: Sequence[int], generated: list[int], device: torch.device
) -> Biases | None:
    moved = [params[row].logit_bias + _masks(params[row], generated[row]) for row in asking]
    counts = [len(pairs) for pairs in moved]
    if not any(counts):
        return None
    # Flattened by the library's loops: there may be 300 biases in every row of every step.
    flat = np.array(list(chain.from_iterable(chain.from_iterable(moved)))).reshape(-1, 2)
    return Biases(
        rows=to_device(np.repeat(np.array(asking, dtype=np.int64), counts), device),
        ids=to_device(flat[:, 0].astype(np.int64), device),
        values=to_device(flat[:, 1].astype(np.float32), device),
    )


def _masks(asked: Sampling, generated: int) -> tuple[tuple[int, float], ...]:
    """What the row must not choose yet."""
    if generated >= asked.masked_tokens:
        return ()
    return tuple((id, float("-inf")) for id in asked.masked_ids)


def _penalties(
    params: Sequence[Sampling],
    positions: Sequence[int],
    history: TokenHistory,
    device: torch.device,
) -> Penalties | None:
    rows = [row for row, p in enumerate(params) if p.penalised]
    if not rows:
        return None
    chosen = [params[row] for row in rows]
    lengths = np.array(positions, dtype=np.int64)[rows]
    return Penalties(
        rows=_ints(rows, device),
        buffer=history.buffer,
        starts=to_device(history.targets[rows] - lengths, device),
        lengths=to_device(lengths, device),
        prompt_lengths=to_device(history.prompt_lengths[rows], device),
        longest=int(lengths.max()),
        repetition=_floats([_bounded(p.repetition_penalty) for p in chosen], device),
        frequency=_floats([p.frequency_penalty for p in chosen], device),
        presence=_floats([p.presence_penalty for p in chosen], device),
    )


def _bounded(repetition: float) -> float:
    return min(max(repetition, 1 / _LARGEST_REPETITION), _LARGEST_REPETITION)


def _watermarks(
    params: Sequence[Sampling], history: TokenHistory, device: torch.device
) -> Watermarks | None:
    rows = [row for row, p in enumerate(params) if p.watermark]
    if not rows:
        return None
    newest = to_device(history.targets[rows] - 1, device)
    return Watermarks(_ints(rows, device), history.buffer[newest])


def _allowed(
    params: Sequence[Sampling], history: TokenHistory, device: torch.device
) -> Allowed | None:
    """Ask the grammars, which wait for the step before."""
    rows = [row for row, p in enumerate(params) if p.constraint]
    if not rows or history.grammars is None:
        return None
    words = history.grammars.masks(history.batch_slots[rows].tolist(), device)
    return Allowed(_ints(rows, device), words)


def _ints(values: Sequence[int], device: torch.device) -> Tensor:
    return to_device(np.array(values, dtype=np.int64), device)


def _floats(values: Sequence[float], device: torch.device) -> Tensor:
    return to_device(np.array(values, dtype=np.float32), device)

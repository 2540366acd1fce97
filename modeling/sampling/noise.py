"""Noise that depends on (seed, position, vocabulary id) alone, so that batches never change it.

A counter-based generator: nothing is carried from one draw to the next. The host mixes seed
and position into 64 bits a row; the device mixes those with every vocabulary id.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from modeling.sampling.exact import minus_log1m

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2**64 / golden ratio: the increment of splitmix64 (Steele et al., OOPSLA 2014)."""


def splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix 64-bit words one to one; each output bit depends on every input bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def noise_keys(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.int32]:
    """Return two 32-bit keys for each row: [n] and [n] to [n, 2].

    Seed and position are mixed one after the other, so that seed + 1 at position p shares
    nothing with seed at position p + 1.
    """
    mixed = splitmix64(splitmix64(seeds + GOLDEN) ^ positions.astype(np.uint64)) + GOLDEN
    return splitmix64(mixed).view(np.int32).reshape(-1, 2)


def exponential_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Return exponential noise of mean one: int32 keys [n, 2] to float32 [n, vocab_size], all > 0.

    E = -ln(1 - v), v = (h + 0.5) / 2**32 with h the hash of (key, vocabulary id).
    """
    h = vocabulary_hash(keys, vocab_size).to(torch.float32)
    # Signed to unsigned. A small h, where the smallest noise lives, stays exact in float32.
    v = (torch.where(h < 0, h + 2.0**32, h) + 0.5) * 2.0**-32
    # float32 rounds the largest v to 1, and ln 0 is infinite.
    return minus_log1m(v.clamp_(max=1 - 2.0**-24))


def vocabulary_hash(keys: Tensor, vocab_size: int) -> Tensor:
    """Mix each row's keys with each vocabulary id: int32 [n, 2] to int32 [n, vocab_size].

    Two rounds of lowbias32 (C. Wellons' hash prospector), keyed before each.
    """
    ids = torch.arange(vocab_size, dtype=torch.int32, device=keys.device)
    # Overflow of int32 wraps on every device, as lowbias32 wants it of unsigned words.
    h = (ids * _signed(0x9E3779B1))[None, :] ^ keys[:, :1]
    for round_key in (keys[:, 1:], None):
        h = (h ^ _shift(h, 16)) * _signed(0x21F0AAAD)
        h = (h ^ _shift(h, 15)) * _signed(0xD35A2D97)
        h = h ^ _shift(h, 15)
        if round_key is not None:
            h = h + round_key
    return h


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift int32 right without carrying the sign along."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _signed(word: int) -> int:
    """Return the int32 with the bits of an unsigned 32-bit integer."""
    return word - 2**32 if word >= 2**31 else word

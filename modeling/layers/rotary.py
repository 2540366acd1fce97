"""Rotary position embedding: rotate-half layout, angles in float32 as in transformers."""

import math

import torch
from torch import Tensor

from configs.architectures.llama import Rope, RopeType


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """float32 [head_dim / 2] on the CPU: theta^(-2i / head_dim), scaled as rope.type says."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.type is RopeType.DEFAULT:
        return plain
    if rope.type is RopeType.LINEAR:
        return plain / rope.factor
    return _llama3(plain, rope)


def _llama3(plain: Tensor, rope: Rope) -> Tensor:
    """Llama 3.1's rule: long waves are stretched by factor, short ones kept, the rest blended."""
    context = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / plain
    blend = (context / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain


class Rotary:
    """Cosines and sines of a step, and their use on queries and keys."""

    def __init__(self, rope: Rope, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """Angles are computed for each step's positions, so no length is fixed here."""
        self._frequencies = inverse_frequencies(rope, head_dim).to(device)
        self._dtype = dtype

    def angles(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [tokens, 1, head_dim], for int positions [tokens].

        sin bears the signs of the rotation, so that rotating needs no negation.
        """
        angles = position_ids.unsqueeze(-1).float() * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        cos = torch.cat((cos, cos), dim=-1).to(self._dtype).unsqueeze(1)
        return cos, torch.cat((-sin, sin), dim=-1).to(self._dtype).unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [tokens, heads, head_dim] by the step's angles: pairs are (i, i + head_dim / 2)."""
    low, high = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((high, low), dim=-1), sin)

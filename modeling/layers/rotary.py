"""Rotary position embedding, with angles in float32 as in transformers.

Positions say which set of frequencies they take: p + s * POSITIONS_PER_SET is position p by set s.
So rows of a step take different sets, and a CUDA graph holds for any of them.
"""

import math

import torch
from torch import Tensor

from configs.architectures.rope import POSITIONS_PER_SET, Rope, RopeType
from modeling.layers.angles import Angles
from modeling.layers.fused import fused_ops


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """float32 [sets, rope.width(head_dim) / 2] on the CPU: theta^(-2i / width), scaled by type.

    sets: LONGROPE's two (short, long), else one. width: the rotated part of a head. Products and
    quotients are taken in transformers' order: at a far position the last bit of a
    frequency makes a visible angle.
    """
    width = rope.width(head_dim)
    exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    if rope.type is RopeType.LONGROPE:
        factors = torch.tensor((rope.short_factors, rope.long_factors))
        return 1.0 / (factors * rope.theta**exponents)
    return _one_set(rope, width, exponents).unsqueeze(0)


def _one_set(rope: Rope, width: int, exponents: Tensor) -> Tensor:
    """The frequencies of the types that have one set, from the pairs' exponents."""
    if rope.type is RopeType.DYNAMIC:
        return 1.0 / _dynamic_theta(rope, width) ** exponents
    steps = rope.theta**exponents
    if rope.type is RopeType.LINEAR:
        return 1.0 / steps / rope.factor
    if rope.type is RopeType.LLAMA3:
        return _llama3(1.0 / steps, rope)
    return _yarn(steps, rope) if rope.type is RopeType.YARN else 1.0 / steps


def _llama3(plain: Tensor, rope: Rope) -> Tensor:
    """Llama 3.1's rule: long waves are stretched by factor, short ones kept, the rest blended."""
    context, low, high = (
        rope.original_max_position_embeddings,
        rope.low_freq_factor,
        rope.high_freq_factor,
    )
    wavelength = 2 * math.pi / plain
    # In transformers' order of operations, for equal bits.
    kept = torch.where(wavelength > context / low, plain / rope.factor, plain)
    blend = (context / wavelength - low) / (high - low)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    is_between = (wavelength >= context / high) & (wavelength <= context / low)
    return torch.where(is_between, blended, kept)


def _yarn(steps: Tensor, rope: Rope) -> Tensor:
    """YaRN's rule (arXiv:2309.00071): as Llama 3's, with the blend linear in the pair's index.

    Pairs with more than beta_fast periods in the trained length are kept, those with fewer than
    beta_slow are stretched by factor.
    """
    width = 2 * len(steps)

    def pair_turning(times: float) -> float:
        ratio = rope.original_max_position_embeddings / (times * 2 * math.pi)
        return width * math.log(ratio) / (2 * math.log(rope.theta))

    first, last = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    span = last - first or 0.001  # transformers' own guard against a step of no width
    kept = 1 - ((torch.arange(width // 2).float() - first) / span).clamp(0.0, 1.0)
    return 1.0 / (rope.factor * steps) * (1 - kept) + 1.0 / steps * kept


def _dynamic_theta(rope: Rope, width: int) -> float:
    """NTK-aware theta for the fixed length; the plain one up to the trained length."""
    stretch = max((rope.fixed_length or 0) / rope.original_max_position_embeddings, 1.0)
    growth = rope.factor * stretch - (rope.factor - 1)
    exponent: float = width / (width - 2)
    return float(rope.theta * growth**exponent)


class Rotary:
    """Cosines and sines of a step, and their use on queries and keys."""

    def __init__(self, rope: Rope, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """Angles are computed for each step's positions; only frequencies lie in a table."""
        self._frequencies = inverse_frequencies(rope, head_dim).to(device)
        self._scale = rope.attention_factor
        self._dtype = dtype
        self._fused = fused_ops(device)

    def angles(self, position_ids: Tensor) -> Angles:
        """Angles of int positions [tokens] with their sets, scaled by the attention_factor."""
        if self._fused is not None and position_ids.dim() == 1:
            numbers = (self._frequencies, self._scale, self._dtype)
            return Angles(*self._fused.angles(position_ids, *numbers))
        sets = position_ids // POSITIONS_PER_SET
        position_ids = position_ids - sets * POSITIONS_PER_SET
        angles = position_ids.unsqueeze(-1).float() * self._frequencies[sets]
        cos, sin = angles.cos(), angles.sin()
        if self._scale != 1.0:
            cos, sin = cos * self._scale, sin * self._scale
        cos = torch.cat((cos, cos), dim=-1).to(self._dtype).unsqueeze(1)
        return Angles(cos, torch.cat((-sin, sin), dim=-1).to(self._dtype).unsqueeze(1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool = False) -> Tensor:
    """Rotate heads [tokens, heads, head_dim] by the step's `Angles`.

    What lies beyond the angles' width in a head stays as it is.
    """
    width = cos.shape[-1]
    if width < x.shape[-1]:
        turned = rotate(x[..., :width], cos, sin, neighbours)
        return torch.cat((turned, x[..., width:]), dim=-1)
    if neighbours:
        pairs = x.reshape(*x.shape[:-1], -1, 2)
        turned = rotate(pairs.transpose(-1, -2).flatten(-2), cos, sin)
        return turned.view(*x.shape[:-1], 2, -1).transpose(-1, -2).flatten(-2)
    # The signs are in sin: out = (low cos - high sin, high cos + low sin) without a negation.
    low, high = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((high, low), dim=-1), sin)

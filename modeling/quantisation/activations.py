"""Activations in 8 bits: with scales of a token, of some inputs of a token, or of the model.

    fp8 (e4m3)   stored = round(x / scale), scale = largest |x| / 448
    integers     the same with 127.5, and within -128 and 127

in float32, as compressed-tensors computes it. A token's scales come from the token alone, so a row
never depends on its neighbours. Where a layer's inputs are cut over ranks, each rank has scales of
its own.
"""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of e4m3."""

BLOCK = 128
"""Outputs and inputs of a block of fp8 that GPUs multiply; others are served by the reference."""

LARGEST_INT8 = 127.5
"""Half of the range of 8 bits."""

SMALLEST = torch.finfo(torch.float32).eps
"""The scale of zeros."""

SMALLEST_FP4 = 0.125
"""The scale of zeros in nvfp4."""


def range_of(codes: torch.dtype) -> tuple[float, float]:
    """Return what the largest number of a token becomes, and the scale of zeros."""
    return LARGEST_INT8 if codes is torch.int8 else LARGEST, SMALLEST


def scales_of(largest: Tensor, kind: torch.dtype = FP8) -> Tensor:
    """Return the scales of numbers whose largest absolute values these are; kind: of the codes."""
    most, smallest = range_of(kind)
    scales = largest.float() / most
    return torch.where(scales == 0, smallest, scales)


def to_fp8(x: Tensor, scales: Tensor) -> Tensor:
    """Return x / scales in fp8; numbers that are too large become the largest."""
    return (x.float() / scales).clamp(-LARGEST, LARGEST).to(FP8)


def to_codes(x: Tensor, scales: Tensor, kind: torch.dtype) -> Tensor:
    """Return the same in fp8 or int8."""
    if kind is FP8:
        return to_fp8(x, scales)
    return torch.round(x.float() / scales).clamp(-128, 127).to(torch.int8)


def by_token(
    x: Tensor, scale: Tensor | None = None, kind: torch.dtype = FP8
) -> tuple[Tensor, Tensor]:
    """[tokens, in] to codes of that shape and float32 scales [tokens, 1].

    scale: float32 [1] of all tokens, or [tokens, 1]; None: each token's own.
    """
    scales = scales_of(x.abs().amax(dim=-1, keepdim=True), kind) if scale is None else scale
    return to_codes(x, scales, kind), scales


def by_group(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """[tokens, in] to fp8 of that shape and float32 scales [tokens, in / group]."""
    parts = x.reshape(*x.shape[:-1], -1, group)
    scales = scales_of(parts.abs().amax(dim=-1))
    return to_fp8(parts, scales[..., None]).flatten(-2), scales


def rounded_by_token(x: Tensor, scale: Tensor | None = None, kind: torch.dtype = FP8) -> Tensor:
    """Return x in its own type, rounded as `by_token` does."""
    codes, scales = by_token(x, scale, kind)
    return (codes.float() * scales).to(x.dtype)


def rounded_by_group(x: Tensor, group: int) -> Tensor:
    """Return x in its own type, rounded as `by_group` does."""
    codes, scales = by_group(x, group)
    parts = codes.float().view(*scales.shape, group) * scales[..., None]
    return parts.flatten(-2).to(x.dtype)

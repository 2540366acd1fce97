"""Weights of 4 bits (e2m1) of which 16 or 32 inputs of an output share a scale: nvfp4 and mxfp4.

    W[o, i] = table[code[o, i]] * scale[o, i / size]

nvfp4 has scales in fp8 (e4m3) of 16 inputs, and a global scale of the matrix; mxfp4 has powers of
two of 32. Activations may be rounded alike: each group of a token's inputs has a scale of its own.
All is computed in float32, as compressed-tensors does.
"""

from typing import Self

import torch
from torch import Tensor

from modeling.quantisation.activations import LARGEST as LARGEST_FP8
from modeling.quantisation.activations import SMALLEST_FP4, to_fp8
from modeling.quantisation.integers import Groups, IntegerWeight, local_groups
from modeling.quantisation.products import gpu_products

LARGEST = 6.0
"""The largest number of e2m1."""

NVFP4, MXFP4 = 16, 32
"""Inputs that share a scale."""

_HALVES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, LARGEST)
"""What the lowest three bits of a code stand for; the fourth is the sign."""


def table_of_codes(device: torch.device) -> Tensor:
    """Return what each of the 16 codes stands for, float32."""
    return torch.tensor([*_HALVES, *(-half for half in _HALVES)], device=device)


def unpack(packed: Tensor) -> Tensor:
    """Return the codes of bytes, the lower bits first: [..., n] to [..., 2 n]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def to_e2m1(x: Tensor) -> Tensor:
    """Return the nearest number of 4 bits of each number; ties go to even codes."""
    x = x.clamp(-LARGEST, LARGEST)
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.round(x / step) * step


def scales_of(largest: Tensor, global_scale: Tensor | None) -> Tensor:
    """Return the scales of groups whose largest absolute values these are, float32.

    global_scale: by which nvfp4's scales are multiplied before they are stored, [1] or [tokens, 1];
    None: powers of two.
    """
    if global_scale is None:
        # Up to the next power where the largest one would be rounded to it.
        exponents = (largest.float().view(torch.int32) + (1 << 21)) >> 23
        return torch.exp2(((exponents - 2).clamp(min=1) - 127).float())
    # The package divides in the type of the numbers.
    stored = to_fp8(
        (largest / LARGEST).float() * global_scale, torch.ones_like(global_scale)
    ).float()
    return torch.where(stored == 0, SMALLEST_FP4, stored) / global_scale


def scales_of_stored(stored: Tensor, outer: Tensor | None) -> Tensor:
    """Return scales [out, groups] as checkpoints store them in float32.

    stored: of fp8, or uint8, powers of two and 127. outer: float64, what fp8 is multiplied by; None
    for powers.
    """
    if outer is None:
        return torch.exp2(stored.float() - 127)
    # Rounded once, these are the packages' own, who multiply or divide in float32.
    return (stored.double() * outer).float()


def rounded(x: Tensor, size: int, global_scale: Tensor | None) -> Tensor:
    """Return x [tokens, in] in its own type, each group of `size` inputs rounded to 4 bits."""
    parts = x.reshape(*x.shape[:-1], -1, size)
    scales = scales_of(parts.abs().amax(dim=-1), global_scale)[..., None]
    return (to_e2m1(parts.float() / scales) * scales).flatten(-2).to(x.dtype)


class Fp4Weight(IntegerWeight):
    """Codes of e2m1, and what rounds their inputs.

    rounds: whether inputs are rounded. input_global_scale: float32 [1], of nvfp4's inputs. outer:
    float64 [1], what nvfp4's stored scales are multiplied by; None of maps that were joined.
    """

    def __init__(
        self,
        codes: Tensor,
        groups: Groups,
        dtype: torch.dtype,
        rounds: bool = False,
        input_global_scale: Tensor | None = None,
        outer: Tensor | None = None,
    ) -> None:
        """codes: uint8 [out, in], not packed. groups: of powers of two, or of scales of nvfp4."""
        super().__init__(codes, groups, 4, dtype, table_of_codes(codes.device))
        self.rounds = rounds
        self.input_global_scale = (
            None if input_global_scale is None else self.keep(input_global_scale)
        )
        self.outer = None if outer is None else self.keep(outer)

    @property
    def form(self) -> str:
        """Return its name."""
        return "mxfp4" if self.size == MXFP4 else "nvfp4"

    def with_codes(self, codes: Tensor, groups: Groups) -> Self:
        """Return weights of other codes whose inputs are rounded alike."""
        return type(self)(codes, groups, self.dtype, self.rounds, self.input_global_scale)

    def stored_scales(self) -> Tensor:
        """Return the bytes of its scales as checkpoints store them, uint8 [out, groups]."""
        scales = self.scales.t()
        if self.outer is None:
            return (torch.frexp(scales).exponent + 126).to(torch.uint8)
        # Farther from its neighbours than rounding moved it.
        return to_fp8(scales, self.outer.float()).view(torch.uint8)

    def grouped_like(self, other: IntegerWeight) -> bool:
        """Return whether another weight's inputs are grouped and rounded as this one's."""
        assert isinstance(other, Fp4Weight)
        mine, theirs = self.input_global_scale, other.input_global_scale
        alike = self.rounds == other.rounds and (mine is None) == (theirs is None)
        same = mine is None or theirs is None or torch.equal(mine, theirs)
        return alike and same and super().grouped_like(other)

    def inputs(self, x: Tensor) -> Tensor:
        """Return x as the product sees it."""
        if not self.rounds:
            return x
        assert self.size is not None
        gpu = gpu_products(x)
        to_fp4 = rounded if gpu is None else gpu.to_fp4
        return to_fp4(x, self.size, self.input_global_scale)

    def __getitem__(self, rows: slice) -> Tensor:
        """Return some rows in `dtype`; the package makes numbers of bfloat16 for every type."""
        return super().__getitem__(rows).bfloat16().to(self.dtype)


def round_fp4(matrix: Tensor, size: int, rounds: bool) -> Fp4Weight:
    """Round a matrix [out, in], of random weights; rounds: whether its inputs are rounded.

    The inputs' global scale is that of the weights.
    """
    global_scale = None
    if size == NVFP4:
        global_scale = LARGEST_FP8 * LARGEST / matrix.abs().amax().float().clamp(min=1e-9).view(1)
    parts = matrix.view(len(matrix), -1, size)
    scales = scales_of(parts.abs().amax(dim=-1), global_scale)
    numbers = to_e2m1(parts.float() / scales[..., None]).flatten(-2)
    halves = table_of_codes(matrix.device)[: len(_HALVES)]
    codes = torch.searchsorted(halves, numbers.abs().contiguous()) | (numbers < 0).long() << 3
    group_of = torch.arange(matrix.shape[1], device=matrix.device) // size
    groups = local_groups(scales, None, group_of, 0)
    outer = None if global_scale is None else 1 / global_scale.double()
    inputs = global_scale if rounds else None
    return Fp4Weight(codes.to(torch.uint8), groups, matrix.dtype, rounds, inputs, outer)

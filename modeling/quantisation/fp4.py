"""Weights of 4 bits (e2m1) of which 16 or 32 inputs of an output share a scale: nvfp4 and mxfp4.

    W[o, i] = table[code[o, i]] * scale[o, i / size]

nvfp4 has scales in fp8 (e4m3) of 16 inputs, and a global scale of the matrix; mxfp4 has powers of
two of 32. Activations may be rounded alike: each group of a token's inputs has a scale of its own.
All is computed in float32, as compressed-tensors does.
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from modeling.quantisation.activations import LARGEST as LARGEST_FP8
from modeling.quantisation.activations import SMALLEST_FP4, to_fp8
from modeling.quantisation.coded import CodedWeight
from modeling.quantisation.integers import pack as pack_codes
from modeling.quantisation.integers import unpack as unpack_codes
from modeling.quantisation.products import GpuProducts, gpu_products
from sharding.linear_weight import Fp4Scales, LinearWeight, Operands, multiply

LARGEST = 6.0
"""The largest number of e2m1."""

NVFP4, MXFP4 = 16, 32
"""Inputs that share a scale."""

LARGEST_SCALE = 126
"""The largest number of e4m3, as a byte: what follows is no number, or negative."""

MOST_TOKENS = 64
"""That kernels multiply with codes, and not with numbers."""

LARGEST_POWER = 127 + 9
"""The largest stored power of two of which kernels make factors."""

_HALVES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, LARGEST)
"""What the lowest three bits of a code stand for; the fourth is the sign."""


def table_of_codes(device: torch.device) -> Tensor:
    """Return what each of the 16 codes stands for, float32."""
    return torch.tensor([*_HALVES, *(-half for half in _HALVES)], device=device)


def unpack(packed: Tensor) -> Tensor:
    """Return the codes of bytes, the lower bits first: [..., n] to [..., 2 n]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


CHUNK = 128
"""Inputs of which kernels have the codes together, and their scales."""

_QUARTER = CHUNK // 4


def pack(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Put a matrix into the order of kernels.

    codes: uint8 [out, in], to int16 [in / 128, out, 32], as `integers.pack` makes them; zeros
    behind the last input. scales: uint8 [out, groups], to int32 [in / 128, 32 / size, out]: a word
    has those of four quarters of a chunk, the first quarter's lowest; where a quarter has two, they
    are in two words.
    """
    each = max(_QUARTER * scales.shape[1] // codes.shape[1], 1)
    padded = F.pad(codes, (0, -codes.shape[1] % CHUNK))
    whole = F.pad(scales, (0, -scales.shape[1] % (4 * each)))
    quarters = whole.view(len(scales), -1, 4, each).permute(1, 3, 0, 2)
    words = quarters.flatten().view(torch.int32).view(-1, each, len(scales))
    return pack_codes(padded, CHUNK).view(torch.int16), words


def unpack_scales(words: Tensor, groups: int) -> Tensor:
    """Return the scales that `pack` put into words, uint8 [out, groups]."""
    quarters = words.contiguous().unsqueeze(-1).view(torch.uint8)
    return quarters.permute(2, 0, 3, 1).flatten(1)[:, :groups].contiguous()


def numbers_of(codes: Tensor, scales: Tensor, inputs: int, outer: Tensor | None) -> Tensor:
    """Return what `pack` made as numbers of bfloat16, [out, inputs], as packages do in every type.

    outer: float64 [out], what nvfp4's scales are multiplied by.
    """
    size = _QUARTER // scales.shape[1]
    found = unpack_codes(codes.contiguous().view(torch.uint8))[:, :inputs]
    values = table_of_codes(codes.device)[found.int()].view(len(found), inputs // size, size)
    stored = unpack_scales(scales, inputs // size)
    if outer is not None:
        stored, outer = stored.view(torch.float8_e4m3fn), outer[:, None]
    return (values * scales_of_stored(stored, outer)[..., None]).flatten(1).bfloat16()


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


class Fp4Weight(CodedWeight):
    """Codes of e2m1, their scales, and what rounds their inputs.

    codes, scales: see `pack`. size: inputs that share a scale. outer: float64 [out], what nvfp4's
    scales are multiplied by. rounds: whether inputs are rounded. input_global_scale: float32 [1],
    of nvfp4's inputs.
    """

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        inputs: int,
        dtype: torch.dtype,
        outer: Tensor | None = None,
        rounds: bool = False,
        input_global_scale: Tensor | None = None,
    ) -> None:
        """codes, scales: as `pack` makes them."""
        super().__init__((codes.shape[1], inputs), dtype)
        self.codes, self.scales = self.keep(codes), self.keep(scales)
        self.size = _QUARTER // scales.shape[1]
        self.outer = None if outer is None else self.keep(outer)
        self.rounds = rounds
        self.input_global_scale = (
            None if input_global_scale is None else self.keep(input_global_scale)
        )
        is_large = bool((scales.view(torch.uint8) > LARGEST_POWER).any())
        self._in_range = outer is not None or not is_large

    @property
    def form(self) -> str:
        """Return its name."""
        return "mxfp4" if self.size == MXFP4 else "nvfp4"

    def joined(self, others: Sequence[LinearWeight]) -> Self | None:
        """Return one weight of all rows, where all share and round their inputs alike."""
        parts = self.with_alike(others)
        if not parts or not all(self._rounds_like(part) for part in parts):
            return None
        outer: list[Tensor] = [part.outer for part in parts if part.outer is not None]
        return type(self)(
            torch.cat([part.codes for part in parts], dim=1),
            torch.cat([part.scales for part in parts], dim=2),
            self.shape[1],
            self.dtype,
            torch.cat(outer) if outer else None,
            self.rounds,
            self.input_global_scale,
        )

    @property
    def has_kernels(self) -> bool:
        """Whether GPUs have kernels that read its codes."""
        return self.shape[1] % CHUNK == 0

    @property
    def few_tokens(self) -> int:
        """Up to how many tokens kernels are faster than a library with numbers, on an H200."""
        if not self._multiplies_codes:
            return 0
        return MOST_TOKENS if self.size == MXFP4 else MOST_TOKENS // 2

    def product(
        self, gpu: GpuProducts, x: Tensor, bias: Tensor | None, out: Tensor | None
    ) -> Tensor:
        """x W^T + bias by kernels that read codes."""
        operands = self._operands(x)
        if self._multiplies_codes and len(x) <= MOST_TOKENS:
            return gpu.fp4(operands, bias, out)
        return multiply(x, gpu.fp4_numbers(operands), bias, out)

    def joins(self, x: Tensor) -> bool:
        """Return whether a GPU has a kernel for x that an adapter's shrink may join."""
        return len(x) <= self.few_tokens and gpu_products(x) is not None

    def operands(self, x: Tensor) -> Operands:
        """Return x as the product sees it, and the codes."""
        return self._operands(self.inputs(x))

    def inputs(self, x: Tensor) -> Tensor:
        """Return x as the product sees it."""
        if not self.rounds:
            return x
        gpu = gpu_products(x)
        to_fp4 = rounded if gpu is None else gpu.to_fp4
        return to_fp4(x, self.size, self.input_global_scale)

    def __getitem__(self, rows: slice) -> Tensor:
        """Return some rows in `dtype`; packages make numbers of bfloat16 for every type."""
        codes, scales = self.codes[:, rows], self.scales[..., rows]
        outer = None if self.outer is None else self.outer[rows]
        return numbers_of(codes, scales, self.shape[1], outer).to(self.dtype)

    def _operands(self, inputs: Tensor) -> Operands:
        return Operands(inputs, self.codes, fp4=Fp4Scales(self.scales, self.outer))

    @property
    def _multiplies_codes(self) -> bool:
        """Whether kernels multiply a few tokens and make no numbers in memory."""
        return self.has_kernels and self._in_range and self.dtype is torch.bfloat16

    def _rounds_like(self, other: Self) -> bool:
        mine, theirs = self.input_global_scale, other.input_global_scale
        alike = self.rounds == other.rounds and self.size == other.size
        if mine is None or theirs is None:
            return alike and mine is theirs
        return alike and torch.equal(mine, theirs)


def round_fp4(matrix: Tensor, size: int, rounds: bool) -> Fp4Weight:
    """Round a matrix [out, in], of random weights; rounds: whether its inputs are rounded.

    The inputs' global scale is that of the weights.
    """
    global_scale = outer = None
    parts = matrix.view(len(matrix), -1, size)
    if size == NVFP4:
        global_scale = LARGEST_FP8 * LARGEST / matrix.abs().amax().float().clamp(min=1e-9).view(1)
        outer = (1 / global_scale.double()).repeat(len(matrix))
    scales = scales_of(parts.abs().amax(dim=-1), global_scale)
    numbers = to_e2m1(parts.float() / scales[..., None]).flatten(-2)
    halves = table_of_codes(matrix.device)[: len(_HALVES)]
    codes = torch.searchsorted(halves, numbers.abs().contiguous()) | (numbers < 0).long() << 3
    if global_scale is None:
        stored = (torch.frexp(scales).exponent + 126).to(torch.uint8)
    else:
        stored = to_fp8(scales, 1 / global_scale).view(torch.uint8)
    packed = pack(codes.to(torch.uint8), stored)
    inputs = global_scale if rounds else None
    return Fp4Weight(*packed, matrix.shape[1], matrix.dtype, outer, rounds, inputs)

"""The weights of experts as checkpoints store them, and how kernels cut them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modeling.kernels.fp4_tiles import ASSEMBLY
from modeling.layers.kernels.integer_experts import integer_constants


@dataclass(frozen=True)
class StoredCut:
    """How experts of up to `tokens` tokens are cut.

    pairs: of a program. up, down: inner columns, and outputs, of a program. warps, stages: of both.
    """

    tokens: int
    pairs: int
    up: int
    down: int
    warps: int
    stages: int


FP4_CUTS: tuple[StoredCut, ...] = (
    StoredCut(64, 16, 64, 128, 4, 3),
    StoredCut(256, 32, 64, 128, 4, 3),
    StoredCut(2**31, 64, 64, 128, 4, 3),
)
SCALED_CUTS = (
    StoredCut(64, 16, 32, 64, 4, 4),
    StoredCut(256, 32, 64, 128, 4, 3),
    StoredCut(2**31, 64, 64, 128, 4, 3),
)
"""The best of those that a GPU compared for fp8 in blocks."""

INTEGER_CUTS: tuple[StoredCut, ...] = (
    StoredCut(64, 16, 64, 64, 4, 4),
    StoredCut(256, 32, 64, 128, 4, 3),
    StoredCut(2**31, 64, 64, 128, 4, 3),
)
"""Not compared with others yet."""


@dataclass(frozen=True)
class StoredWeight:
    """The matrices [out, in] of a layer's experts.

    codes: of 8 bits fp8 or int8 [experts, out, in], else int16 [experts, in / 128, out, 32].
    scales: of 8 bits float32 [experts, out], or of blocks [experts, out / 128, in / 128]; of e2m1
    int32 [experts, in / 128, 32 / size, out], four bytes each; of integers [experts, groups, out],
    in x's type. bias: [experts, out].
    shape: (out, in).
    size: inputs that share a scale of e2m1: 16 of nvfp4, 32 of mxfp4; 0 in other forms.
    outer: float32 [experts, out], what nvfp4's scales are multiplied by.
    rounds: whether inputs are rounded, to e2m1 or 8 bits. input_scales: float32 [experts], those
    of the checkpoint, by which nvfp4's scales are multiplied; [1] where experts have the same.
    group: inputs of a group of integers: 32, 64, or a multiple of 128; 0 in other forms.
    middle: the zero point of integers, where there are no zeros: uint8 of the scales' shape.
    order: int32 [experts, in], the inputs of integers in the codes' order; None: as they are.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor | None
    shape: tuple[int, int]
    size: int = 0
    outer: Tensor | None = None
    rounds: bool = False
    input_scales: Tensor | None = None
    group: int = 0
    middle: int = 0
    zeros: Tensor | None = None
    order: Tensor | None = None

    @property
    def is_by_block(self) -> bool:
        """Whether it is in fp8 with scales of blocks."""
        return self.codes.dtype.itemsize == 1 and self.scales.dim() == 3

    @property
    def is_by_output(self) -> bool:
        """Whether it is in 8 bits with scales of outputs."""
        return self.codes.dtype.itemsize == 1 and self.scales.dim() == 2

    @property
    def rounds_by_expert(self) -> bool:
        """Whether each expert rounds a token's inputs by itself."""
        return self.input_scales is not None and len(self.input_scales) > 1

    @property
    def is_by_pair(self) -> bool:
        """Whether few tokens are read pair by pair: mxfp4, with inputs as they are."""
        return self.size == 32 and not self.rounds

    @property
    def cuts(self) -> tuple[StoredCut, ...]:
        """How its form is cut, by the number of tokens."""
        if self.codes.dtype.itemsize == 1:
            return SCALED_CUTS
        return INTEGER_CUTS if self.group else FP4_CUTS

    def form(self, dtype: torch.dtype) -> dict[str, Any]:
        """What kernels are compiled for; dtype: of x."""
        own: dict[str, Any] = {"BY_BLOCK": self.is_by_block, "BY_OUTPUT": self.is_by_output}
        own |= {"ROUNDED": self.rounds, "IS_NVFP4": self.outer is not None}
        own |= {"GROUP": self.group, "MIDDLE": self.middle}
        own |= {"HAS_ZEROS": self.zeros is not None, "ORDERED": self.order is not None}
        made = integer_constants(dtype) if self.group else {"RAISED": 0, **ASSEMBLY}
        return {**own, "HAS_BIAS": self.bias is not None, **made}


@dataclass(frozen=True)
class Gate:
    """What an expert computes of gate g and up u, and how their rows lie.

    interleaved: a gate's row is followed by up's; otherwise all rows of up follow those of gate.
    limit, alpha: of (clamp(u) + 1) g' sigmoid(alpha g'), g' = min(g, limit); None: silu(g) u.
    """

    interleaved: bool = False
    limit: float | None = None
    alpha: float = 1.0

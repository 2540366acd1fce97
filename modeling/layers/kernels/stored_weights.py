"""The weights of experts as checkpoints store them, and how kernels cut them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modeling.layers.kernels.integer_experts import integer_constants
from modeling.layers.kernels.mxfp4_experts import ASSEMBLY


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


MXFP4_CUTS: tuple[StoredCut, ...] = (
    StoredCut(64, 16, 64, 64, 4, 4),
    StoredCut(2**31, 64, 64, 128, 4, 3),
)
FP8_CUTS = (
    StoredCut(64, 16, 32, 64, 4, 4),
    StoredCut(256, 32, 64, 128, 4, 3),
    StoredCut(2**31, 64, 64, 128, 4, 3),
)
"""The best of those that a GPU compared."""

INTEGER_CUTS: tuple[StoredCut, ...] = (
    StoredCut(64, 16, 64, 64, 4, 4),
    StoredCut(256, 32, 64, 128, 4, 3),
    StoredCut(2**31, 64, 64, 128, 4, 3),
)
"""Not compared with others yet."""


@dataclass(frozen=True)
class StoredWeight:
    """The matrices [out, in] of a layer's experts.

    codes: fp8 [experts, out, in], else int16 [experts, in / 128, out, 32].
    scales: of fp8 float32 [experts, out / 128, in / 128]; of mxfp4 int32 [experts, in / 128, out],
    four bytes each; of integers [experts, groups, out], in x's type. bias: [experts, out].
    shape: (out, in).
    group: inputs of a group of integers: 32, 64, or a multiple of 128; 0 in other forms.
    middle: the zero point of integers, where there are no zeros: uint8 of the scales' shape.
    order: int32 [experts, in], the inputs of integers in the codes' order; None: as they are.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor | None
    shape: tuple[int, int]
    group: int = 0
    middle: int = 0
    zeros: Tensor | None = None
    order: Tensor | None = None

    @property
    def is_fp8(self) -> bool:
        """Whether it is in fp8."""
        return self.codes.dtype is torch.float8_e4m3fn

    @property
    def is_mxfp4(self) -> bool:
        """Whether it is in mxfp4."""
        return not self.is_fp8 and not self.group

    @property
    def cuts(self) -> tuple[StoredCut, ...]:
        """How its form is cut, by the number of tokens."""
        return FP8_CUTS if self.is_fp8 else INTEGER_CUTS if self.group else MXFP4_CUTS

    def form(self, dtype: torch.dtype) -> dict[str, Any]:
        """What kernels are compiled for; dtype: of x."""
        own = {"FP8": self.is_fp8, "GROUP": self.group, "MIDDLE": self.middle}
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

"""Which products with quantised weights a device has; where it has none, the reference serves."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from sharding.linear_weight import Operands

logger = logging.getLogger("loray.modeling")

SIZES = 16
"""GPUs multiply matrices of 8 bits whose sizes are multiples of it."""

_CAPABILITY = (9, 0)
"""Of GPUs on which torch multiplies fp8 matrices with scales of rows and of blocks."""


@dataclass(frozen=True)
class GpuProducts:
    """x W^T + bias of x [tokens, in]; the result is in `out`, where that is given.

    rounded: (x, scale of all inputs or None, fp8 or int8) to x in codes and its scales [tokens, 1].
    scaled: (x in codes, its scales, codes, scales, bias, out, type of the result), as
    RowScaledWeight has codes and scales.
    fp8_blocks: (x, codes, scales of blocks [out / 128, in / 128], bias, out).
    integers: (x and weights of 4 bits, bias, out).
    fp4: (up to 64 tokens x in bfloat16 and codes of e2m1, bias, out).
    fp4_numbers: (x and codes of e2m1) to their numbers [out, in] in x's type.
    to_fp4: `fp4.rounded`.
    """

    rounded: Callable[[Tensor, Tensor | None, torch.dtype], tuple[Tensor, Tensor]]
    scaled: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, torch.dtype], Tensor
    ]
    fp8_blocks: Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
    integers: Callable[[Operands, Tensor | None, Tensor | None], Tensor]
    fp4: Callable[[Operands, Tensor | None, Tensor | None], Tensor]
    fp4_numbers: Callable[[Operands], Tensor]
    to_fp4: Callable[[Tensor, int, Tensor | None], Tensor]


def gpu_products(x: Tensor) -> GpuProducts | None:
    """Return what multiplies x [tokens, in] in half precision on its GPU; None elsewhere."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    return _of_device(x.device) if x.is_cuda and x.dim() == 2 and half and len(x) else None


@cache
def _of_device(device: torch.device) -> GpuProducts | None:
    if torch.cuda.get_device_capability(device) < _CAPABILITY:
        logger.warning("quantised weights are slow here: %s is older than Hopper", device)
        return None
    try:
        # Here, not above: Triton comes with CUDA builds of torch only.
        from modeling.quantisation import gpu
    except ImportError as error:
        logger.warning("quantised weights are slow here: %s", error)
        return None
    return GpuProducts(
        gpu.rounded, gpu.scaled, gpu.fp8_blocks, gpu.integers, gpu.fp4, gpu.fp4_numbers, gpu.to_fp4
    )

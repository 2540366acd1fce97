"""Numbers of 4 bits (e2m1) of which 32 inputs of an output share a power of two: mxfp4."""

import torch
from torch import Tensor
from torch.nn import functional as F

from modeling.quantisation.fp4 import table_of_codes
from modeling.quantisation.fp4 import unpack as unpack_bytes

SHARED = 32
"""Inputs of an output that share a scale."""

LARGEST_SCALE = 128
"""A kernel makes factors of scales up to it: 2 ** 1."""

_AT_ONCE = 4
"""Scales of an output whose codes are packed together."""


def numbers(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Make numbers of codes [..., out, in / 32, 16] and scales [..., out, in / 32]: [..., out, in].

    codes: uint8, two numbers a byte, the lower bits first. scales: uint8, powers of two, and 127.
    Exact in every float type here.
    """
    table = table_of_codes(codes.device).to(dtype)
    found = torch.ldexp(table[unpack_bytes(codes).int()], scales.int()[..., None] - 127)
    return found.to(dtype).flatten(-2)


def pack(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Put codes and scales of one matrix into the order in which kernels read them.

    codes: int16 [in / 128, out, 32]: a word has codes of inputs w, w + 32, w + 64, w + 96 of its
    chunk of 128, the first one lowest. scales: int32 [in / 128, out], four bytes each. Inputs
    behind the last are zeros.
    """
    missing = -codes.shape[1] % _AT_ONCE
    outputs = len(codes)
    codes = F.pad(unpack_bytes(codes), (0, 0, 0, missing)).view(outputs, -1, _AT_ONCE, SHARED)
    pairs = codes[:, :, 0::2] | codes[:, :, 1::2] << 4
    words = pairs.permute(1, 0, 3, 2).contiguous().view(torch.int16).squeeze(-1)
    scales = F.pad(scales, (0, missing), value=127).view(outputs, -1, _AT_ONCE)
    return words, scales.transpose(0, 1).contiguous().view(torch.int32).squeeze(-1)


def unpack(words: Tensor, scales: Tensor, inputs: int) -> tuple[Tensor, Tensor]:
    """Undo `pack`."""
    pairs = words.unsqueeze(-1).view(torch.uint8).permute(1, 0, 3, 2)
    codes = torch.stack((pairs & 15, pairs >> 4), dim=3).flatten(1, 3)[:, : inputs // SHARED]
    found = scales.unsqueeze(-1).view(torch.uint8).transpose(0, 1).flatten(1)
    return codes[..., 0::2] | codes[..., 1::2] << 4, found[:, : inputs // SHARED].contiguous()

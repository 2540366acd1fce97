"""Weights of bitsandbytes in 4 and 8 bits, rounded at load or read as the package stored them.

In 4 bits 64 inputs of an output share a scale, and activations are not rounded. In 8 bits
(LLM.int8(), arXiv:2208.07339) an output has one scale, and each token's inputs are rounded too, but
for those of its numbers from a threshold on. The package leaves a whole column of its batch
unrounded if one token has such a number there; here a token depends on itself alone.
"""

import json
import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from configs.quantisation import Quantisation
from modeling.quantisation.base import QuantisedWeight
from modeling.quantisation.integers import Groups, IntegerWeight
from modeling.quantisation.stored_fp8 import indices
from sharding.checkpoint import CheckpointError
from sharding.linear_weight import DenseWeight, LinearPart, LinearWeight
from sharding.loader import Weights

BLOCK = 64
"""Inputs that share a scale in 4 bits at load, as transformers' settings are by default."""

THRESHOLD = 6.0
"""The package's own, of numbers that are not rounded."""


class Int8Weight(QuantisedWeight):
    """W = codes * scales / 127, and inputs that are rounded to 8 bits for each token.

    codes: int8 [out, in]. scales: float32 [out], the largest absolute value of each output's row.
    """

    def __init__(
        self, codes: Tensor, scales: Tensor, dtype: torch.dtype, threshold: float | None
    ) -> None:
        """threshold: inputs from this size on are not rounded; None: all are."""
        super().__init__((codes.shape[0], codes.shape[1]), dtype)
        self.codes = self.keep(codes)
        self.scales = self.keep(scales)
        self.threshold = threshold

    @property
    def form(self) -> str:
        """Return its name."""
        return "bitsandbytes of 8 bits"

    def joined(self, others: Sequence[LinearWeight]) -> Self | None:
        """Return one weight of all rows."""
        parts = self.with_alike(others)
        if not parts or any(part.threshold != self.threshold for part in parts):
            return None
        codes = torch.cat([part.codes for part in parts])
        scales = torch.cat([part.scales for part in parts])
        return type(self)(codes, scales, self.dtype, self.threshold)

    def inputs(self, x: Tensor) -> Tensor:
        """Return x rounded to 8 bits; numbers from the threshold on stay as they are."""
        # The package rounds numbers of half precision, whatever the model computes in.
        half = x.half()
        large = None if self.threshold is None else half.abs() >= self.threshold
        small = half if large is None else half.masked_fill(large, 0)
        largest = small.abs().amax(dim=-1, keepdim=True).float()
        largest = torch.where(largest == 0, 1.0, largest)
        rounded = torch.round(small * (127.0 / largest)) * (largest / 127.0)
        rounded = rounded.to(x.dtype)
        return rounded if large is None else torch.where(large, x, rounded)

    def __getitem__(self, rows: slice) -> Tensor:
        """Return some rows in `dtype`."""
        return (self.codes[rows].float() * (self.scales[rows, None] / 127.0)).to(self.dtype)


def round_int8(matrix: Tensor, largest: Tensor, dtype: torch.dtype) -> Int8Weight:
    """Round a matrix [out, in] to 8 bits; largest: [out], of all ranks' columns."""
    scales = largest.half().float()
    safe = torch.where(scales == 0, 1.0, scales)[:, None]
    codes = torch.empty(matrix.shape, dtype=torch.int8, device=matrix.device)
    for first in range(0, len(matrix), 1024):
        rows = slice(first, first + 1024)
        codes[rows] = torch.round(matrix[rows].half() * (127.0 / safe[rows])).to(torch.int8)
    return Int8Weight(codes, scales, dtype, THRESHOLD)


def round_nf4(matrix: Tensor, dtype: torch.dtype) -> LinearWeight:
    """Round a matrix [out, in] to nf4 by the package; a whole one where in is no multiple of 64."""
    functional = _package()
    packed, state = functional.quantize_4bit(matrix.contiguous(), blocksize=BLOCK, quant_type="nf4")
    if matrix.shape[1] % BLOCK:
        numbers = _numbers(packed, state.absmax, state.code, matrix.shape, BLOCK)
        return DenseWeight(numbers.to(dtype))
    return _four_bits(packed, state.absmax, state.code, tuple(matrix.shape), BLOCK, dtype)


def is_whole(part: LinearPart) -> bool:
    """Return whether this rank has all of a map."""
    return part.local_shape == part.shape


def check_blocks(part: LinearPart, block: int = BLOCK) -> None:
    """Refuse a map of which rows, or a rank's part of them, are no whole blocks."""
    cuts = (part.shape[1], *(edge for segment in part.columns for edge in segment))
    if any(edge % block for edge in cuts):
        raise ValueError(
            f"{part.name}: {part.shape[1]} inputs, of which this rank has {part.columns}, are not "
            f"whole blocks of {block}, which bitsandbytes rounds in: set tensor_parallel to a "
            "number that cuts between blocks, or quantize to fp8"
        )


def read_int8(weights: Weights, part: LinearPart, how: Quantisation) -> Int8Weight:
    """Read what the package stored in 8 bits."""
    name, rows = part.name, indices(part.rows, weights.device)
    codes = weights.read_stored(f"{name}.weight", part.shape, part.rows, part.columns)
    scales = weights.read(f"{name}.SCB", part.shape[:1], dtype=torch.float32)[rows]
    weights.leave(f"{name}.weight_format")
    return Int8Weight(codes.contiguous(), scales, weights.dtype, how.threshold)


def read_four_bits(weights: Weights, part: LinearPart, how: Quantisation) -> LinearWeight:
    """Read what the package stored in 4 bits: two codes a byte, all rows of a matrix in one.

    Maps of which blocks hold parts of several rows (Gemma 3n has small ones) become numbers.
    """
    name = f"{part.name}.weight"
    state = _state(weights, name)
    block = int(state["blocksize"])
    if tuple(state["shape"]) != part.shape:
        raise CheckpointError(f"{name} has shape {state['shape']}, the model needs {part.shape}")
    has_whole_rows = part.shape[1] % block == 0
    if has_whole_rows:
        check_blocks(part, block)
    # Whole on the device for as long as it is cut: its rows are not the file's.
    packed = weights.read_stored(name, weights.stored_shape(name))
    largest = _largest(weights, name, state)
    code = weights.read(f"{name}.quant_map", (16,), dtype=torch.float32)
    if has_whole_rows:
        return _four_bits(packed, largest, code, part.shape, block, weights.dtype, part)
    matrix = _numbers(packed, largest, code, part.shape, block)
    rows, columns = (indices(own, matrix.device) for own in (part.rows, part.columns))
    return DenseWeight(matrix[rows][:, columns].to(weights.dtype))


def _state(weights: Weights, name: str) -> dict[str, Any]:
    """Read how a matrix was rounded: JSON, as bytes of a tensor."""
    for kind in ("nf4", "fp4"):
        key = f"{name}.quant_state.bitsandbytes__{kind}"
        if weights.lists(key):
            raw = bytes(weights.read_stored(key, weights.stored_shape(key)).tolist())
            state: dict[str, Any] = json.loads(raw)
            return state
    raise CheckpointError(f"the checkpoint does not say how {name} was rounded (quant_state)")


def _largest(weights: Weights, name: str, state: dict[str, Any]) -> Tensor:
    """Return the scale of each block, float32; they may be rounded themselves."""
    key = f"{name}.absmax"
    found = weights.read_stored(key, weights.stored_shape(key))
    if "nested_offset" not in state:
        return found.float()
    values = weights.read(f"{name}.nested_quant_map", (256,), dtype=torch.float32)
    key, size = f"{name}.nested_absmax", int(state["nested_blocksize"])
    outer = weights.read(key, weights.stored_shape(key), dtype=torch.float32)
    scales = torch.repeat_interleave(outer, size)[: len(found)]
    return values[found.long()] * scales + float(state["nested_offset"])


def _four_bits(
    packed: Tensor,
    largest: Tensor,
    code: Tensor,
    shape: tuple[int, ...],
    block: int,
    dtype: torch.dtype,
    part: LinearPart | None = None,
) -> IntegerWeight:
    """Keep the package's codes; part: what this rank has of them."""
    codes = _codes(packed).view(shape)
    scales = largest.view(shape[0], -1)
    if part is not None:
        rows, own = indices(part.rows, codes.device), indices(part.columns, codes.device)
        codes, scales = codes[rows][:, own], scales[rows][:, own[::block] // block]
    group_of = torch.arange(codes.shape[1], device=codes.device) // block
    groups = Groups(scales.contiguous(), None, group_of, block)
    return IntegerWeight(codes.contiguous(), groups, 4, dtype, code.to(codes.device))


def _numbers(
    packed: Tensor, largest: Tensor, code: Tensor, shape: tuple[int, ...], block: int
) -> Tensor:
    """Make float32 numbers of codes in blocks that may hold parts of several rows."""
    scales = largest.repeat_interleave(block)[: math.prod(shape)]
    values = code.to(scales.device)[_codes(packed)[: len(scales)].long()]
    return (values * scales).view(shape)


def _codes(packed: Tensor) -> Tensor:
    """Take the package's bytes apart, the first code high."""
    flat = packed.flatten().view(torch.uint8)
    return torch.stack((flat >> 4, flat & 15), dim=-1).flatten()


def _package() -> Any:
    try:
        import bitsandbytes.functional as functional
    except ImportError as error:
        raise ValueError(
            "model.quantize: bitsandbytes-nf4 needs the package bitsandbytes: "
            "pip install -U bitsandbytes, or set quantize to fp8"
        ) from error
    return functional

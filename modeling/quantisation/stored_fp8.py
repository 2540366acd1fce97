"""Reads weights in codes of 8 bits: compressed-tensors', and those that DeepSeek and Qwen publish.

weight                       e4m3 or int8 [out, in]
weight_scale                 one, [out, 1], or one for each block   (compressed-tensors)
weight_scale_inv             the same, of the method fp8; it multiplies too, and may be e8m0
input_scale, activation_scale    of static activations, in the same order
"""

import torch
from torch import Tensor

from configs.quantisation import Activations, Quantisation, WeightFormat
from modeling.quantisation.activations import FP8
from modeling.quantisation.fp8 import BlockFp8Weight
from modeling.quantisation.integers import local_groups
from modeling.quantisation.scaled import RowScaledWeight
from sharding.checkpoint import CheckpointError
from sharding.linear_weight import LinearPart
from sharding.loader import Weights
from sharding.slicing import Segments

SCALES = ("weight_scale", "weight_scale_inv")
"""What a quantised map has beside its weight."""

INPUT_SCALES = ("input_scale", "activation_scale")
"""What it has of STATIC activations."""


def read_rows(weights: Weights, part: LinearPart, how: Quantisation) -> RowScaledWeight:
    """Read a map whose weights have a scale for each output, or one for all."""
    kind = torch.int8 if how.format is WeightFormat.ROUNDED_INT8 else FP8
    scales = row_scales(weights, part)[indices(part.rows, weights.device)][:, None]
    scale = input_scale(weights, part) if how.activations is Activations.STATIC else None
    codes = _codes(weights, part, kind)
    return RowScaledWeight(codes, scales, how.activations, weights.dtype, scale)


def read_fp8_blocks(weights: Weights, part: LinearPart, how: Quantisation) -> BlockFp8Weight:
    """Read a map whose weights have a scale for each block of outputs and inputs."""
    assert how.block is not None
    height, wide = how.block
    scales = _number(weights, part, SCALES)
    wanted = -(-part.shape[0] // height), -(-part.shape[1] // wide)
    if tuple(scales.shape) != wanted:
        raise CheckpointError(
            f"{part.name} has {tuple(scales.shape)} weight scales, its blocks of {height} by "
            f"{wide} need {wanted}"
        )
    by_row = scales[indices(part.rows, weights.device) // height]
    groups = local_groups(by_row, None, indices(part.columns, weights.device) // wide, 0)
    if how.activations is Activations.GROUP:
        check_groups(part, groups.size, wide)
    return BlockFp8Weight(
        _codes(weights, part, FP8),
        groups.scales,
        groups.group_of,
        wide,
        how.activations,
        weights.dtype,
        input_scale(weights, part) if how.activations is Activations.STATIC else None,
    )


def check_groups(part: LinearPart, found: int | None, size: int) -> None:
    """Refuse a rank's part that cuts a group of inputs which share a scale.

    found: inputs of each of the rank's groups; None where they differ.
    """
    if found != size and len(part.columns) > 0:
        raise ValueError(
            f"{part.name}: its inputs, {part.columns} of {part.shape[1]} on this rank, are not "
            f"whole groups of {size}, which share a scale here: set tensor_parallel to a number "
            "that cuts between groups"
        )


def row_scales(weights: Weights, part: LinearPart) -> Tensor:
    """Read a scale for each output of the whole map, float32 [out]."""
    scales = _number(weights, part, SCALES).flatten()
    own = scales.expand(part.shape[0]) if len(scales) == 1 else scales
    if len(own) != part.shape[0]:
        raise CheckpointError(
            f"{part.name} has {len(own)} weight scales for {part.shape[0]} outputs: they must be "
            "one, or one for each output"
        )
    return own


def indices(segments: Segments, device: torch.device) -> Tensor:
    """Return the indices of segments, int64."""
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in segments])


def _codes(weights: Weights, part: LinearPart, kind: torch.dtype) -> Tensor:
    codes = weights.read_stored(f"{part.name}.weight", part.shape, part.rows, part.columns)
    if codes.dtype is not kind:
        raise CheckpointError(f"{part.name}.weight is stored as {codes.dtype}, not as {kind}")
    return codes.contiguous()


def _number(weights: Weights, part: LinearPart, names: tuple[str, ...]) -> Tensor:
    """Read the first tensor of these names that there is, whole, in float32."""
    for name in (f"{part.name}.{end}" for end in names):
        if weights.lists(name):
            return weights.read_stored(name, weights.stored_shape(name)).float()
    raise CheckpointError(f"the checkpoint has no tensor {part.name}.{names[0]}")


def input_scale(weights: Weights, part: LinearPart) -> Tensor:
    """Read the scale of a map's inputs, float32 [1]."""
    scale = _number(weights, part, INPUT_SCALES).flatten()
    if len(scale) != 1 or not bool(scale > 0):
        raise CheckpointError(f"{part.name}: the scale of its inputs is not one positive number")
    return scale

"""Reads numbers of 4 bits (e2m1) of checkpoints: nvfp4 and mxfp4.

weight_packed         uint8 [out, in / 2], two codes a byte, the first one lowest
weight_scale          e4m3 [out, in / 16] (nvfp4), or uint8 [out, in / 32], 2 ** (scale - 127)
weight_global_scale   float32 [1]: by what nvfp4's scales were multiplied
input_global_scale    the same of the scales of its inputs

These are compressed-tensors' names. ModelOpt has the codes in `weight`, and in `weight_scale_2` and
`input_scale` the inverse of the last two.
"""

import torch
from torch import Tensor

from configs.quantisation import Activations, Quantisation
from modeling.quantisation.fp4 import (
    LARGEST_SCALE,
    NVFP4,
    Fp4Weight,
    pack,
    scales_of_stored,
    table_of_codes,
    unpack,
)
from modeling.quantisation.integers import local_groups
from modeling.quantisation.stored_fp8 import check_groups, indices
from modeling.quantisation.stored_integers import covering
from sharding.checkpoint import CheckpointError
from sharding.linear_weight import DenseWeight, LinearPart
from sharding.loader import Weights


def read_fp4(weights: Weights, part: LinearPart, how: Quantisation) -> Fp4Weight | DenseWeight:
    """Read a map in nvfp4 or mxfp4; numbers where this rank's inputs cut groups."""
    size = how.group_size
    assert size is not None
    outputs, inputs = part.shape
    rounds = how.activations is not Activations.NONE
    words, places = covering(part.columns, 2)
    is_modelopt = how.method == "modelopt"
    name = f"{part.name}.weight" if is_modelopt else f"{part.name}.weight_packed"
    packed = weights.read_stored(name, (outputs, -(-inputs // 2)), part.rows, words)
    if packed.dtype is not torch.uint8:
        raise CheckpointError(f"{name} is stored as {packed.dtype}, not as {torch.uint8}")
    codes = unpack(packed)[:, places.to(weights.device)].contiguous()
    outer = _outer(weights, part, is_modelopt) if size == NVFP4 else None
    scales, group_of = _scales(weights, part, size), indices(part.columns, weights.device) // size
    groups = local_groups(scales.view(torch.uint8), None, group_of, 0)
    if groups.size != size or groups.order is not None:
        if rounds:
            check_groups(part, groups.size, size)
        numbers = table_of_codes(codes.device)[codes.int()]
        numbers *= scales_of_stored(scales, outer)[:, group_of]
        return DenseWeight(numbers.bfloat16().to(weights.dtype))
    scale = None
    if rounds and size == NVFP4:
        scale = _input_global_scale(weights, part, is_modelopt)
    of_rows = None if outer is None else outer.repeat(len(codes))
    return Fp4Weight(
        *pack(codes, groups.scales), codes.shape[1], weights.dtype, of_rows, rounds, scale
    )


def _input_global_scale(weights: Weights, part: LinearPart, is_modelopt: bool) -> Tensor:
    """Read by what the scales of a map's inputs are multiplied."""
    if is_modelopt:
        return 1 / _number(weights, f"{part.name}.input_scale")
    return _number(weights, f"{part.name}.input_global_scale")


def _outer(weights: Weights, part: LinearPart, is_modelopt: bool) -> Tensor:
    """Read what nvfp4's scales are multiplied by, float64 [1]."""
    if is_modelopt:
        return _number(weights, f"{part.name}.weight_scale_2").double()
    return 1 / _number(weights, f"{part.name}.weight_global_scale").double()


def _scales(weights: Weights, part: LinearPart, size: int) -> Tensor:
    """Read the scales of this rank's outputs, [out, all groups]."""
    name = f"{part.name}.weight_scale"
    shape = part.shape[0], -(-part.shape[1] // size)
    stored = weights.read_stored(name, shape, part.rows)
    wanted = torch.float8_e4m3fn if size == NVFP4 else torch.uint8
    if stored.dtype is not wanted:
        raise CheckpointError(f"{name} is stored as {stored.dtype}, not as {wanted}")
    if size == NVFP4 and bool((stored.view(torch.uint8) > LARGEST_SCALE).any()):
        raise CheckpointError(f"{name} has scales that are negative or no numbers")
    return stored


def _number(weights: Weights, name: str) -> Tensor:
    """Read one number, float32 [1]."""
    number = weights.read(name, weights.stored_shape(name), dtype=torch.float32).flatten()
    if len(number) != 1 or not bool(number > 0):
        raise CheckpointError(f"{name} is not one positive number")
    return number

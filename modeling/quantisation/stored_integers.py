"""Reads packed integers of checkpoints: compressed-tensors', GPTQ's and AWQ's.

Each packs several codes into an int32, the first one into its lowest bits:

    compressed-tensors   weight_packed [out, in / n], weight_scale [out, groups], weight_g_idx
                         [in], weight_zero_point [out / n, groups]
    GPTQ                 qweight [in / n, out], scales [groups, out], qzeros [groups, out / n],
                         g_idx [in]
    AWQ                  qweight [in, out / n], scales [groups, out], qzeros [groups, out / n],
                         in the order 0 2 4 6 1 3 5 7
"""

import torch
from torch import Tensor

from configs.quantisation import Quantisation
from modeling.quantisation.integers import IntegerWeight, local_groups
from modeling.quantisation.stored_fp8 import indices
from sharding.checkpoint import CheckpointError
from sharding.linear_weight import LinearPart
from sharding.loader import Weights
from sharding.slicing import Segments

CODES = ("weight_packed", "qweight")
"""What a quantised map has instead of its weight."""

BESIDE = (
    "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape", "weight_global_scale",
    "weight_scale_2", "input_global_scale", "input_scale", "scales", "qzeros", "g_idx",
)  # fmt: skip
"""What it has besides."""

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word AWQ puts the first, the second, ... code."""


def unpack_words(words: Tensor, bits: int, dim: int) -> Tensor:
    """Take int32 words apart along a dimension: uint8, with 32 / bits times as many indices."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    moved = words.movedim(dim, -1)
    codes: Tensor = (moved.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return codes.to(torch.uint8).flatten(-2).movedim(-1, dim)


def in_awq_order(codes: Tensor) -> Tensor:
    """Put AWQ's codes [rows, out] into the order of the outputs."""
    order = torch.tensor(_AWQ_ORDER, device=codes.device)
    return codes.view(len(codes), -1, len(order))[..., order].flatten(-2)


def covering(segments: Segments, factor: int) -> tuple[Segments, Tensor]:
    """Return the words that hold some codes, and where in the codes of these words they are."""
    words, places, first = [], [], 0
    for start, stop in segments:
        begin, end = start // factor, -(-stop // factor)
        words.append((begin, end))
        offset = first + start - begin * factor
        places.append(torch.arange(offset, offset + stop - start))
        first += (end - begin) * factor
    return tuple(words), torch.cat(places)


def read_packed(weights: Weights, part: LinearPart, how: Quantisation) -> IntegerWeight:
    """Read integers of compressed-tensors, signed and stored with 2 ** (bits - 1) added."""
    name, device = part.name, weights.device
    outputs, inputs = part.shape
    words, places = covering(part.columns, 32 // how.bits)
    shape = outputs, -(-inputs * how.bits // 32)
    packed = weights.read_stored(f"{name}.weight_packed", shape, part.rows, words)
    codes = unpack_words(packed, how.bits, 1)[:, places.to(device)]
    count = 1 if how.group_size is None else -(-inputs // how.group_size)
    scales = weights.read(f"{name}.weight_scale", (outputs, count), part.rows)
    group_of = _group_of(weights, part, f"{name}.weight_g_idx", how.group_size, count)
    weights.leave(f"{name}.weight_shape")
    zeros = _packed_zeros(weights, part, how, count) if how.zero_points else None
    groups = local_groups(scales, zeros, group_of, 0 if how.zero_points else 2 ** (how.bits - 1))
    return IntegerWeight(codes, groups, how.bits, weights.dtype)


def _packed_zeros(weights: Weights, part: LinearPart, how: Quantisation, count: int) -> Tensor:
    """Read the zero points of this rank's outputs, uint8 [out, groups]; stored as the codes are."""
    words, places = covering(part.rows, 32 // how.bits)
    shape = -(-part.shape[0] * how.bits // 32), count
    packed = weights.read_stored(f"{part.name}.weight_zero_point", shape, words)
    return unpack_words(packed, how.bits, 0)[places.to(weights.device)]


def read_gptq(weights: Weights, part: LinearPart, how: Quantisation) -> IntegerWeight:
    """Read GPTQ's integers, with or without act-order."""
    name, device = part.name, weights.device
    outputs, inputs = part.shape
    factor = 32 // how.bits
    words, places = covering(part.columns, factor)
    shape = -(-inputs // factor), outputs
    packed = weights.read_stored(f"{name}.qweight", shape, words, part.rows)
    codes = unpack_words(packed, how.bits, 0)[places.to(device)].t()
    zeros = unpack_words(_zeros(weights, part, how), how.bits, 1)
    if how.offset_zeros:
        zeros = (zeros + 1) & (2**how.bits - 1)
    return _by_input(weights, part, how, codes, zeros)


def read_awq(weights: Weights, part: LinearPart, how: Quantisation) -> IntegerWeight:
    """Read AWQ's integers, as its kernels for matrices (gemm) have them."""
    name, device = part.name, weights.device
    outputs, inputs = part.shape
    words, places = covering(part.rows, 32 // how.bits)
    shape = inputs, outputs * how.bits // 32
    packed = weights.read_stored(f"{name}.qweight", shape, part.columns, words)
    codes = in_awq_order(unpack_words(packed, how.bits, 1))[:, places.to(device)].t()
    zeros = in_awq_order(unpack_words(_zeros(weights, part, how), how.bits, 1))
    return _by_input(weights, part, how, codes, zeros)


def _zeros(weights: Weights, part: LinearPart, how: Quantisation) -> Tensor:
    outputs, inputs = part.shape
    count = 1 if how.group_size is None else -(-inputs // how.group_size)
    return weights.read_stored(f"{part.name}.qzeros", (count, outputs * how.bits // 32))


def _by_input(
    weights: Weights, part: LinearPart, how: Quantisation, codes: Tensor, zeros: Tensor
) -> IntegerWeight:
    """Add the scales; codes: [this rank's out, in]. zeros: of all, [groups, out]."""
    shape = zeros.shape[0], part.shape[0]
    rows = indices(part.rows, weights.device)
    scales = weights.read(f"{part.name}.scales", shape, columns=part.rows).t()
    group_of = _group_of(weights, part, f"{part.name}.g_idx", how.group_size, len(zeros))
    # Symmetric integers have one zero point for all, with which products are faster.
    if bool((zeros == zeros[0, 0]).all()):
        groups = local_groups(scales, None, group_of, int(zeros[0, 0]))
    else:
        groups = local_groups(scales, zeros[:, rows].t(), group_of, 0)
    return IntegerWeight(codes.contiguous(), groups, how.bits, weights.dtype)


def _group_of(
    weights: Weights, part: LinearPart, name: str, size: int | None, count: int
) -> Tensor:
    """Return the group of each of this rank's inputs, of `count`."""
    if weights.lists(name):
        shape = (part.shape[1],)
        found = weights.read_stored(name, shape, part.columns).long()
        if bool((found >= count).any()):
            raise CheckpointError(f"{name} names groups beyond the {count} that there are")
        # -1: not known yet, as compressed-tensors stores it where no order was chosen.
        if not bool((found < 0).any()):
            return found
    columns = indices(part.columns, weights.device)
    return torch.zeros_like(columns) if size is None else columns // size

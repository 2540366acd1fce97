"""Which form linear maps are kept in: as a checkpoint has them, or rounded while it is read."""

import re
from collections.abc import Callable, Sequence
from json import JSONDecodeError

import torch
from torch import Tensor

from configs.model import Quantize
from configs.quantisation import Activations, Quantisation, WeightFormat
from modeling.quantisation.activations import FP8
from modeling.quantisation.base import join
from modeling.quantisation.bits_and_bytes import (
    BLOCK,
    check_blocks,
    is_whole,
    read_four_bits,
    read_int8,
    round_int8,
    round_nf4,
)
from modeling.quantisation.fp4 import round_fp4
from modeling.quantisation.fp8 import round_blocks
from modeling.quantisation.integers import round_groups
from modeling.quantisation.products import SIZES
from modeling.quantisation.scaled import round_rows
from modeling.quantisation.stored_fp4 import read_fp4
from modeling.quantisation.stored_fp8 import INPUT_SCALES, SCALES, read_fp8_blocks, read_rows
from modeling.quantisation.stored_integers import BESIDE, CODES, read_awq, read_gptq, read_packed
from sharding.checkpoint import CheckpointError
from sharding.linear import read_dense
from sharding.linear_weight import LinearPart, LinearWeight
from sharding.loader import LinearFormat, Weights
from sharding.slicing import width

Reader = Callable[[Weights, LinearPart, Quantisation], LinearWeight]

_STORED: dict[WeightFormat, tuple[Reader, tuple[str, ...]]] = {
    WeightFormat.FP8: (read_rows, SCALES),
    WeightFormat.FP8_BLOCKS: (read_fp8_blocks, SCALES),
    WeightFormat.ROUNDED_INT8: (read_rows, SCALES[:1]),
    WeightFormat.PACKED: (read_packed, ("weight_packed",)),
    WeightFormat.FP4: (read_fp4, ("weight_packed", "weight_scale_2")),
    WeightFormat.GPTQ: (read_gptq, ("qweight",)),
    WeightFormat.AWQ: (read_awq, ("qweight",)),
    WeightFormat.NF4: (read_four_bits, ("weight.absmax",)),
    WeightFormat.INT8: (read_int8, ("SCB",)),
}
"""How to read a format, and the tensors that show that a map is stored in it."""

MARKS = tuple(dict.fromkeys((*SCALES, *INPUT_SCALES, *CODES, *BESIDE)))
"""Names of tensors that a map in fp8 or in integers may have, its weight apart."""

_UNFIT = (RuntimeError, IndexError, TypeError, KeyError, ArithmeticError, JSONDecodeError)
"""What reading raises for tensors that do not fit each other."""


class StoredFormat:
    """Maps as a checkpoint has them; those that it did not quantise stay as they are."""

    def __init__(self, how: Quantisation) -> None:
        self._how = how
        self._others = [(re.compile(begins), other) for begins, other in how.others]

    def read(self, weights: Weights, parts: Sequence[LinearPart]) -> LinearWeight:
        """Read maps that share their input."""
        stored = [self.is_stored(weights, part) for part in parts]
        if not any(stored):
            return read_dense(weights, parts)
        pairs = zip(parts, stored, strict=True)
        return join([self._part(weights, part) if own else read_dense(weights, [part])
                     for part, own in pairs])  # fmt: skip

    def is_stored(self, weights: Weights, part: LinearPart) -> bool:
        """Return whether the checkpoint quantised a map."""
        marks = _STORED[self.how_of(part).format][1]
        return any(weights.lists(f"{part.name}.{mark}") for mark in marks)

    def how_of(self, part: LinearPart) -> Quantisation:
        """Return how the checkpoint has a map that it quantised."""
        found = (other for begins, other in self._others if begins.match(part.name))
        return next(found, self._how)

    def _part(self, weights: Weights, part: LinearPart) -> LinearWeight:
        how = self.how_of(part)
        try:
            return _STORED[how.format][0](weights, part, how)
        except torch.OutOfMemoryError:
            raise
        except _UNFIT as error:
            raise CheckpointError(
                f"{part.name}: its tensors are not of the format {how.format} as config.json "
                f"describes it: {error!r}"
            ) from error


class Fp8AtLoad:
    """fp8 weights with a scale for each output, and activations with one for each token."""

    def read(self, weights: Weights, parts: Sequence[LinearPart]) -> LinearWeight:
        """Read maps that share their input, and round them."""
        dense = read_dense(weights, parts)
        if any(size % SIZES for part in parts for size in part.shape):
            return dense
        return round_rows(dense.matrix, _largest(weights, parts, dense.matrix), weights.dtype)


class Nf4AtLoad:
    """4 bits of bitsandbytes."""

    def read(self, weights: Weights, parts: Sequence[LinearPart]) -> LinearWeight:
        """Read maps that share their input, and round them."""
        if any(part.shape[1] % BLOCK for part in parts) and all(map(is_whole, parts)):
            # A block holds parts of several rows, but of one map.
            alone = (read_dense(weights, [part]).matrix for part in parts)
            return join([round_nf4(matrix, weights.dtype) for matrix in alone])
        for part in parts:
            check_blocks(part)
        return round_nf4(read_dense(weights, parts).matrix, weights.dtype)


class Int8AtLoad:
    """8 bits of bitsandbytes."""

    def read(self, weights: Weights, parts: Sequence[LinearPart]) -> LinearWeight:
        """Read maps that share their input, and round them."""
        matrix = read_dense(weights, parts).matrix
        return round_int8(matrix, _largest(weights, parts, matrix), weights.dtype)


_AT_LOAD: dict[Quantize, Callable[[], LinearFormat]] = {
    Quantize.FP8: Fp8AtLoad,
    Quantize.BITSANDBYTES: Int8AtLoad,
    Quantize.BITSANDBYTES_NF4: Nf4AtLoad,
}

_SAME = {
    Quantize.FP8: (WeightFormat.FP8, WeightFormat.FP8_BLOCKS),
    Quantize.BITSANDBYTES: (WeightFormat.INT8,),
    Quantize.BITSANDBYTES_NF4: (WeightFormat.NF4,),
}
"""What a checkpoint may be, where the setting asks for the same."""


class RowsOfDummies:
    """Codes of 8 bits, of random weights, with inputs that are rounded too."""

    def __init__(self, kind: torch.dtype) -> None:
        """kind: of the codes, fp8 or int8."""
        self._kind = kind

    def read(self, weights: Weights, parts: Sequence[LinearPart]) -> LinearWeight:
        """Make maps that share their input, and round them."""
        matrix = read_dense(weights, parts).matrix
        return round_rows(matrix, _largest(weights, parts, matrix), weights.dtype, self._kind)


class IntegersOfDummies:
    """Integers of random weights, which no checkpoint stored."""

    def __init__(self, how: Quantisation) -> None:
        self._how = how
        self.bits = how.bits

    def read(self, weights: Weights, parts: Sequence[LinearPart]) -> LinearWeight:
        """Make maps that share their input, and round them."""
        matrix = read_dense(weights, parts).matrix
        return round_groups(matrix, self._how.bits, self._how.group_size)


class Fp4OfDummies:
    """Numbers of 4 bits, of random weights."""

    def __init__(self, how: Quantisation) -> None:
        assert how.group_size is not None
        self._size, self._rounds = how.group_size, how.activations is not Activations.NONE

    def read(self, weights: Weights, parts: Sequence[LinearPart]) -> LinearWeight:
        """Make maps that share their input, and round them."""
        return round_fp4(read_dense(weights, parts).matrix, self._size, self._rounds)


class BlocksOfDummies:
    """fp8 in blocks, of random weights."""

    def __init__(self, how: Quantisation) -> None:
        assert how.block is not None
        self._how, self._block = how, how.block

    def read(self, weights: Weights, parts: Sequence[LinearPart]) -> LinearWeight:
        """Make maps that share their input, and round them."""
        return round_blocks(read_dense(weights, parts).matrix, self._block, self._how.activations)


def format_of_dummies(stored: Quantisation | None, quantize: Quantize) -> LinearFormat | None:
    """`linear_format` of random weights, which are rounded as the checkpoint's would be."""
    if stored is None or stored.format is WeightFormat.MXFP4:
        return linear_format(None, quantize)
    if stored.others:
        raise ValueError(
            "model.load_format: dummy: random weights are made in one scheme, and config.json has "
            f"several ({stored.method}): remove all but one"
        )
    made: dict[WeightFormat, Callable[[], LinearFormat]] = {
        WeightFormat.FP8: lambda: RowsOfDummies(FP8),
        WeightFormat.FP8_BLOCKS: lambda: BlocksOfDummies(stored),
        WeightFormat.FP4: lambda: Fp4OfDummies(stored),
        WeightFormat.NF4: Nf4AtLoad,
        WeightFormat.INT8: Int8AtLoad,
        WeightFormat.ROUNDED_INT8: lambda: RowsOfDummies(torch.int8),
    }
    return made.get(stored.format, lambda: IntegersOfDummies(stored))()


def linear_format(stored: Quantisation | None, quantize: Quantize) -> LinearFormat | None:
    """Return how linear maps are read; None where they stay as they are.

    stored: of the checkpoint. quantize: the setting; ValueError if it asks for something else.
    """
    if stored is None:
        return None if quantize is Quantize.NONE else _AT_LOAD[quantize]()
    formats = {stored.format, *(other.format for _, other in stored.others)}
    if quantize is not Quantize.NONE and not formats <= {*_SAME[quantize]}:
        raise ValueError(
            f"model.quantize: {quantize.value}: the checkpoint is quantised already "
            f"({stored.method}), which is read from its config.json: set quantize to none"
        )
    # Experts say by themselves that they are stored so; linear maps stay as they are.
    return None if stored.format is WeightFormat.MXFP4 else StoredFormat(stored)


def _largest(weights: Weights, parts: Sequence[LinearPart], matrix: Tensor) -> Tensor:
    """Return each row's largest absolute value, float32 [out], of all ranks' columns.

    All ranks call it together where columns are cut, so that all round as one rank does.
    """
    largest = matrix.abs().amax(dim=1).float()
    if all(width(part.columns) == part.shape[1] for part in parts):
        return largest
    ranks = weights.group.all_gather(largest).view(weights.group.size, -1)
    return ranks.amax(dim=0)

"""Reads experts that a checkpoint quantised as linear maps, one matrix for each."""

from collections.abc import Sequence
from typing import Any, cast

from configs.architectures.base import ArchitectureError
from configs.quantisation import Quantisation, WeightFormat
from modeling.models.generic.fp4_experts import Fp4Matrices
from modeling.models.generic.integer_experts import IntegerMatrices
from modeling.models.generic.scaled_experts import ScaledMatrices
from modeling.models.generic.stacked_experts import StackedExperts, within
from modeling.models.generic.stored_experts import StoredMatrices
from modeling.quantisation.formats import (
    MARKS,
    BlocksOfDummies,
    Fp4OfDummies,
    IntegersOfDummies,
    RowsOfDummies,
    StoredFormat,
)
from modeling.quantisation.fp4 import Fp4Weight
from modeling.quantisation.integers import IntegerWeight
from modeling.quantisation.scaled import ScaledWeight
from modeling.quantisation.stored_fp8 import check_groups
from sharding.linear_weight import DenseWeight, LinearPart, LinearWeight
from sharding.loader import Weights
from sharding.slicing import Segments, whole


def read_linears(
    weights: Weights, source: StackedExperts, shape: tuple[int, ...], rows: Segments,
    columns: Segments, experts: range | None,
) -> StoredMatrices | None:  # fmt: skip
    """Read one quantised map for each expert, or several below each other.

    Arguments are `StackedExperts.read`'s. None where the maps are not quantised.
    """
    count, height, wide = shape
    each = height // len(source.parts)
    own = range(count) if experts is None else experts
    parts = [
        [
            LinearPart(
                source.parts[part][expert].removesuffix(".weight"),
                (each, wide),
                within(rows, part * each, each),
                columns,
            )
            for part in sorted(source.parts)
        ]
        for expert in own
    ]
    if not _are_quantised(weights, [part for expert in parts for part in expert]):
        return None
    form = weights.linear_format
    assert isinstance(form, StoredFormat)
    made = [[form.read(weights, [part]) for part in expert] for expert in parts]
    _check_cut(parts[0][0], made[0][0], form.how_of(parts[0][0]))
    left = [
        f"{name.removesuffix('weight')}{mark}"
        for names in source.parts.values()
        for expert, name in names.items()
        if expert not in own
        for mark in ("weight", *MARKS)
    ]
    weights.leave(*left)
    return _matrices(parts[0][0].name, made)


def read_dummies(
    weights: Weights, name: str, shape: tuple[int, ...], cut: tuple[Segments, Segments] | None,
    experts: range | None,
) -> StoredMatrices | None:  # fmt: skip
    """Make matrices of random weights, where a checkpoint's would be quantised; None for others.

    cut: the rows and columns of each; None: all. experts: as for `read_linears`.
    """
    form = weights.linear_format
    made_so = BlocksOfDummies | Fp4OfDummies | IntegersOfDummies | RowsOfDummies
    if not isinstance(form, made_so):
        return None
    if isinstance(form, IntegersOfDummies) and form.bits != 4:
        return None
    count, *sizes = shape
    rows, columns = cut or (whole(sizes[0]), whole(sizes[1]))
    made = []
    for expert in range(count) if experts is None else experts:
        part = LinearPart(f"{name}.{expert}", (sizes[0], sizes[1]), rows, columns)
        made.append([form.read(weights, [part])])
    return _matrices(name, made)


def _are_quantised(weights: Weights, parts: Sequence[LinearPart]) -> bool:
    """Whether all of them are; ArchitectureError where some are, and others are not."""
    form = weights.linear_format
    if not isinstance(form, StoredFormat):
        return False
    stored = [form.is_stored(weights, part) for part in parts]
    if any(stored) and not all(stored):
        raise ArchitectureError(
            f"{parts[stored.index(True)].name} is quantised and {parts[stored.index(False)].name} "
            "is not: of a layer's experts a map is served where all quantise it, gate and up "
            "alike, or none: take a checkpoint that does, or one in bfloat16"
        )
    return any(stored)


def _check_cut(part: LinearPart, weight: LinearWeight, how: Quantisation) -> None:
    """Refuse a rank's part that cuts groups of inputs in nvfp4 or mxfp4, which became numbers."""
    if how.format is WeightFormat.FP4 and isinstance(weight, DenseWeight):
        assert how.group_size is not None
        check_groups(part, None, how.group_size)


def _matrices(name: str, made: Sequence[Sequence[LinearWeight]]) -> StoredMatrices:
    parts = [part for expert in made for part in expert]
    if all(map(_is_integer, parts)):
        return IntegerMatrices(cast(Any, made))
    if _are_fp4(parts):
        return Fp4Matrices.of_maps(cast(Any, made))
    if _are_scaled(parts):
        return ScaledMatrices(cast(Any, made))
    forms = " + ".join(dict.fromkeys(part.form for part in parts))
    raise ArchitectureError(
        f"{name}: experts in {forms}: those in integers of 4 bits are served (GPTQ, AWQ, "
        "compressed-tensors), in nvfp4 and mxfp4, in fp8, and in integers of 8 bits with "
        "activations of 8 bits, all of a layer alike: take such a checkpoint, or one in bfloat16"
    )


def _are_scaled(parts: Sequence[LinearWeight]) -> bool:
    """Whether all are in codes of 8 bits of one form, and round their inputs alike."""
    kinds = {
        (each.form, each.activations, getattr(each, "group", 0))
        for each in parts
        if isinstance(each, ScaledWeight)
    }
    return len(kinds) == 1 and all(isinstance(each, ScaledWeight) for each in parts)


def _are_fp4(parts: Sequence[LinearWeight]) -> bool:
    """Whether all are in nvfp4, or all in mxfp4, and round their inputs or all do not."""
    first = parts[0]
    return isinstance(first, Fp4Weight) and all(
        isinstance(each, Fp4Weight)
        and (each.outer is None, each.rounds) == (first.outer is None, first.rounds)
        for each in parts
    )


def _is_integer(part: LinearWeight) -> bool:
    return isinstance(part, IntegerWeight) and part.bits == 4 and part.table is None

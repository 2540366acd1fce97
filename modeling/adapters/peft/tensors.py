"""Checks of single tensors in a PEFT file."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from modeling.adapters.faults import refuse
from modeling.adapters.projection import Projection
from sharding.tensor_file import TensorFile

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


def check_type(key: str, dtype: str) -> None:
    """Refuse tensors of whole numbers."""
    if dtype not in FLOATS:
        refuse(f"{key} has type {dtype}: save the adapter in float32, float16 or bfloat16")


def have_finite_sums(tensors: Iterable[Tensor]) -> bool:
    """Return whether the sum of each is finite, which it is not if any number is not."""
    return all(math.isfinite(tensor.sum()) for tensor in tensors)


def check_finite(key: str, tensor: Tensor) -> None:
    """Refuse NaN and infinity."""
    # The sum is not finite if any element is not, and takes a fraction of the time. The reverse
    # does not hold, as finite values may overflow it: only then are all elements looked at.
    if not bool(torch.isfinite(tensor.sum()) or torch.isfinite(tensor).all()):
        refuse(
            f"{key} holds values that are not finite (NaN or infinity): the training diverged; "
            "save a good checkpoint"
        )


def check_shape(key: str, shape: tuple[int, ...], is_a: bool, projection: Projection) -> None:
    """Compare a factor, A [r, in] or B [out, r], with the model's sizes."""
    if len(shape) != 2:
        refuse(f"{key} has shape {list(shape)}, not a matrix: it is no plain LoRA factor")
    found = shape[1] if is_a else shape[0]
    size = projection.in_features if is_a else projection.out_features
    if found != size:
        refuse(
            f"adapter for another base model: {key} has {found} {'inputs' if is_a else 'outputs'}, "
            f"this model's {projection.name} has {size}"
        )


def check_outputs(file: TensorFile, key: str, projection: Projection) -> None:
    """Compare a vector, [out], with the model's size; refuses no floats."""
    check_type(key, file.dtype(key))
    if file.shape(key) != (projection.out_features,):
        refuse(
            f"{key} has shape {list(file.shape(key))}, this model's {projection.name} has "
            f"{projection.out_features} outputs: the adapter is for another base model"
        )


def check_file_rank(key: str, found: int, rank: int) -> None:
    """Compare a factor's rank with the config's."""
    if found != rank:
        refuse(
            f"{key} has rank {found}, but adapter_config.json (r, rank_pattern) says {rank}: "
            "the two files do not belong together"
        )

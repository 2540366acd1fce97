"""Refuses numbers of adapters that are finite in their files, but not in the pools' type."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from modeling.adapters.faults import refuse
from modeling.adapters.merge import OpenAdapter
from modeling.adapters.peft.ends import Matrix
from modeling.adapters.projection import Projection
from modeling.adapters.stacks import LoraStack
from sharding.extents import Scratch


def are_within(tensors: Iterable[Tensor], most: float) -> bool:
    """Return whether all numbers are between -most and most; NaN is not."""
    extents = (tensor.aminmax() for tensor in tensors if tensor.numel())
    return all(-most <= float(low) and float(high) <= most for low, high in extents)


def check_range(name: str, tensor: Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    """Refuse a tensor of which a number times `scale` would be infinite in this type."""
    if are_within([tensor], torch.finfo(dtype).max / max(1.0, abs(scale))):
        return
    scaled = "" if scale == 1.0 else f", times the scaling of {scale:g}"
    refuse(
        f"{name} has values up to {float(tensor.abs().max()):.4g}{scaled}, which are infinite in "
        f"{str(dtype).removeprefix('torch.')}: serve the model in a wider type (model.dtype), or "
        "train the adapter again"
    )


def rounded(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in this type; refuses what the type cannot hold."""
    check_range(name, tensor, dtype)
    return tensor.to(dtype)


def ranged_stacks(
    adapter: OpenAdapter,
    projections: Sequence[Projection],
    dtype: torch.dtype,
    scratch: Scratch | None = None,
) -> Iterator[LoraStack]:
    """Yield the stacks of an adapter; refuses what the type cannot hold, by the module's path."""
    for stack in adapter.stacks(scratch):
        paths = [projections[stack.projection].modules(layer)[0] for layer in stack.layers]
        check_layers(paths, "lora_A", stack.a, dtype)
        check_layers(paths, "lora_B", stack.b, dtype, stack.scale)
        if stack.biases is not None:
            check_layers(paths, "lora_B.bias", stack.biases, dtype)
        for index, bias in stack.base_biases.items():
            check_range(f"{paths[index]}.bias", bias, dtype)
        yield stack


def ranged_matrices(
    adapter: OpenAdapter, projections: Sequence[Projection], dtype: torch.dtype
) -> Iterator[Matrix]:
    """Yield the matrices of an adapter; refuses what the type cannot hold, by its projection."""
    for matrix in adapter.read_matrices():
        projection = projections[matrix.position.projection]
        check_range(projection.modules(0)[0], matrix.rows, dtype)
        yield matrix


def check_layers(
    paths: Sequence[str], name: str, tensor: Tensor, dtype: torch.dtype, scale: float = 1.0
) -> None:
    """Refuse as `check_range`; tensor: [layers, ...], one for each path."""
    if not are_within([tensor], torch.finfo(dtype).max / max(1.0, abs(scale))):
        for path, own in zip(paths, tensor, strict=True):
            check_range(f"{path}.{name}", own, dtype, scale)

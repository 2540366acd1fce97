"""Experts that a checkpoint quantised: kept as they are stored, made into numbers for a product."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from configs.architectures.base import ArchitectureError
from modeling.models.generic.names import StackedExperts, within
from modeling.quantisation.base import QuantisedWeight
from modeling.quantisation.stored_fp8 import SCALES
from sharding.linear_weight import LinearPart
from sharding.loader import Weights
from sharding.slicing import Segments

SHARED = 32
"""Inputs of an output that share a scale."""

_HALVES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the lowest three bits of a code stand for; the fourth is the sign."""


class StoredMatrices(nn.Module, ABC):
    """One matrix for each expert, kept as a checkpoint has it."""

    @property
    @abstractmethod
    def form(self) -> str:
        """Return its name."""

    @abstractmethod
    def numbers(self) -> Tensor:
        """Return all matrices in a float type, as the module of transformers keeps them."""

    def inputs(self, x: Tensor) -> Tensor:
        """Return x as it counts in a product: rounded where the form rounds activations."""
        return x


class LinearMatrices(StoredMatrices):
    """Matrices [out, in], each in a form of linear maps."""

    def __init__(self, experts: Sequence[QuantisedWeight]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)
        self._experts = tuple(experts)

    @property
    def form(self) -> str:
        """Return its name."""
        return self._experts[0].form

    def numbers(self) -> Tensor:
        """[experts, out, in]."""
        return torch.stack([each[:] for each in self._experts])

    def inputs(self, x: Tensor) -> Tensor:
        """Return x as any expert rounds it."""
        return self._experts[0].inputs(x)


class Mxfp4Matrices(StoredMatrices):
    """One matrix [in, out] for each expert, in mxfp4, as gpt-oss is published.

    codes: uint8 [experts, out, in / 32, 16], two numbers (e2m1) a byte, the lower bits first.
    scales: uint8 [experts, out, in / 32], powers of two, and 127. dtype: of the numbers.
    """

    def __init__(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.dtype = dtype

    @property
    def form(self) -> str:
        """Return its name."""
        return "mxfp4"

    def numbers(self) -> Tensor:
        """[experts, in, out]: exact in every float type here."""
        values = [*_HALVES, *(-half for half in _HALVES)]
        table = torch.tensor(values, dtype=self.dtype, device=self.codes.device)
        parts = torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(-2)
        found = torch.ldexp(table[parts.int()], self.scales.int()[..., None] - 127)
        return found.to(self.dtype).flatten(-2).transpose(1, 2)


def is_stored(weights: Weights, name: str) -> bool:
    """Whether the checkpoint has codes and scales instead of a tensor of numbers."""
    return weights.lists(f"{name}_blocks")


def read_stored(
    weights: Weights, name: str, shape: tuple[int, ...], own: Segments | None
) -> Mxfp4Matrices:
    """Read codes and scales of some experts; shape: [experts, in, out]. own: None for all.

    ArchitectureError on a GPU: no product was compared there.
    """
    _check_device(weights, name, "mxfp4")
    experts, inputs, outputs = shape
    groups = experts, outputs, inputs // SHARED
    codes = weights.read_stored(f"{name}_blocks", (*groups, SHARED // 2), own)
    return Mxfp4Matrices(codes, weights.read_stored(f"{name}_scales", groups, own), weights.dtype)


def read_linears(
    weights: Weights, source: StackedExperts, shape: tuple[int, ...], rows: Segments,
    columns: Segments, experts: range | None,
) -> LinearMatrices | None:  # fmt: skip
    """Read one quantised map for each expert, or several below each other.

    Arguments are `StackedExperts.read`'s. None where the maps are not quantised.
    """
    count, height, wide = shape
    each = height // len(source.parts)
    made: list[QuantisedWeight] = []
    for expert in range(count) if experts is None else experts:
        parts = [
            LinearPart(
                source.parts[part][expert].removesuffix(".weight"),
                (each, wide),
                within(rows, part * each, each),
                columns,
            )
            for part in sorted(source.parts)
        ]
        if weights.linear_format is None or not any(_is_quantised(weights, own) for own in parts):
            return None
        _check_device(weights, parts[0].name, "fp8")
        found = weights.linear_format.read(weights, parts)
        if not isinstance(found, QuantisedWeight) or found.has_input_scale:
            raise ArchitectureError(
                f"{parts[0].name}: experts are served in fp8 where activations have scales of "
                "their own, gate and up alike: take a checkpoint in bfloat16"
            )
        made.append(found)
    if experts is not None:
        left = [
            f"{name.removesuffix('weight')}{mark}"
            for names in source.parts.values()
            for expert, name in names.items()
            if expert not in experts
            for mark in ("weight", *SCALES)
        ]
        weights.leave(*left)
    return LinearMatrices(made)


def _is_quantised(weights: Weights, part: LinearPart) -> bool:
    return any(weights.lists(f"{part.name}.{mark}") for mark in SCALES)


def _check_device(weights: Weights, name: str, form: str) -> None:
    """Refuse a GPU: no product was compared there."""
    if weights.device.type != "cpu":
        raise ArchitectureError(
            f"{name}: experts in {form} are served on CPUs alone: take a checkpoint of the model "
            "in bfloat16"
        )


def keep_stored(module: nn.Module, name: str, stored: StoredMatrices) -> None:
    """Let a module's parameter be made of what is stored, whenever it is read."""
    del module._parameters[name]
    kept = f"{name}_stored"
    module.add_module(kept, stored)
    kind = type(module)
    made = property(lambda self: getattr(self, kept).numbers())
    fields: dict[str, Any] = {"__module__": kind.__module__, name: made}
    module.__class__ = type(kind.__name__, (kind,), fields)


def inputs_of(module: nn.Module, name: str, x: Tensor) -> Tensor:
    """Return x as it counts in the product with a parameter."""
    stored = getattr(module, f"{name}_stored", None)
    return x if stored is None else stored.inputs(x)


def has_stored(module: nn.Module) -> bool:
    """Whether some of a module's parameters are made anew whenever they are read."""
    return any(isinstance(each, StoredMatrices) for each in module.children())

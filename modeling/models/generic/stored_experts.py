"""Experts that a checkpoint quantised: kept as they are stored, made into numbers for a product."""

from typing import Any

import torch
from torch import Tensor, nn

from configs.architectures.base import ArchitectureError
from sharding.loader import Weights
from sharding.slicing import Segments

SHARED = 32
"""Inputs of an output that share a scale."""

_HALVES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the lowest three bits of a code stand for; the fourth is the sign."""


class Mxfp4Matrices(nn.Module):
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
    if weights.device.type != "cpu":
        raise ArchitectureError(
            f"{name}: experts in mxfp4 are served on CPUs alone: take a checkpoint of the model "
            "in bfloat16"
        )
    experts, inputs, outputs = shape
    groups = experts, outputs, inputs // SHARED
    codes = weights.read_stored(f"{name}_blocks", (*groups, SHARED // 2), own)
    return Mxfp4Matrices(codes, weights.read_stored(f"{name}_scales", groups, own), weights.dtype)


def keep_stored(module: nn.Module, name: str, stored: Mxfp4Matrices) -> None:
    """Let a module's parameter be made of what is stored, whenever it is read."""
    del module._parameters[name]
    kept = f"{name}_stored"
    module.add_module(kept, stored)
    kind = type(module)
    made = property(lambda self: getattr(self, kept).numbers())
    fields: dict[str, Any] = {"__module__": kind.__module__, name: made}
    module.__class__ = type(kind.__name__, (kind,), fields)


def has_stored(module: nn.Module) -> bool:
    """Whether some of a module's parameters are made anew whenever they are read."""
    return any(isinstance(each, Mxfp4Matrices) for each in module.children())

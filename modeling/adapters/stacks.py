"""Factors of adapted modules, as files and merges give them to staging."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modeling.adapters.projection import ModulePosition


@dataclass(frozen=True)
class LoraModule:
    """One module's factors in float32: a [r, in], b [out, r] with the scaling folded in."""

    position: ModulePosition
    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class LoraStack:
    """Factors of one rank in several layers of a projection, ascending.

    a: [layers, r, in], float32 or the file's own narrower type. b: [layers, out, r], alike.
    scale: what B is still to be multiplied with, in float32.
    magnitudes: of DoRA, [layers, out] in float32; None for plain LoRA.
    biases: what is added to the outputs, [layers, out] in float32; None for nothing.
    base_biases: what replaces the base model's bias, [out] in float32, by the index in `layers`.
    """

    projection: int
    layers: tuple[int, ...]
    a: Tensor
    b: Tensor
    magnitudes: Tensor | None = None
    biases: Tensor | None = None
    base_biases: Mapping[int, Tensor] = field(default_factory=dict)
    scale: float = 1.0

    def scaled_b(self, dtype: torch.dtype) -> Tensor:
        """Return B with the scaling, rounded once from float32 to this type."""
        if self.scale == 1.0:
            return self.b.to(dtype)
        # torch multiplies half precision in float32; another type would be rounded to before.
        exact = self.b if self.b.dtype is dtype else self.b.float()
        return (exact * self.scale).to(dtype)

    def modules(self) -> Iterator[LoraModule]:
        """Yield the modules one by one."""
        b = self.scaled_b(torch.float32)
        for layer, own_a, own_b in zip(self.layers, self.a, b, strict=True):
            yield LoraModule(ModulePosition(self.projection, layer), own_a.float(), own_b)

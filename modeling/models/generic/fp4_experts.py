"""Experts in numbers of 4 bits (e2m1): nvfp4 and mxfp4, gpt-oss' own too, in one form."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from configs.architectures.base import ArchitectureError
from modeling.models.generic.stored_experts import (
    StoredMatrices,
    kept,
    kernel_scales,
    of_maps,
    scales_of_inputs,
)
from modeling.quantisation.fp4 import MXFP4, Fp4Weight, numbers_of, pack, rounded, unpack
from sharding.loader import Weights
from sharding.slicing import Segments

LEAST = 32
"""Inputs that have one byte of scales, or two."""

MOST_OF_EXPERTS = 127 + 1
"""The largest stored power of two of which their kernels make factors."""


class Fp4Matrices(StoredMatrices):
    """One matrix [out, in] for each expert: what a code stands for, times scales.

    codes, scales: of each expert as `fp4.pack` makes them. size: inputs that share a scale. outer:
    float64 [experts, maps], what nvfp4's scales are multiplied by; an expert's maps lie below each
    other.
    rounds: whether inputs are rounded. input_scales: float32 [experts, maps], the global scales of
    nvfp4's inputs; [experts, 1] where those of all maps are equal. dtype: of the numbers.
    is_turned: whether the module keeps matrices [in, out].
    """

    def __init__(
        self,
        experts: Iterable[tuple[Tensor, Tensor]],
        inputs: int,
        dtype: torch.dtype,
        outer: Tensor | None = None,
        rounds: bool = False,
        input_scales: Tensor | None = None,
        is_turned: bool = False,
    ) -> None:
        """experts: codes and scales of each, as `fp4.pack` makes them."""
        super().__init__()
        codes, scales = zip(*experts, strict=True)
        self.codes, self.scales = kept(torch.stack(codes)), kept(torch.stack(scales))
        self.inputs_of_output, self.size = inputs, LEAST // self.scales.shape[2]
        self.outer = None if outer is None else kept(outer)
        self.input_scales = None if input_scales is None else kept(input_scales)
        self.dtype, self.rounds, self.is_turned = dtype, rounds, is_turned

    @classmethod
    def of_maps(cls, experts: Sequence[Sequence[Fp4Weight]]) -> "Fp4Matrices":
        """Put together the maps of each expert, their outputs below each other."""
        first = experts[0][0]
        scales = scales_of_inputs(experts, "input_global_scale")
        pairs = (
            (
                torch.cat([each.codes for each in maps], 1),
                torch.cat([each.scales for each in maps], 2),
            )
            for maps in experts
        )
        outer = of_maps(experts, "outer")
        return cls(pairs, first.shape[1], first.dtype, outer, first.rounds, scales)

    @property
    def form(self) -> str:
        """Return its name."""
        return "mxfp4" if self.size == MXFP4 else "nvfp4"

    def numbers(self) -> Tensor:
        """[experts, out, in], or [experts, in, out]."""
        found = torch.stack([self._matrix(expert) for expert in range(len(self.codes))])
        return found.transpose(1, 2) if self.is_turned else found

    def inputs(self, x: Tensor, experts: Tensor) -> Sequence[Tensor]:
        """Return x as it counts in each map's product."""
        if not self.rounds:
            return (x,)
        if self.input_scales is None:
            return (rounded(x, self.size, None),)
        own = torch.split(self.input_scales[experts], 1, dim=1)
        return [rounded(x, self.size, scale) for scale in own]

    def kernel_fields(self) -> dict[str, Any]:
        """Return what a `StoredWeight` has besides; ArchitectureError where no kernel takes it."""
        most = int(self.scales.data.view(torch.uint8).max())
        if self.dtype is not torch.bfloat16 or (self.outer is None and most > MOST_OF_EXPERTS):
            raise ArchitectureError(
                f"experts in {self.form}: GPUs multiply them in bfloat16 (here {self.dtype}), in "
                f"mxfp4 with scales up to {MOST_OF_EXPERTS} (here {most}): set model.dtype to "
                "bfloat16, or take a checkpoint in bfloat16"
            )
        scales = kernel_scales(self.form, self.input_scales)
        outer = None if self.outer is None else self._rows(self.outer.data).float()
        return {"size": self.size, "outer": outer, "rounds": self.rounds, "input_scales": scales}

    def _matrix(self, expert: int) -> Tensor:
        """Return one expert's numbers."""
        outer = None if self.outer is None else self._rows(self.outer[expert])
        found = numbers_of(self.codes[expert], self.scales[expert], self.inputs_of_output, outer)
        return found.to(self.dtype)

    def _rows(self, of_maps: Tensor) -> Tensor:
        """Return for each output what is of its map: [..., maps] to [..., out]."""
        return of_maps.repeat_interleave(self.codes.shape[2] // of_maps.shape[-1], -1)


def is_stored(weights: Weights, name: str) -> bool:
    """Whether the checkpoint has codes and scales as gpt-oss does, instead of numbers."""
    return weights.lists(f"{name}_blocks")


def read_stored(
    weights: Weights, name: str, shape: tuple[int, ...], own: Segments | None
) -> Fp4Matrices:
    """Read codes and scales of some experts; shape: [experts, in, out]. own: None for all."""
    experts, inputs, outputs = shape
    groups = experts, outputs, inputs // MXFP4
    codes = weights.read_stored(f"{name}_blocks", (*groups, MXFP4 // 2), own)
    scales = weights.read_stored(f"{name}_scales", groups, own)
    pairs = (pack(unpack(each.flatten(1)), of) for each, of in zip(codes, scales, strict=True))
    return Fp4Matrices(pairs, inputs, weights.dtype, is_turned=True)

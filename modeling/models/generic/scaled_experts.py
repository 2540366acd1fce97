"""Experts in codes of 8 bits, fp8 or integers, in one form: with scales of outputs or of blocks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from configs.architectures.base import ArchitectureError
from configs.quantisation import Activations
from modeling.models.generic.fused_experts import HALF
from modeling.models.generic.stored_experts import (
    StoredMatrices,
    kept,
    kernel_scales,
    scales_of_inputs,
)
from modeling.quantisation.activations import rounded_by_group, rounded_by_token
from modeling.quantisation.fp8 import BlockFp8Weight, scales_of_blocks
from modeling.quantisation.scaled import ScaledWeight, below


class ScaledMatrices(StoredMatrices):
    """One matrix [out, in] for each expert: codes times scales.

    codes: fp8 or int8 [experts, out, in]; an expert's maps lie below each other. scales: float32
    [experts, out, groups of inputs]. input_scales: float32 [experts, maps], of STATIC activations;
    [experts, 1] where those of an expert's maps are equal.
    """

    def __init__(self, experts: Sequence[Sequence[ScaledWeight]]) -> None:
        """experts: the maps of each, which have one form and round their inputs alike."""
        super().__init__()
        first = experts[0][0]
        self._form, self.dtype, self.activations = first.form, first.dtype, first.activations
        codes, scales = zip(*map(below, experts), strict=True)
        stacked = torch.stack([each.view(torch.uint8) for each in codes]).view(codes[0].dtype)
        self.codes, self.scales = kept(stacked), kept(torch.stack(scales))
        inputs = scales_of_inputs(experts, "input_scale")
        self.input_scales = None if inputs is None else kept(inputs)
        self.group, self.group_of = 0, None
        if isinstance(first, BlockFp8Weight):
            self.group, self.group_of = first.group, kept(first.group_of.data)

    @property
    def form(self) -> str:
        """Return its name."""
        return self._form

    def numbers(self) -> Tensor:
        """[experts, out, in]."""
        return torch.stack([self._matrix(expert) for expert in range(len(self.codes))])

    def inputs(self, x: Tensor, experts: Tensor) -> Sequence[Tensor]:
        """Return x as it counts in each map's product."""
        if self.activations is Activations.NONE:
            return (x,)
        if self.activations is Activations.GROUP:
            return (rounded_by_group(x, self.group),)
        kind = self.codes.dtype
        if self.input_scales is None:
            return (rounded_by_token(x, None, kind),)
        own = torch.split(self.input_scales[experts], 1, dim=1)
        return [rounded_by_token(x, scale, kind) for scale in own]

    def kernel_fields(self) -> dict[str, Any]:
        """Return what a `StoredWeight` has; ArchitectureError where no kernel takes it."""
        if self.activations is Activations.NONE and self.dtype not in HALF:
            raise ArchitectureError(
                f"experts in {self.form}: GPUs multiply numbers of half precision with them, not "
                f"{self.dtype}: set model.dtype to bfloat16 or float16"
            )
        scales: Tensor | None = self.scales.data[..., 0]
        if self.group:
            is_rounded = self.activations is Activations.GROUP
            scales = scales_of_blocks(self.scales.data, self.group) if is_rounded else None
        if scales is None:
            raise ArchitectureError(
                f"experts in {self.form}: GPUs multiply them in blocks of 128 by 128 with scales "
                "for the inputs of a block: take a checkpoint in bfloat16"
            )
        return {
            "scales": scales.contiguous(),
            "rounds": self.activations is not Activations.NONE,
            "input_scales": kernel_scales(self.form, self.input_scales),
        }

    def _matrix(self, expert: int) -> Tensor:
        scales = self.scales[expert]
        own = scales if self.group_of is None else scales[:, self.group_of]
        return (self.codes[expert].float() * own).to(self.dtype)

"""Experts in numbers of 4 bits (e2m1): nvfp4 and mxfp4, gpt-oss' own too, in one form."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from configs.architectures.base import ArchitectureError
from modeling.models.generic.integer_experts import CHUNK, LEAST
from modeling.models.generic.stored_experts import (
    StoredMatrices,
    kept,
    kernel_scales,
    of_maps,
    scales_of_inputs,
)
from modeling.quantisation.fp4 import (
    MXFP4,
    Fp4Weight,
    rounded,
    scales_of_stored,
    table_of_codes,
    unpack,
)
from modeling.quantisation.integers import pack
from modeling.quantisation.integers import unpack as unpack_chunks
from sharding.loader import Weights
from sharding.slicing import Segments

LARGEST_POWER = 128
"""A kernel makes factors of mxfp4's scales up to it: 2 ** 1."""


class Fp4Matrices(StoredMatrices):
    """One matrix [out, in] for each expert: what a code stands for, times scales.

    codes: int16 [experts, in / 128, out, 32], as `integers.pack` makes them; zeros behind the last
    input. scales: int32, see `pack_scales`. size: inputs that share a scale. outer: float64
    [experts, maps], what nvfp4's scales are multiplied by; an expert's maps lie below each other.
    rounds: whether inputs are rounded. input_scales: float32 [experts, maps], the global scales of
    nvfp4's inputs; [experts, 1] where those of all maps are equal. dtype: of the numbers.
    is_turned: whether the module keeps matrices [in, out].
    """

    def __init__(
        self,
        experts: Iterable[tuple[Tensor, Tensor]],
        dtype: torch.dtype,
        outer: Tensor | None = None,
        rounds: bool = False,
        input_scales: Tensor | None = None,
        is_turned: bool = False,
    ) -> None:
        """experts: codes, uint8 [out, in], not packed, and scales of each, uint8 [out, groups]."""
        super().__init__()
        codes, scales = [], []
        for own, shared in experts:
            self.inputs_of_output, self.groups = own.shape[1], shared.shape[1]
            self.size = self.inputs_of_output // self.groups
            padded = F.pad(own, (0, -self.inputs_of_output % CHUNK))
            codes.append(pack(padded, CHUNK).view(torch.int16))
            scales.append(pack_scales(shared, self.size))
        self.codes, self.scales = kept(torch.stack(codes)), kept(torch.stack(scales))
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
                torch.cat([each.unpacked(slice(None)) for each in maps]),
                torch.cat([each.stored_scales() for each in maps]),
            )
            for maps in experts
        )
        return cls(pairs, first.dtype, of_maps(experts, "outer"), first.rounds, scales)

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
        if self.dtype is not torch.bfloat16 or (self.outer is None and most > LARGEST_POWER):
            raise ArchitectureError(
                f"experts in {self.form}: GPUs multiply them in bfloat16 (here {self.dtype}), in "
                f"mxfp4 with scales up to {LARGEST_POWER} (here {most}): set model.dtype to "
                "bfloat16, or take a checkpoint in bfloat16"
            )
        scales = kernel_scales(self.form, self.input_scales)
        outer = None if self.outer is None else self._rows(self.outer.data).float()
        return {"size": self.size, "outer": outer, "rounds": self.rounds, "input_scales": scales}

    def _matrix(self, expert: int) -> Tensor:
        """Return one expert's numbers; packages make them of bfloat16 in every type."""
        codes = unpack_chunks(self.codes[expert].view(torch.uint8))[:, : self.inputs_of_output]
        values = table_of_codes(codes.device)[codes.int()].view(-1, self.groups, self.size)
        stored, outer = unpack_scales(self.scales[expert], self.groups), None
        if self.outer is not None:
            stored = stored.view(torch.float8_e4m3fn)
            outer = self._rows(self.outer[expert])[:, None]
        found = values * scales_of_stored(stored, outer)[..., None]
        return found.flatten(1).bfloat16().to(self.dtype)

    def _rows(self, of_maps: Tensor) -> Tensor:
        """Return for each output what is of its map: [..., maps] to [..., out]."""
        return of_maps.repeat_interleave(self.codes.shape[2] // of_maps.shape[-1], -1)


def pack_scales(scales: Tensor, size: int) -> Tensor:
    """Put scales, uint8 [out, groups], into the order of kernels: int32 [in / 128, 32 / size, out].

    A word has those of four quarters of 128 inputs, the first quarter's lowest; where a quarter has
    two, they are in two words. Zeros behind the last.
    """
    each = LEAST // size
    whole = F.pad(scales, (0, -scales.shape[1] % (4 * each)))
    quarters = whole.view(len(scales), -1, 4, each)
    return quarters.permute(1, 3, 0, 2).flatten().view(torch.int32).view(-1, each, len(scales))


def unpack_scales(words: Tensor, groups: int) -> Tensor:
    """Undo `pack_scales`."""
    quarters = words.unsqueeze(-1).view(torch.uint8)
    return quarters.permute(2, 0, 3, 1).flatten(1)[:, :groups].contiguous()


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
    pairs = ((unpack(each.flatten(1)), of) for each, of in zip(codes, scales, strict=True))
    return Fp4Matrices(pairs, weights.dtype, is_turned=True)

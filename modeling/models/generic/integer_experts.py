"""Experts in integers of 4 bits: GPTQ's, AWQ's and those of compressed-tensors, in one form."""

from collections.abc import Sequence
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from configs.architectures.base import ArchitectureError
from modeling.models.generic.fused_experts import HALF
from modeling.models.generic.stored_experts import StoredMatrices, kept
from modeling.quantisation.integers import IntegerWeight, pack, unpack

CHUNK = 128
"""Inputs of which an output's codes lie together."""

LEAST = 32
"""Inputs that kernels multiply at once."""


class IntegerMatrices(StoredMatrices):
    """One matrix [out, in] for each expert: (code - zero) * scale.

    codes: int16 [experts, in / 128, out, 32], as `integers.pack` makes them of the inputs in the
    order of their groups; zeros behind the last one. scales: [experts, groups, out]. zeros: uint8
    of that shape; None where `middle` is every zero point. size: inputs of a group. order: int32
    [experts, in], the inputs in the order of their groups; None where they are in it.
    """

    def __init__(self, experts: Sequence[Sequence[IntegerWeight]]) -> None:
        """experts: the maps of each, their outputs below each other; ArchitectureError."""
        super().__init__()
        first = experts[0][0]
        self.dtype, self.inputs_of_output = first.dtype, first.shape[1]
        self.size = _shared_size([part for expert in experts for part in expert])
        orders = [_order(expert) for expert in experts]
        codes, scales, zeros = zip(*map(self._below, experts), strict=True)
        self.codes, self.scales = kept(torch.stack(codes)), kept(torch.stack(scales))
        points = torch.stack(zeros)
        self.middle = int(points[0, 0, 0])
        self.zeros = kept(points) if bool((points != self.middle).any()) else None
        is_ordered = all(order is None for order in orders)
        plain = torch.arange(self.inputs_of_output, device=first.device)
        found = [plain if order is None else order for order in orders]
        self.order = None if is_ordered else kept(torch.stack(found).int())

    @property
    def form(self) -> str:
        """Return its name."""
        return "integers of 4 bits"

    def numbers(self) -> Tensor:
        """[experts, out, in]."""
        return torch.stack([self._matrix(expert) for expert in range(len(self.codes))])

    def kernel_fields(self) -> dict[str, Any]:
        """Return what a `StoredWeight` has besides; ArchitectureError where no kernel takes it."""
        if self.dtype not in HALF:
            raise ArchitectureError(
                f"experts in {self.form}: GPUs multiply them in half precision, not in "
                f"{self.dtype}: set model.dtype to bfloat16 or float16"
            )
        beside = {"zeros": self.zeros, "order": self.order}
        tensors = {name: None if each is None else each.data for name, each in beside.items()}
        return {"group": self._kernel_group(), "middle": self.middle, **tensors}

    def _kernel_group(self) -> int:
        """Return the inputs of a group as kernels take it; ArchitectureError where none does."""
        if self.scales.shape[1] == 1:
            return -(-self.inputs_of_output // CHUNK) * CHUNK
        if self.size % LEAST:
            raise ArchitectureError(
                f"experts in {self.form}: GPUs multiply groups of inputs in parts of {LEAST}, a "
                f"rank's are whole in parts of {self.size}: take another checkpoint, or another "
                "number of ranks where tensor_parallel cuts groups"
            )
        return self.size

    def _matrix(self, expert: int) -> Tensor:
        codes = unpack(self.codes[expert].view(torch.uint8))[:, : self.inputs_of_output].short()
        codes -= self.middle if self.zeros is None else self._of_inputs(self.zeros[expert]).short()
        found = codes.to(self.dtype) * self._of_inputs(self.scales[expert])
        return found if self.order is None else found[:, torch.argsort(self.order[expert])]

    def _of_inputs(self, groups: Tensor) -> Tensor:
        """Return what groups [groups, out] say of each input: [out, in]."""
        return groups.repeat_interleave(self.size, 0)[: self.inputs_of_output].t()

    def _below(self, parts: Sequence[IntegerWeight]) -> tuple[Tensor, Tensor, Tensor]:
        """Return an expert's codes, scales and zero points."""
        codes = torch.cat([part.unpacked(slice(None)) for part in parts])
        order = parts[0].order
        codes = codes if order is None else codes[:, order]
        packed = pack(F.pad(codes, (0, -codes.shape[1] % CHUNK)), CHUNK).view(torch.int16)
        scales, zeros = [], []
        for part in parts:
            groups = _sorted(part)[:: self.size]
            points = torch.full_like(part.scales, part.middle, dtype=torch.uint8)
            scales.append(part.scales[groups])
            zeros.append((points if part.zeros is None else part.zeros)[groups])
        return packed, torch.cat(scales, 1), torch.cat(zeros, 1)


def _order(parts: Sequence[IntegerWeight]) -> Tensor | None:
    """Return the order of an expert's inputs; ArchitectureError where its maps have several."""
    if any(not torch.equal(part.group_of, parts[0].group_of) for part in parts[1:]):
        raise ArchitectureError(
            "experts' gate and up have their inputs in different orders of groups (g_idx): take a "
            "checkpoint without act-order (desc_act: false)"
        )
    return parts[0].order


def _sorted(part: IntegerWeight) -> Tensor:
    """Return the groups of inputs in their order, int64 [in]."""
    return part.group_of if part.order is None else part.group_of[part.order]


def _shared_size(parts: Sequence[IntegerWeight]) -> int:
    """Return of how many inputs, side by side, each has groups: ranks may cut through groups."""
    inputs = size = parts[0].shape[1]
    for part in parts:
        if part.size is not None:
            size = gcd(size, part.size)
        else:
            groups = _sorted(part)
            size = gcd(size, *(1 + torch.where(groups[1:] != groups[:-1])[0]).tolist())
    return size if size in (inputs, CHUNK) else gcd(size, CHUNK)

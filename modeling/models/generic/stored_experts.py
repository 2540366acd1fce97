"""Experts that a checkpoint quantised: kept as they are stored, made into numbers for a product."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from configs.architectures.base import ArchitectureError
from modeling.quantisation import mxfp4
from modeling.quantisation.base import QuantisedWeight
from modeling.quantisation.fp8 import BlockFp8Weight
from modeling.quantisation.mxfp4 import SHARED
from sharding.loader import Weights
from sharding.slicing import Segments


def kept(tensor: Tensor) -> nn.Parameter:
    """Make a parameter, so that its bytes are counted as the model's; of any type."""
    return nn.Parameter(tensor, requires_grad=False)


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

    def stack(self) -> tuple[Tensor, Tensor]:
        """Put all matrices into one tensor, for kernels: fp8 [experts, out, in], and its scales.

        The scales: float32 [experts, out / 128, in / 128]. ArchitectureError in other forms.
        """
        own = [each for each in self._experts if isinstance(each, BlockFp8Weight)]
        blocks = [each.blocks.data for each in own if each.blocks is not None]
        if len(blocks) < len(self._experts):
            raise ArchitectureError(
                f"experts in {self.form}: GPUs multiply them in blocks of 128 by 128 with scales "
                "for the inputs of a block: take a checkpoint in bfloat16"
            )
        codes = torch.stack([each.codes.data.view(torch.uint8) for each in own])
        codes = codes.view(own[0].codes.dtype)
        for number, each in enumerate(own):
            each.codes.data = codes[number]  # The one before is freed.
        return codes, torch.stack(blocks)


class Mxfp4Matrices(StoredMatrices):
    """One matrix [in, out] for each expert, in mxfp4, as gpt-oss is published.

    codes: uint8 [experts, out, in / 32, 16], two numbers (e2m1) a byte, the lower bits first.
    scales: uint8 [experts, out, in / 32], powers of two, and 127. dtype: of the numbers. is_packed:
    whether both are as `mxfp4.pack` makes them.
    """

    def __init__(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.codes, self.scales = kept(codes), kept(scales)
        self.dtype = dtype
        self.is_packed = False
        self.inputs_of_output = scales.shape[2] * SHARED

    @property
    def form(self) -> str:
        """Return its name."""
        return "mxfp4"

    def numbers(self) -> Tensor:
        """[experts, in, out]: exact in every float type here."""
        codes, scales = self.codes.data, self.scales.data
        if self.is_packed:
            pairs = zip(codes, scales, strict=True)
            parts = [mxfp4.unpack(*own, self.inputs_of_output) for own in pairs]
            codes, scales = (torch.stack(each) for each in zip(*parts, strict=True))
        return mxfp4.numbers(codes, scales, self.dtype).transpose(1, 2)

    def pack(self) -> tuple[Tensor, Tensor]:
        """Put them into the order of kernels, once; see `mxfp4.pack`.

        ArchitectureError where kernels would not be exact.
        """
        if self.dtype is not torch.bfloat16 or int(self.scales.max()) > mxfp4.LARGEST_SCALE:
            raise ArchitectureError(
                f"experts in mxfp4: GPUs multiply them in bfloat16 (here {self.dtype}) with scales "
                f"up to {mxfp4.LARGEST_SCALE} (here {int(self.scales.max())}): set model.dtype to "
                "bfloat16, or take a checkpoint in bfloat16"
            )
        pairs = zip(self.codes.data, self.scales.data, strict=True)
        parts = [mxfp4.pack(*own) for own in pairs]
        codes, scales = (torch.stack(each) for each in zip(*parts, strict=True))
        self.codes, self.scales = kept(codes), kept(scales)
        self.is_packed = True
        return self.codes.data, self.scales.data


def is_stored(weights: Weights, name: str) -> bool:
    """Whether the checkpoint has codes and scales instead of a tensor of numbers."""
    return weights.lists(f"{name}_blocks")


def read_stored(
    weights: Weights, name: str, shape: tuple[int, ...], own: Segments | None
) -> Mxfp4Matrices:
    """Read codes and scales of some experts; shape: [experts, in, out]. own: None for all."""
    experts, inputs, outputs = shape
    groups = experts, outputs, inputs // SHARED
    codes = weights.read_stored(f"{name}_blocks", (*groups, SHARED // 2), own)
    return Mxfp4Matrices(codes, weights.read_stored(f"{name}_scales", groups, own), weights.dtype)


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


def has_stored(module: nn.Module, kind: type[StoredMatrices] = StoredMatrices) -> bool:
    """Whether some of a module's parameters are made anew, from `kind`, whenever they are read."""
    return any(isinstance(each, kind) for each in module.children())

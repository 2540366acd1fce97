"""Experts that a checkpoint quantised: kept as they are stored, made into numbers for a product."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from configs.architectures.base import ArchitectureError
from modeling.quantisation.base import QuantisedWeight
from modeling.quantisation.fp8 import BlockFp8Weight


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

    def inputs(self, x: Tensor, experts: Tensor) -> Sequence[Tensor]:
        """Return x [rows, in] as it counts in a product: rounded where the form rounds activations.

        experts: int64, of the rows. Of several tensors each is multiplied with as many of the
        matrices' outputs, in their order.
        """
        return (x,)


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

    def inputs(self, x: Tensor, experts: Tensor) -> Sequence[Tensor]:
        """Return x as any expert rounds it."""
        return (self._experts[0].inputs(x),)

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


def keep_stored(module: nn.Module, name: str, stored: StoredMatrices) -> None:
    """Let a module's parameter be made of what is stored, whenever it is read."""
    del module._parameters[name]
    kept = f"{name}_stored"
    module.add_module(kept, stored)
    kind = type(module)
    made = property(lambda self: getattr(self, kept).numbers())
    fields: dict[str, Any] = {"__module__": kind.__module__, name: made}
    module.__class__ = type(kind.__name__, (kind,), fields)


def inputs_of(module: nn.Module, name: str, x: Tensor, experts: Tensor) -> Sequence[Tensor]:
    """Return x as it counts in the product with a parameter; see `StoredMatrices.inputs`."""
    stored: StoredMatrices | None = getattr(module, f"{name}_stored", None)
    return (x,) if stored is None else stored.inputs(x, experts)


def has_stored(module: nn.Module, kind: type[StoredMatrices] = StoredMatrices) -> bool:
    """Whether some of a module's parameters are made anew, from `kind`, whenever they are read."""
    return any(isinstance(each, kind) for each in module.children())

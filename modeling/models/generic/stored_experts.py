"""Experts that a checkpoint quantised: kept as they are stored, made into numbers for a product."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from configs.architectures.base import ArchitectureError
from modeling.quantisation.base import QuantisedWeight


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


def of_maps(experts: Sequence[Sequence[QuantisedWeight]], name: str) -> Tensor | None:
    """Return what all outputs of a map have alike, [experts, maps]; None where they have none."""
    if getattr(experts[0][0], name) is None:
        return None
    return torch.stack([torch.cat([getattr(each, name)[:1] for each in maps]) for maps in experts])


def scales_of_inputs(experts: Sequence[Sequence[QuantisedWeight]], name: str) -> Tensor | None:
    """Return the same of maps' inputs; [experts, 1] where those of an expert's maps are equal."""
    scales = of_maps(experts, name)
    if scales is None or not bool((scales == scales[:, :1]).all()):
        return scales
    return scales[:, :1].contiguous()


def kernel_scales(form: str, scales: Tensor | None) -> Tensor | None:
    """Return them as kernels take them, of each expert, or one of all; ArchitectureError."""
    if scales is None:
        return None
    if scales.shape[1] > 1:
        raise ArchitectureError(
            f"experts in {form}: an expert's gate and up have scales of their inputs that differ, "
            "which no kernel takes: take a checkpoint without such scales"
        )
    found = scales.detach().flatten()
    return found[:1] if bool((found == found[0]).all()) else found


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

"""Biases in a PEFT file: B's own (lora_bias), and the base model's as trained (bias).

A bias of B is added to the outputs as B A x is, with the same scaling. A trained bias of the base
model replaces its bias; the difference is added. A module without factors that has such a bias
(bias="all") takes one LoRA rank row of zeros.
"""

from collections.abc import Container, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modeling.adapters.faults import refuse
from modeling.adapters.peft.config import LoraPlan
from modeling.adapters.peft.ends import PREFIX
from modeling.adapters.peft.tensors import check_finite, check_outputs
from modeling.adapters.projection import (
    ModulePosition,
    Projection,
    ProjectionKind,
    in_foreign_code,
)
from sharding.tensor_file import TensorFile


@dataclass(frozen=True)
class BiasTensors:
    """The names of the biases in a file, by module.

    added: of B. replaced: of the base model.
    """

    added: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """Return the names of all these tensors."""
        return {*self.added.values(), *self.replaced.values()}

    def check(
        self,
        file: TensorFile,
        plan: LoraPlan,
        modules: Mapping[str, ModulePosition],
        known: Mapping[str, ModulePosition],
        projections: Sequence[Projection],
    ) -> None:
        """Refuse biases where they are not served, of another shape or incomplete.

        modules: those that have factors. known: all adaptable ones.
        """
        if plan.lora_bias:
            for module in modules.keys() - self.added.keys():
                refuse(f"lora_bias=True, but the file holds no {_of_b(module)}: save it again")
        if self.names and in_foreign_code(projections):
            refuse(
                "biases are not served over this model, which runs in transformers' own code: "
                'retrain with lora_bias=false and bias="none"'
            )
        if self.replaced and plan.invocation:
            refuse(f"bias={plan.bias!r}: it changes the model before the invocation too")
        for module, key in (*self.added.items(), *self.replaced.items()):
            projection = projections[known[module].projection]
            is_added = key in self.added.values()
            if projection.kind is not ProjectionKind.LINEAR or (is_added and module not in modules):
                refuse(
                    f"{key} is the bias of no adapted linear module inside the layers: merge the "
                    "adapter into the base model"
                )
            check_outputs(file, key, projection)
            if not (is_added or projection.has_bias):
                refuse(f"{key}: this model's {projection.name} has no bias")

    def alone(self, modules: Container[str]) -> list[str]:
        """Return the modules with a bias of the base model and no factors."""
        return [module for module in self.replaced if module not in modules]

    def read(
        self, file: TensorFile, modules: Sequence[str], scales: Sequence[float]
    ) -> tuple[Tensor | None, dict[int, Tensor]]:
        """Return B's biases, scaled, [modules, out], and the base model's, [out], by index.

        Both are float32. Refuses values that are not finite.
        """
        added = None
        # A module with a bias of the base model alone has no B.
        if any(module in self.added for module in modules):
            parts = [_read(file, self.added[module]) for module in modules]
            added = torch.stack(parts) * torch.tensor(scales).unsqueeze(1)
        replaced = {
            index: _read(file, self.replaced[module])
            for index, module in enumerate(modules)
            if module in self.replaced
        }
        return added, replaced


def find_biases(keys: Set[str], plan: LoraPlan, known: Mapping[str, ModulePosition]) -> BiasTensors:
    """Find a file's biases; known: all adaptable modules."""
    found = BiasTensors()
    for module in known:
        if plan.lora_bias and _of_b(module) in keys:
            found.added[module] = _of_b(module)
        names = (f"{PREFIX}{module}.base_layer.bias", f"{PREFIX}{module}.bias")
        if plan.bias != "none":
            found.replaced.update((module, name) for name in names if name in keys)
    return found


def _of_b(module: str) -> str:
    return f"{PREFIX}{module}.lora_B.bias"


def _read(file: TensorFile, key: str) -> Tensor:
    found = file.get_tensor(key).float()
    check_finite(key, found)
    return found

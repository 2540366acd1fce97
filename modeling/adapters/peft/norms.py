"""Weights and biases of norms in a PEFT file: modules_to_save, and biases of bias="all"."""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace

import torch

from modeling.adapters.faults import refuse
from modeling.adapters.peft.config import LoraPlan
from modeling.adapters.peft.ends import PREFIX, Matrix
from modeling.adapters.peft.tensors import check_finite, check_type
from modeling.adapters.projection import ModulePosition, NormVector, Projection, ProjectionKind
from sharding.tensor_file import TensorFile

BIAS_SUFFIX = ".bias"


@dataclass(frozen=True)
class NormTensors:
    """The parameters of norms that a file holds, by name.

    position: of the norms' projection.
    entries: those of modules_to_save that mean norms, or nothing in this model and this file.
    idle: tensors that PEFT saves of the same norms and does not read.
    """

    vectors: dict[str, NormVector] = field(default_factory=dict)
    position: ModulePosition | None = None
    entries: frozenset[str] = frozenset()
    idle: frozenset[str] = frozenset()

    def read(self, file: TensorFile, projection: Projection) -> Matrix:
        """Read them among the base model's; refuses values that are not finite."""
        assert self.position is not None
        assert projection.base is not None
        count, width = len(projection.base), projection.in_features
        rows = torch.zeros(-(-count // width), width)
        numbers = rows.view(-1)
        if not projection.base.is_meta:
            numbers[:count] = projection.base.cpu()
        for key, vector in self.vectors.items():
            found = file.get_tensor(key)
            check_finite(key, found)
            numbers[vector.start : vector.stop] = found.float()
        return Matrix(self.position, rows)


def find_norms(
    file: TensorFile, plan: LoraPlan, projections: Sequence[Projection], known: Iterable[str]
) -> NormTensors:
    """Find the norms that an adapter brings, checked; AdapterError says what is wrong.

    known: the paths of adaptable modules. PEFT's rule for modules_to_save: an entry ends a path.
    """
    index = next((i for i, p in enumerate(projections) if p.kind is ProjectionKind.NORMS), None)
    if index is None:
        return NormTensors()
    keys, vectors, entries = file.keys(), projections[index].vectors, set[str]()
    found: dict[str, NormVector] = {}
    others = {path for name in known for path in (name, name.rpartition(".")[0])}
    for entry in plan.modules_to_save:
        if any(path.endswith(entry) for path in others):
            continue
        own = [each for each in vectors if any(m.endswith(entry) for m in each.modules)]
        if own or not any(_is_of(key, entry) for key in keys):
            entries.add(entry)
            found |= dict(_saved(each, keys) for each in own)
    if plan.bias == "all":
        named = {PREFIX + name: each for each in vectors for name in each.names}
        found |= {key: each for key, each in named.items() if key in keys and _is_bias(key)}
    for key, vector in found.items():
        check_type(key, file.dtype(key))
        if file.shape(key) != (vector.size,):
            refuse(
                f"{key} has shape {list(file.shape(key))}, this model needs [{vector.size}]: is "
                "the adapter for another base model?"
            )
    position = ModulePosition(index, 0) if found else None
    idle = {name for key in found for name in _unread(key)}
    return NormTensors(found, position, frozenset(entries), frozenset(idle & keys))


def without_norms(plan: LoraPlan, norms: NormTensors) -> LoraPlan:
    """Return the plan without entries of modules_to_save that mean norms."""
    kept = tuple(entry for entry in plan.modules_to_save if entry not in norms.entries)
    return replace(plan, modules_to_save=kept)


def _saved(vector: NormVector, keys: Set[str]) -> tuple[str, NormVector]:
    present = [PREFIX + name for name in vector.names if PREFIX + name in keys]
    if len(present) != 1:
        refuse(
            f"modules_to_save requires {PREFIX}{vector.names[0]}, of which the file holds "
            f"{len(present)}: save the adapter again"
        )
    return present[0], vector


def _unread(key: str) -> tuple[str, ...]:
    """Return what bias="all" saves of a norm besides the tensor that is read."""
    path, _, name = key.rpartition(".")
    return tuple(f"{path}.{wrapper}.{name}" for wrapper in ("modules_to_save", "original_module"))


def _is_of(key: str, entry: str) -> bool:
    """Return whether a tensor is of a module, its path ending so."""
    return f"{entry}." in key


def _is_bias(key: str) -> bool:
    return key.endswith(BIAS_SUFFIX)

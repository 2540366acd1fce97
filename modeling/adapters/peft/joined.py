"""Adapters of q, k and v, or of gate and up, over a base model that fuses them in one matrix.

The parts' factors are one pair of factors of the fused map: their A one below the other, their B on
the diagonal, each in its part's rows. The rank is the sum of theirs. This changes no number.
"""

from collections.abc import Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import prod

import torch
from torch import Tensor

from modeling.adapters.faults import refuse
from modeling.adapters.peft.config import LoraPlan
from modeling.adapters.peft.ends import PREFIX
from modeling.adapters.peft.fused import FUSED
from modeling.adapters.peft.tensors import check_file_rank, check_type
from modeling.adapters.projection import ModulePosition, Projection, ProjectionKind
from sharding.extents import Scratch, Stacks
from sharding.tensor_file import TensorFile

_A, _B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True)
class Part:
    """A module of which the file has factors, and its first row in the fused map."""

    path: str
    start: int


@dataclass(frozen=True)
class JoinedPlan(LoraPlan):
    """A plan for fused modules, of which the config names the parts; joined: by the fused path."""

    joined: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)

    def rank_of(self, module: str) -> int:
        """Return the sum of the parts' ranks."""
        parts = self.joined.get(module)
        if parts is None:
            return super().rank_of(module)
        return sum(super(JoinedPlan, self).rank_of(part.path) for part in parts)

    def scaling_of(self, module: str) -> float:
        """Return 1 for a fused module: its B has the parts' scalings."""
        return 1.0 if module in self.joined else super().scaling_of(module)

    def left_out_by(self, module: str, is_linear: bool) -> str | None:
        """Return the field by which PEFT leaves out some part."""
        paths = [part.path for part in self.joined.get(module, ())] or [module]
        found = (super(JoinedPlan, self).left_out_by(path, is_linear) for path in paths)
        return next((each for each in found if each is not None), None)


class JoinedFile(TensorFile):
    """A file that has factors of fused modules instead of those of their parts."""

    def __init__(self, file: TensorFile, plan: JoinedPlan, known: Mapping[str, Projection]) -> None:
        """known: the fused modules' projections."""
        self.__dict__.update(file.__dict__)
        self._plan = plan
        self._known = known
        self._joined = {PREFIX + path + suffix: path for path in plan.joined for suffix in (_A, _B)}
        hidden = {key for path in plan.joined for key in self._keys_of(path)}
        self._names = dict.fromkeys([key for key in file.keys() if key not in hidden])  # noqa: SIM118
        self._names.update(dict.fromkeys(self._joined))

    def keys(self) -> KeysView[str]:
        """Return all names, of fused modules instead of their parts."""
        return self._names.keys()

    def shape(self, key: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        if key not in self._joined:
            return super().shape(key)
        path = self._joined[key]
        rank, projection = self._plan.rank_of(path), self._known[path]
        is_a = key.endswith(_A)
        return (rank, projection.in_features) if is_a else (projection.out_features, rank)

    def size(self, key: str) -> int:
        """Return a tensor's bytes."""
        return prod(self.shape(key)) * 4 if key in self._joined else super().size(key)

    def dtype(self, key: str) -> str:
        """Return a tensor's type."""
        return "F32" if key in self._joined else super().dtype(key)

    def get_tensor(self, key: str) -> Tensor:
        """Return a whole tensor."""
        if key not in self._joined:
            return super().get_tensor(key)
        path = self._joined[key]
        parts = self._plan.joined[path]
        if key.endswith(_A):
            return torch.cat([super(JoinedFile, self).get_tensor(PREFIX + part.path + _A).float()
                              for part in parts])  # fmt: skip
        found, first = torch.zeros(self.shape(key)), 0
        for part in parts:
            b = super().get_tensor(PREFIX + part.path + _B).float()
            rows, rank = b.shape
            own = found[part.start : part.start + rows, first : first + rank]
            own.copy_(b * self._plan.scaling_of(part.path))
            first += rank
        return found

    def stacks(self, stacks: Sequence[Sequence[str]], scratch: Scratch | None = None) -> Stacks:
        """Read stacks of tensors, each of one shape."""
        if not any(key in self._joined for keys in stacks for key in keys):
            return super().stacks(stacks, scratch)
        found = [torch.stack([self.get_tensor(key) for key in keys]) for keys in stacks]
        return Stacks(found, found)

    def _keys_of(self, path: str) -> Iterator[str]:
        for part in self._plan.joined[path]:
            yield from (PREFIX + part.path + suffix for suffix in (_A, _B))


def join_parts(
    file: TensorFile,
    plan: LoraPlan,
    known: Mapping[str, ModulePosition],
    projections: Sequence[Projection],
) -> tuple[TensorFile, LoraPlan]:
    """Return file and plan with factors of parts joined where the model has fused modules."""
    joined: dict[str, tuple[Part, ...]] = {}
    for path, position in known.items():
        parent, _, name = path.rpartition(".")
        projection = projections[position.projection]
        keys = file.keys()
        own = [f"{parent}.{part}" for part in FUSED.get(name, ())]
        present = [each for each in own if {PREFIX + each + _A, PREFIX + each + _B} <= keys]
        if present and projection.kind is ProjectionKind.LINEAR and PREFIX + path + _A not in keys:
            joined[path] = _parts(file, plan, own, present, projection)
    if not joined:
        return file, plan
    if plan.use_dora or plan.lora_bias or plan.bias != "none" or plan.parameters.names:
        refuse(
            f"the file adapts parts of {next(iter(joined))}, with DoRA, biases or as bare "
            "parameters: serve the base model that it was trained on, which has the parts"
        )
    values = {each.name: getattr(plan, each.name) for each in fields(plan)}
    whole = JoinedPlan(**values, joined=joined)
    known_to = {path: projections[known[path].projection] for path in joined}
    return JoinedFile(file, whole, known_to), whole


def _parts(
    file: TensorFile,
    plan: LoraPlan,
    own: Sequence[str],
    present: Sequence[str],
    projection: Projection,
) -> tuple[Part, ...]:
    """Return where each part begins: q's rows come first, k and v have as many each."""
    rows = {}
    for path in present:
        a, b = file.shape(PREFIX + path + _A), file.shape(PREFIX + path + _B)
        for suffix in (_A, _B):
            check_type(PREFIX + path + suffix, file.dtype(PREFIX + path + suffix))
        if len(a) != 2 or len(b) != 2 or a[1] != projection.in_features or a[0] != b[1]:
            refuse(f"adapter for another base model: {path} does not fit {projection.name}")
        check_file_rank(PREFIX + path + _A, a[0], plan.rank_of(path))
        rows[path] = b[0]
    total = projection.out_features
    size = next((rows[path] for path in own[1:] if path in rows), None)
    if size is None:
        size = (total - rows[own[0]]) // (len(own) - 1)
    starts = {path: total - size * (len(own) - index) for index, path in enumerate(own)}
    starts[own[0]] = 0
    wanted = {path: size for path in own[1:]} | {own[0]: total - size * (len(own) - 1)}
    if any(wanted[path] != count for path, count in rows.items()) or wanted[own[0]] < 1:
        refuse(f"adapter for another base model: the parts of {projection.name} have other sizes")
    return tuple(Part(path, starts[path]) for path in present)

"""Factors of routed experts that are tensors of three dimensions, as some trainers write them.

    A [E, r, in] or, of all experts alike, [1, r, in]; B [E, out, r] or [1, out, r]

Their names are those of modules without an expert's number (`experts.gate_proj`, or `experts.w1`
for gate, w2 for down, w3 for up). Where one factor alone is so, the other one is in a tensor for
each expert. PEFT does not read such files: the result is what it computes from the same factors in
a module for each expert.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from modeling.adapters.faults import refuse
from modeling.adapters.peft.config import LoraPlan
from modeling.adapters.peft.ends import PREFIX
from modeling.adapters.peft.tensors import check_file_rank, check_finite, check_shape, check_type
from modeling.adapters.projection import ExpertMatrices, ModulePosition, Projection
from modeling.adapters.stacks import LoraStack
from sharding.tensor_file import TensorFile

_A, _B = ".lora_A.weight", ".lora_B.weight"

_NAMES = {
    "experts.gate_proj": ("gate_proj", "w1"),
    "experts.up_proj": ("up_proj", "w3"),
    "experts.down_proj": ("down_proj", "w2"),
    "experts.gate_up_proj": ("gate_proj", "up_proj", "w1", "w3"),
}
"""By the projection's name; the last one's outputs are both, in turns."""


@dataclass(frozen=True)
class SharedFactors:
    """The factors of one map in a layer.

    layer: of this rank's first expert in the projection. count: of all experts. own: this rank's.
    a, b: names of the tensors: one of three dimensions, or one for each expert.
    """

    projection: int
    layer: int
    count: int
    own: range
    rank: int
    scaling: float
    a: tuple[str, ...]
    b: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors."""
        return (*self.a, *self.b)

    @property
    def positions(self) -> tuple[ModulePosition, ...]:
        """Return those of this rank's experts."""
        return tuple(ModulePosition(self.projection, self.layer + i) for i in range(len(self.own)))

    def stacks(self, file: TensorFile) -> Iterator[LoraStack]:
        """Yield the factors of this rank's experts; refuses values that are not finite."""
        layers = tuple(at.layer for at in self.positions)
        a, b = (self._read(file, names) for names in (self.a, self.b))
        yield LoraStack(self.projection, layers, a, b * self.scaling)

    def _read(self, file: TensorFile, names: Sequence[str]) -> Tensor:
        found = file.stack(names) if len(names) > 1 else file.get_tensor(names[0])
        check_finite(names[0], found)
        whole = found.float().expand(self.count, -1, -1)
        return whole[self.own.start : self.own.stop]


def find_shared(
    file: TensorFile, plan: LoraPlan, maps: Mapping[int, Projection]
) -> Iterator[SharedFactors]:
    """Yield what a file has of such factors, checked; AdapterError says what is wrong."""
    # Most files have none, and some have very many tensors.
    if not any(len(file.shape(key)) == 3 for key in file.keys()):  # noqa: SIM118
        return
    for i, projection in maps.items():
        experts = projection.experts
        assert experts is not None
        for index in range(len(projection.numbers)):
            for parent in _parents(projection, experts, index):
                for name in _NAMES.get(projection.name, ()):
                    path = f"{parent}.{name}"
                    if any(_is_stacked(file, PREFIX + path + end) for end in (_A, _B)):
                        yield _factors(file, plan, i, projection, index, path)


def _parents(projection: Projection, experts: ExpertMatrices, index: int) -> tuple[str, ...]:
    """Paths of a layer's experts' module, the older ones too."""
    older = (path.partition(".{expert}")[0] for path in experts.older)
    named = (path.format(layer=projection.numbers[index]) for path in older)
    return tuple(dict.fromkeys((*projection.modules(index * len(experts.own)), *named)))


def _is_stacked(file: TensorFile, key: str) -> bool:
    return key in file.keys() and len(file.shape(key)) == 3  # noqa: SIM118


def _factors(
    file: TensorFile, plan: LoraPlan, at: int, projection: Projection, index: int, path: str
) -> SharedFactors:
    """Check the factors of one map; path: its name without an expert's number."""
    experts = projection.experts
    assert experts is not None
    if projection.name == "experts.gate_up_proj":
        refuse(
            f"{path} has factors of gate or up alone, which this model has in turns in one "
            "matrix: merge the adapter into the base model"
        )
    parent, _, name = path.rpartition(".")
    single = [f"{parent}.{expert}.{name}" for expert in range(experts.count)]
    keys, named = {}, {}
    for end in (_A, _B):
        is_stacked = _is_stacked(file, PREFIX + path + end)
        named[end] = path if is_stacked else single[0]
        keys[end] = tuple(PREFIX + each + end for each in ([path] if is_stacked else single))
    rank, scaling = plan.rank_of(named[_A]), plan.scaling_of(named[_A])
    for end, own in keys.items():
        for key in own:
            _check(file, key, end == _A, projection, rank)
    _check_target(plan, projection, parent)
    first = index * len(experts.own)
    return SharedFactors(at, first, experts.count, experts.own, rank, scaling, keys[_A], keys[_B])


def _check(file: TensorFile, key: str, is_a: bool, projection: Projection, rank: int) -> None:
    if key not in file.keys():  # noqa: SIM118 - not a dictionary
        refuse(f"{key} is missing beside its partner: the file is incomplete")
    check_type(key, file.dtype(key))
    shape, experts = file.shape(key), projection.experts
    assert experts is not None
    if len(shape) == 3:
        if shape[0] not in (1, experts.count):
            refuse(
                f"{key} has shape {list(shape)}, this model has {experts.count} experts: the "
                "adapter is for another base model"
            )
        shape = shape[1:]
    check_shape(key, shape, is_a, projection)
    check_file_rank(key, shape[not is_a], rank)


def _check_target(plan: LoraPlan, projection: Projection, parent: str) -> None:
    """Refuse what adapter_config.json leaves out by each of the map's names."""
    names = _NAMES[projection.name]
    paths = [f"{parent}.{part}{name}" for name in names for part in ("", "0.")]
    left_out = [plan.left_out_by(path, True) for path in paths]
    if None not in left_out:
        refuse(f"the file adapts {paths[0]}, which {left_out[0]} of adapter_config.json leaves out")

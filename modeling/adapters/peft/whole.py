"""Whole linear maps in a PEFT file (modules_to_save)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from modeling.adapters.faults import refuse
from modeling.adapters.peft.config import LoraPlan
from modeling.adapters.peft.ends import INSIDE_ONLY_ADVICE, PREFIX, WEIGHT_SUFFIX, Matrix
from modeling.adapters.peft.tensors import check_finite, check_type
from modeling.adapters.projection import (
    ModulePosition,
    Projection,
    ProjectionKind,
    select_columns,
)
from sharding.tensor_file import TensorFile

_UNREAD = ("original_module.weight", "original_module.bias", "modules_to_save.bias")
"""The base model's, and with bias="all" the own bias once more."""


@dataclass(frozen=True)
class WholeLinearTensors:
    """The weights of whole linear maps in a file, by name, and the module paths of the maps.

    modules: the position of each map that is replaced. entries: those of modules_to_save that mean
    linear maps.
    """

    modules: dict[str, ModulePosition] = field(default_factory=dict)
    pools: dict[int, int] = field(default_factory=dict)
    entries: frozenset[str] = frozenset()

    @property
    def names(self) -> set[str]:
        """Return the names of the weights, and of what PEFT saves beside them and does not read."""
        idle = {f"{PREFIX}{module}.{each}" for module in self.modules for each in _UNREAD}
        return {_weight(module) for module in self.modules} | idle

    @property
    def positions(self) -> list[ModulePosition]:
        """Return where the weights are kept."""
        found = self.modules.values()
        kept = ((self.pools.get(at.projection), at.layer) for at in found)
        return [ModulePosition(pool, layer) for pool, layer in kept if pool is not None]

    def check(self, file: TensorFile, projections: Sequence[Projection]) -> None:
        """Refuse maps that this server does not take, and weights of another model."""
        for module, at in self.modules.items():
            _check(module, projections[at.projection], at.projection in self.pools, file)

    def read(self, file: TensorFile, projections: Sequence[Projection]) -> Iterator[Matrix]:
        """Yield this rank's part of each; refuses values that are not finite."""
        for (module, at), kept in zip(self.modules.items(), self.positions, strict=True):
            linear, pool = projections[at.projection], projections[kept.projection]
            weight = file.get_tensor(_weight(module))
            check_finite(_weight(module), weight)
            if linear.stored_transposed:
                weight = weight.t()
            rows = select_columns(weight.t(), linear.outputs).t()
            own = select_columns(rows, linear.inputs)
            yield Matrix(kept, own, at.layer * pool.blocks)


def find_whole(
    file: TensorFile,
    plan: LoraPlan,
    projections: Sequence[Projection],
    known: Mapping[str, ModulePosition],
) -> WholeLinearTensors:
    """Find the linear maps that an adapter brings, checked; AdapterError says what is wrong.

    known: all adaptable modules. PEFT's rule for modules_to_save: an entry ends a path.
    """
    pools = {
        each.replaces: index
        for index, each in enumerate(projections)
        if each.kind is ProjectionKind.WHOLE_LINEAR
    }
    linear = {
        module: at
        for module, at in known.items()
        if projections[at.projection].kind is ProjectionKind.LINEAR
    }
    found: dict[str, ModulePosition] = {}
    entries = set()
    for entry in plan.modules_to_save:
        meant = {module: at for module, at in linear.items() if module.endswith(entry)}
        parents = {module.rpartition(".")[0] for module in linear}
        if not meant or any(parent.endswith(entry) for parent in parents):
            continue
        entries.add(entry)
        for at in dict.fromkeys(meant.values()):
            paths = [module for module, own in meant.items() if own == at]
            found[_present(paths, file)] = at
    return WholeLinearTensors(found, pools, frozenset(entries))


def without_whole(plan: LoraPlan, whole: WholeLinearTensors) -> LoraPlan:
    """Return the plan without entries of modules_to_save that mean linear maps."""
    kept = tuple(entry for entry in plan.modules_to_save if entry not in whole.entries)
    return replace(plan, modules_to_save=kept)


def trained_biases(whole: WholeLinearTensors, file: TensorFile) -> dict[str, str]:
    """Return the biases that the maps bring with their weights, by module."""
    names = {module: f"{PREFIX}{module}.bias" for module in whole.modules}
    return {module: name for module, name in names.items() if name in file.keys()}  # noqa: SIM118


def _present(paths: Sequence[str], file: TensorFile) -> str:
    present = [path for path in paths if _weight(path) in file.keys()]  # noqa: SIM118
    if len(present) != 1:
        refuse(
            f"modules_to_save requires {_weight(paths[0])}, of which the file holds "
            f"{len(present)}: save the adapter again"
        )
    return present[0]


def _check(module: str, linear: Projection, has_pool: bool, file: TensorFile) -> None:
    key = _weight(module)
    if not linear.can_adapt_ends:
        refuse(f"modules_to_save names {module}, a whole linear map: {INSIDE_ONLY_ADVICE}")
    if not has_pool:
        refuse(
            f"modules_to_save names {module}, a whole linear map, which this server does not take: "
            f"start it with adapters.whole_linears {{{linear.name}: 1}}, or train the module by "
            "target_modules"
        )
    check_type(key, file.dtype(key))
    shape = (linear.out_features, linear.in_features)
    wanted = shape[::-1] if linear.stored_transposed else shape
    if file.shape(key) != wanted:
        refuse(
            f"{key} has shape {list(file.shape(key))}, this model needs {list(wanted)}: is the "
            "adapter for another base model?"
        )
    if linear.has_bias and f"{PREFIX}{module}.bias" not in file.keys():  # noqa: SIM118
        refuse(f"{PREFIX}{module}.bias is missing beside {key}: save the adapter again")


def _weight(module: str) -> str:
    return f"{PREFIX}{module}{WEIGHT_SUFFIX}"

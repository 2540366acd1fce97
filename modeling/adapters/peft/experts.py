"""Factors of routed experts in a PEFT file.

    E experts, rank r: A [E r, in], row e r + k is expert e's row k
                       B [out, r E], column k E + e is expert e's column k

So PEFT keeps the factors of a parameter of three dimensions (`ParamWrapper`), which
`target_parameters` names or PEFT's own conversion of target_modules. Several parameters of one
module are wrapped one in the other, the module's first one innermost: each that is further out has
a `base_layer` less in its name.
Files of PEFT over transformers 4 have a module for each expert, with factors as any linear module.
`shared_experts.py` has the form of other trainers.
"""

import itertools
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from modeling.adapters.expert_pages import AdaptedExpert, ExpertPages, pages_of_maps
from modeling.adapters.faults import refuse
from modeling.adapters.peft.config import LoraPlan
from modeling.adapters.peft.ends import PREFIX
from modeling.adapters.peft.shared_experts import SharedFactors, find_shared
from modeling.adapters.peft.tensors import check_file_rank, check_finite, check_shape, check_type
from modeling.adapters.projection import ModulePosition, Projection, ProjectionKind
from modeling.adapters.stacks import LoraStack
from sharding.tensor_file import TensorFile

_A, _B = ".lora_A.weight", ".lora_B.weight"
_OF_EXPERT = re.compile(r"(?P<parent>.+\.experts)\.(?P<expert>\d{1,6})\.(?P<name>[^.]+)$")


@dataclass(frozen=True)
class ExpertMap:
    """One projection's part of the factors of a layer's parameter.

    layer: of the layer's first expert in the projection.
    rows: of B's outputs. ranks: of the rank, for each expert.
    """

    projection: int
    layer: int
    rows: slice
    ranks: slice

    def positions(self, count: int) -> tuple[ModulePosition, ...]:
        """Return those of so many experts."""
        layers = range(self.layer, self.layer + count)
        return tuple(ModulePosition(self.projection, layer) for layer in layers)


@dataclass(frozen=True)
class ExpertParameter:
    """Factors of all experts of a layer.

    path: of their tensors, without the ends. count: of experts. own: those that this rank keeps.
    identities: how many have factors behind these, which change nothing.
    """

    path: str
    count: int
    own: range
    rank: int
    scaling: float
    maps: tuple[ExpertMap, ...]
    identities: int = 0

    @property
    def names(self) -> tuple[str, str]:
        """Return the names of both tensors."""
        return PREFIX + self.path + _A, PREFIX + self.path + _B

    def stacks(self, file: TensorFile) -> Iterator[LoraStack]:
        """Yield each map's factors of this rank's experts; refuses values that are not finite."""
        kept = slice(self.own.start, self.own.stop)
        a, b = (factors[kept] for factors in self.read(file))
        for each in self.maps:
            layers = tuple(range(each.layer, each.layer + len(self.own)))
            own = b[:, each.rows, each.ranks].float() * self.scaling
            yield LoraStack(each.projection, layers, a[:, each.ranks], own)

    def read(self, file: TensorFile) -> tuple[Tensor, Tensor]:
        """Return A [experts, r, in] and B [experts, out, r]."""
        found = [file.get_tensor(name) for name in self.names]
        for name, tensor in zip(self.names, found, strict=True):
            check_finite(name, tensor)
        a, b = found
        count = self.count + self.identities
        # A's type may not be wider than float32.
        a = a.view(count, self.rank, -1)[: self.count].float()
        return a, b.view(len(b), self.rank, count).permute(2, 0, 1)[: self.count]


@dataclass(frozen=True)
class ExpertTensors:
    """What a file adapts of the experts: whole parameters, and modules by their paths.

    foreign: modules of other ranks' experts. ranks: of every adapted position. scalings: of the
    modules. shared: factors in tensors of three dimensions. pages: by the projection.
    """

    parameters: tuple[ExpertParameter, ...] = ()
    modules: Mapping[str, ModulePosition] = field(default_factory=dict)
    foreign: Mapping[str, AdaptedExpert] = field(default_factory=dict)
    ranks: Mapping[ModulePosition, int] = field(default_factory=dict)
    scalings: Mapping[str, float] = field(default_factory=dict)
    shared: tuple[SharedFactors, ...] = ()
    pages: Mapping[int, ExpertPages] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """Return the names of all tensors."""
        whole = {name for each in self.parameters for name in each.names}
        whole |= {name for each in self.shared for name in each.names}
        return whole | {PREFIX + path + end for path in self.paths for end in (_A, _B)}

    @property
    def paths(self) -> set[str]:
        """Return the paths of all modules of single experts."""
        return {*self.modules, *self.foreign}

    def parts(self) -> Iterator["ExpertPart"]:
        """Yield what is read together: a parameter, or a layer's modules that have one rank."""
        yield from self.parameters
        yield from self.shared
        for _, group in itertools.groupby(self.modules, self._alike):
            yield ExpertModules({path: self.modules[path] for path in group}, self.scalings)

    def _alike(self, path: str) -> tuple[int, str, int]:
        at = self.modules[path]
        return at.projection, path.rpartition(".experts.")[0], self.ranks[at]


@dataclass(frozen=True)
class ExpertModules:
    """Modules of single experts of one projection and rank; scalings: of more modules, too."""

    modules: Mapping[str, ModulePosition]
    scalings: Mapping[str, float]

    def stacks(self, file: TensorFile) -> Iterator[LoraStack]:
        """Yield their factors; refuses values that are not finite."""
        names = {end: [PREFIX + path + end for path in self.modules] for end in (_A, _B)}
        a, b = (file.stack(names[end]).float() for end in (_A, _B))
        for end, factors in ((_A, a), (_B, b)):
            check_finite(names[end][0], factors)
        scales = b.new_tensor([self.scalings[path] for path in self.modules]).view(-1, 1, 1)
        positions = list(self.modules.values())
        layers = tuple(at.layer for at in positions)
        yield LoraStack(positions[0].projection, layers, a, b * scales)


ExpertPart = ExpertParameter | ExpertModules | SharedFactors


def find_experts(
    file: TensorFile, plan: LoraPlan, projections: Sequence[Projection]
) -> ExpertTensors:
    """Find the factors of experts, checked; AdapterError says what is wrong.

    It reads values of B where those decide how many pages the adapter takes.
    """
    maps = {i: p for i, p in enumerate(projections) if p.kind is ProjectionKind.EXPERTS}
    if not maps:
        return ExpertTensors()
    parameters = tuple(_parameters(file, plan, maps))
    shared = tuple(find_shared(file, plan, maps))
    modules, foreign = _modules(file, plan, maps, {key for each in shared for key in each.names})
    ranks = {at: plan.rank_of(path) for path, at in modules.items()}
    for each in parameters:
        for own in each.maps:
            taken = own.positions(len(each.own))
            if not ranks.keys().isdisjoint(taken):
                refuse(f"{each.path} is adapted twice, by its parameter and by its modules")
            ranks |= dict.fromkeys(taken, own.ranks.stop - own.ranks.start)
    for factors in shared:
        if not ranks.keys().isdisjoint(factors.positions):
            refuse(f"{factors.a[0]} is of a module that is adapted twice: save the adapter again")
        ranks |= dict.fromkeys(factors.positions, factors.rank)
    if ranks and (plan.use_dora or plan.lora_bias or plan.invocation):
        refuse(
            "use_dora, lora_bias or alora_invocation_tokens with factors of experts: PEFT has no "
            "such adapters; retrain without the experts"
        )
    scalings = {path: plan.scaling_of(path) for path in modules}
    adapted = [(_expert_of(maps, at), rank) for at, rank in ranks.items()]
    adapted += [(own, plan.rank_of(path)) for path, own in foreign.items()]
    adapted += [(own, each.rank) for each in shared for own in _all(each.projection, each.count)]
    for parameter, own_map in ((each, own) for each in parameters for own in each.maps):
        rank = own_map.ranks.stop - own_map.ranks.start
        adapted += [(own, rank) for own in _all(own_map.projection, parameter.count)]
    matrices = {i: each.experts for i, each in maps.items() if each.experts is not None}
    pages = pages_of_maps(matrices, adapted)
    return ExpertTensors(parameters, modules, foreign, ranks, scalings, shared, pages)


def _expert_of(maps: Mapping[int, Projection], at: ModulePosition) -> AdaptedExpert:
    experts = maps[at.projection].experts
    assert experts is not None
    return AdaptedExpert(at.projection, experts.own[at.layer % len(experts.own)])


def _all(projection: int, count: int) -> list[AdaptedExpert]:
    return [AdaptedExpert(projection, expert) for expert in range(count)]


def _parameters(
    file: TensorFile, plan: LoraPlan, maps: Mapping[int, Projection]
) -> Iterator[ExpertParameter]:
    """Yield the parameters of three dimensions that file and config adapt."""
    keys, splits = file.keys(), True
    for (_, index), own in _by_module(maps).items():
        first = next(iter(own.values()))
        experts = first.experts
        assert experts is not None
        for path in first.modules(index * len(experts.own)):
            named = [p for p in experts.parameters if _is_named(plan, f"{path}.{p}")]
            for depth, parameter in enumerate(reversed(named)):
                inside = path + ".base_layer" * depth
                if not {PREFIX + inside + _A, PREFIX + inside + _B} & keys:
                    continue
                fitting = {i: p for i, p in own.items() if _parameter_of(p) == parameter}
                if not fitting:
                    refuse(
                        f"target_parameters: {path}.{parameter} is not served, only the experts' "
                        "matrices: merge the adapter into the base model"
                    )
                found = _parameter(file, plan, f"{path}.{parameter}", inside, index, fitting)
                if splits and len(found.maps) > 1:
                    split = _split(file, found)
                    # One layer that cannot be split shows that the others need no look.
                    splits, found = split is not None, split or found
                yield found


def _is_named(plan: LoraPlan, path: str) -> bool:
    return bool(plan.parameters.names) and plan.parameters.include(path, False)


def _by_module(maps: Mapping[int, Projection]) -> dict[tuple[str, int], dict[int, Projection]]:
    """The maps of each layer's experts, by the module's template and the layer's index."""
    found: dict[tuple[str, int], dict[int, Projection]] = {}
    for i, each in maps.items():
        assert each.experts is not None
        for index in range(len(each.numbers)):
            found.setdefault((each.module, index), {})[i] = each
    return found


def _parameter_of(projection: Projection) -> str:
    assert projection.experts is not None
    return projection.experts.parameter


def _parameter(
    file: TensorFile,
    plan: LoraPlan,
    name: str,
    path: str,
    index: int,
    maps: Mapping[int, Projection],
) -> ExpertParameter:
    """Check both factors of a parameter; maps: those that are its outputs, one after the other."""
    first = next(iter(maps.values()))
    experts = first.experts
    assert experts is not None
    rank, count = plan.rank_of(name), experts.count + experts.identities
    wanted = {
        PREFIX + path + _A: (rank * count, first.in_features),
        PREFIX + path + _B: (experts.total, rank * count),
    }
    for key, shape in wanted.items():
        if key not in file.keys():  # noqa: SIM118 - not a dictionary
            refuse(f"{key} is missing beside its partner: the file is incomplete")
        check_type(key, file.dtype(key))
        if file.shape(key) != shape:
            refuse(
                f"{key} has shape {list(file.shape(key))}, this model's {count} experts "
                f"and rank {rank} need {list(shape)}: the adapter is for another base model, or "
                "its files do not belong together"
            )
    own = tuple(
        ExpertMap(i, index * len(experts.own), _rows(each), slice(0, rank))
        for i, each in maps.items()
    )
    sizes = (path, experts.count, experts.own, rank, plan.scaling_of(name))
    return ExpertParameter(*sizes, own, experts.identities)


def _rows(projection: Projection) -> slice:
    assert projection.experts is not None
    start = projection.experts.start
    return slice(start, start + projection.out_features)


def _split(file: TensorFile, found: ExpertParameter) -> ExpertParameter | None:
    """Return factors of which each map reads its own part of the rank; None if they are not so.

    PEFT makes those of gate and up, which were two modules, so: B has zeros elsewhere.
    """
    parts = len(found.maps)
    if found.rank % parts:
        return None
    each, (_, b) = found.rank // parts, found.read(file)
    ranks = [slice(i * each, (i + 1) * each) for i in range(parts)]
    for one, other in itertools.product(range(parts), repeat=2):
        if one != other and bool(b[:, found.maps[one].rows, ranks[other]].any()):
            return None
    maps = [
        ExpertMap(one.projection, one.layer, one.rows, own)
        for one, own in zip(found.maps, ranks, strict=True)
    ]
    return replace(found, maps=tuple(maps))


def _modules(
    file: TensorFile, plan: LoraPlan, maps: Mapping[int, Projection], taken: Container[str]
) -> tuple[dict[str, ModulePosition], dict[str, AdaptedExpert]]:
    """Return the modules of single experts that a file adapts, in the model's order.

    And those that are other ranks'. taken: tensors that are read otherwise.
    """
    known = {
        (template.format(layer=number, expert="#")): (i, index)
        for i, each in maps.items()
        if each.experts is not None
        for template in each.experts.older
        for index, number in enumerate(each.numbers)
    }
    parents = {path for each in maps.values() for path in _parents(each)}
    found: dict[str, ModulePosition] = {}
    foreign: dict[str, AdaptedExpert] = {}
    for key in file.keys():  # noqa: SIM118 - not a dictionary
        path = key.removeprefix(PREFIX).removesuffix(_A)
        is_own = key.endswith(_A) and key not in taken
        named = _OF_EXPERT.match(path) if is_own else None
        if named is None:
            continue
        at = known.get(f"{named['parent']}.#.{named['name']}")
        if at is not None:
            projection = maps[at[0]]
            assert projection.experts is not None
            own, expert = projection.experts.own, int(named["expert"])
            if expert in own:
                layer = at[1] * len(own) + expert - own.start
                found[path] = ModulePosition(at[0], layer)
            elif expert < projection.experts.count:
                foreign[path] = AdaptedExpert(at[0], expert)
        elif named["parent"] in parents:
            refuse(
                f"{key} is of a module of one expert, which PEFT does not convert for this model: "
                "retrain it with target_parameters"
            )
    indices = {path: at.projection for path, at in found.items()}
    for path, index in (indices | {path: at.projection for path, at in foreign.items()}).items():
        _check_module(file, plan, path, maps[index])
    in_order = sorted(found.items(), key=lambda item: (item[1].projection, item[1].layer))
    return dict(in_order), foreign


def _parents(projection: Projection) -> Iterator[str]:
    experts = projection.experts
    assert experts is not None
    for index in range(len(projection.numbers)):
        yield from projection.modules(index * len(experts.own))


def _check_module(file: TensorFile, plan: LoraPlan, path: str, projection: Projection) -> None:
    left_out = plan.left_out_by(path, True)
    if left_out is not None:
        refuse(f"the file adapts {path}, which {left_out} of adapter_config.json leaves out")
    for end, is_a in ((_A, True), (_B, False)):
        key = PREFIX + path + end
        if key not in file.keys():  # noqa: SIM118 - not a dictionary
            refuse(f"{key} is missing beside its partner: the file is incomplete")
        check_type(key, file.dtype(key))
        check_shape(key, file.shape(key), is_a, projection)
        check_file_rank(key, file.shape(key)[not is_a], plan.rank_of(path))
    experts = projection.experts
    assert experts is not None
    is_fused = experts.total > projection.out_features
    if is_fused and plan.scaling_of(path) != plan.alpha / plan.rank:
        refuse(
            f"use_rslora, rank_pattern or alpha_pattern at {path}: PEFT joins such modules with "
            "another scaling than they were trained with; merge the adapter into the base model"
        )

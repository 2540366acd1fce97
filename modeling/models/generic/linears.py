"""Replaces the linear layers of a transformers model by ours, those of one input as one product."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedModel

from modeling.adapters.linear import AdapterColumnLinear, AdapterRowLinear
from modeling.adapters.projection import Projection
from modeling.models.generic.cuts import CutPlan, LinearCut, Style
from modeling.models.generic.modules import GenericLinear, MergedColumns, MergedPart
from modeling.models.generic.step import CurrentStep
from sharding.linear import ColumnParallelLinear, ColumnPart, RowParallelLinear
from sharding.loader import Weights
from sharding.slicing import width

NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")
"""A part of a path that counts: the layer's number, or an expert's."""

MERGED = (("q_proj", "k_proj", "v_proj"), ("q_proj", "k_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that read the same input; keys may be the values too."""


NOT_ADAPTED = dict.fromkeys(
    ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"), "out_proj"
)
"""Layers that PEFT takes no LoRA on, by model_type: transformers' kernels read their weights."""


_LINEARS = ("FalconLinear",)
"""Classes that compute what nn.Linear does."""


@dataclass(frozen=True)
class FoundLinear:
    """A linear layer of the model.

    kind: what it shares with the same layer of other decoder layers: template and sizes.
    """

    path: str
    module: nn.Linear
    cut: LinearCut

    @property
    def kind(self) -> tuple[str, int, int]:
        """Return the path with the layer left open, and both sizes."""
        template = NUMBER.sub("{layer}", self.path)
        return template, self.module.in_features, self.module.out_features


@dataclass
class Positions:
    """Which projection each adaptable linear layer is, and its layer there."""

    projections: list[Projection] = field(default_factory=list)
    of: dict[str, tuple[int, int]] = field(default_factory=dict)


def replace_linears(
    causal: PreTrainedModel,
    plan: CutPlan,
    weights: Weights,
    step: CurrentStep,
    idle: Collection[str] = (),
) -> tuple[Projection, ...]:
    """Replace every nn.Linear of the decoder, reading its weights; returns what adapters change.

    idle: ends of the paths of those that stay, see `ModelArchitecture.idle_modules`.
    Layers between decoder and head stay: they compute only the tokens that get logits, and the
    step's adapters are by all of its tokens.
    """
    found = list(_linears(causal, plan, idle))
    positions = _positions(found)
    for group in _merged(found):
        base = _columns(group, weights)
        indices = [positions.of[each.path] for each in group]
        ((layer,), which) = {layer for _, layer in indices}, tuple(index for index, _ in indices)
        merged = MergedColumns(AdapterColumnLinear(base, layer, which), len(group), step)
        for index, each in enumerate(group):
            start = base.offsets[index]
            stop = start + width(each.cut.outputs)
            part = MergedPart(merged, start, stop, index == 0)
            _replace(causal, each.path, part)
    done = {each.path for group in _merged(found) for each in group}
    for each in found:
        if each.path not in done:
            projection, layer = positions.of[each.path]
            linear = _linear(each, weights, projection, layer)
            _replace(causal, each.path, GenericLinear(linear, step))
    return tuple(positions.projections)


def share_bases(causal: PreTrainedModel, shared: Mapping[str, str]) -> None:
    """Let layers that share an earlier one's weights have them once, beside adapters of their own.

    shared: parameters' names, each with that of the earlier one.
    """
    for target, source in shared.items():
        pair = [causal.get_submodule(name.rpartition(".")[0]) for name in (target, source)]
        own, first = (getattr(each, "merged", each) for each in pair)
        if isinstance(own, GenericLinear | MergedColumns):
            assert type(own) is type(first), (target, source)
            own.linear.base = first.linear.base


def _linears(
    causal: PreTrainedModel, plan: CutPlan, idle: Collection[str]
) -> Iterator[FoundLinear]:
    left_out = {NOT_ADAPTED.get(causal.config.model_type, ""), *idle}
    for path, module in causal.named_modules():
        is_linear = type(module) is nn.Linear or type(module).__name__ in _LINEARS
        if is_linear and plan.covers(path) and path.rsplit(".", 1)[-1] not in left_out:
            yield FoundLinear(path, module, plan.of(path, module))


def _positions(found: Sequence[FoundLinear]) -> Positions:
    """Make a projection of each kind of layer; a kind that some layers lack makes several.

    The projections of one product must have the same layers. Where some layers have a q alone
    (Gemma 3n), each q, k and v is a projection of its own.
    """
    kinds: dict[tuple[str, int, int], list[FoundLinear]] = defaultdict(list)
    for each in found:
        kinds[each.kind].append(each)
    uneven = {
        each.kind
        for group in _merged(found)
        if len({len(kinds[each.kind]) for each in group}) > 1
        for each in group
    }
    templates = [template for template, *_ in kinds]
    made = Positions()
    for kind, members in kinds.items():
        template = kind[0]
        numbers = [NUMBER.findall(each.path) for each in members]
        in_order = numbers == [[str(layer)] for layer in range(len(members))]
        if in_order and templates.count(template) == 1 and kind not in uneven:
            _add(made, template, members)
        else:
            for each in members:
                _add(made, each.path, [each])
    return made


def _add(made: Positions, module: str, members: Sequence[FoundLinear]) -> None:
    first = members[0]
    made.of |= {each.path: (len(made.projections), layer) for layer, each in enumerate(members)}
    made.projections.append(
        Projection(
            name=module.rsplit(".", 1)[-1],
            module=module,
            in_features=first.module.in_features,
            out_features=first.module.out_features,
            inputs=first.cut.inputs,
            outputs=first.cut.outputs,
            num_layers=len(members),
        )
    )


def _merged(found: Sequence[FoundLinear]) -> Iterator[list[FoundLinear]]:
    """Groups of layers that are one product."""
    by_path = {each.path: each for each in found}
    for each in found:
        parent, _, name = each.path.rpartition(".")
        for names in MERGED:
            if name == names[0] and all(f"{parent}.{other}" in by_path for other in names):
                group = [by_path[f"{parent}.{other}"] for other in names]
                if len({(one.module.bias is None, one.module.in_features) for one in group}) == 1:
                    yield group
                break


def _columns(group: Sequence[FoundLinear], weights: Weights) -> ColumnParallelLinear:
    parts = tuple(
        ColumnPart(each.path, each.module.out_features, each.cut.outputs) for each in group
    )
    first = group[0].module
    return ColumnParallelLinear(first.in_features, parts, first.bias is not None, weights)


def _linear(
    each: FoundLinear, weights: Weights, projection: int, layer: int
) -> AdapterColumnLinear | AdapterRowLinear:
    if each.cut.style is not Style.ROW:
        return AdapterColumnLinear(_columns([each], weights), layer, (projection,))
    module = each.module
    shape = (module.out_features, module.in_features)
    has_bias = module.bias is not None
    base = RowParallelLinear(each.path, shape, each.cut.inputs, has_bias, weights)
    return AdapterRowLinear(base, layer, projection)


def _replace(causal: nn.Module, path: str, module: nn.Module) -> None:
    causal.set_submodule(path, module)

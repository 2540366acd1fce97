"""What adapters change of transformers' experts and routers."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from modeling.adapters.projection import ExpertMatrices, Projection, ProjectionKind
from modeling.models.generic.cuts import CutPlan
from modeling.models.generic.linears import NUMBER
from modeling.models.generic.names import SourceNames
from sharding.slicing import Segments, whole

CONVERTED = frozenset(
    (
        "afmoe", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1",
        "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa",
        "hunyuan_v1_moe", "mellum", "minimax_m2", "mixtral", "olmoe", "qwen3_moe", "solar_open",
    )
)  # fmt: skip
"""Types for which PEFT joins modules of single experts (peft/utils/transformers_weight_conversion
.py); over others it ignores such modules."""

_OLD_NAMES = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
_OLD_PARENT = (".mlp.", ".block_sparse_moe.")


def _numbers(members: Sequence[tuple[str, Any]]) -> tuple[int, ...]:
    """The layers' numbers in their paths."""
    return tuple(int(NUMBER.findall(path)[0]) for path, _ in members)


def layer_template(path: str) -> str:
    """A module's path with the layer's number left open."""
    return NUMBER.sub("{layer}", path)


@dataclass(frozen=True)
class _Map:
    """A linear map of each expert: its outputs start .. start + size - 1 of a parameter's."""

    name: str
    parameter: str
    start: int
    size: int
    inputs: Segments
    outputs: Segments


def _maps(plan: CutPlan, path: str, module: Any, own: range) -> Iterator[_Map]:
    are_whole = len(own) < module.num_experts
    up = "gate_up_proj" if module.has_gate else "up_proj"
    for parameter in (up, "down_proj"):
        shape = tuple(getattr(module, parameter).shape)
        cut = None if are_whole else plan.experts(f"{path}.{parameter}", shape)
        cut = cut or (whole(shape[1]), whole(shape[2]))
        sizes = shape[1:]
        if module.is_transposed:
            cut, sizes = cut[::-1], sizes[::-1]
        outputs, inputs = cut
        if parameter == up and module.has_gate and module.is_concatenated:
            # The same part of both halves: that of the first is that of each.
            half = sizes[0] // 2
            first = tuple((a, min(b, half)) for a, b in outputs if a < half)
            yield _Map("gate_proj", parameter, 0, half, inputs, first)
            yield _Map("up_proj", parameter, half, half, inputs, first)
        else:
            yield _Map(parameter, parameter, 0, sizes[0], inputs, outputs)


def expert_projections(
    causal: PreTrainedModel,
    plan: CutPlan,
    template: str,
    members: Sequence[tuple[str, Any]],
    own: range,
    shares: tuple[range, ...] = (),
) -> list[Projection]:
    """One projection for each linear map of the experts, over all layers that have them.

    own, shares: see `ExpertMatrices`.
    """
    path, module = members[0]
    older = _older(causal, path)
    config: Any = causal.config
    identities: dict[str, int] = getattr(module, "loray_identities", {})
    active: Any = getattr(config, "num_experts_per_tok", getattr(config, "top_k_experts", 1)) or 1
    found = []
    for each in _maps(plan, path, module, own):
        of_part = (each.parameter, int(each.start > 0))
        sizes = dict(
            zip(("rows", "columns"), getattr(module, each.parameter).shape[1:], strict=True)
        )
        inputs = sizes["rows" if module.is_transposed else "columns"]
        outputs = sizes["columns" if module.is_transposed else "rows"]
        experts = ExpertMatrices(
            count=module.num_experts,
            own=own,
            active=max(active) if isinstance(active, list | tuple) else int(active),
            parameter=each.parameter,
            parameters=tuple(name for name, _ in module.named_parameters(recurse=False)),
            start=each.start,
            total=outputs,
            older=tuple(_template_of(name) for name in older.get(of_part, ())),
            shares=shares,
            identities=identities.get(each.parameter, 0),
        )
        found.append(
            Projection(
                name=f"experts.{each.name}",
                module=template,
                in_features=inputs,
                out_features=each.size,
                inputs=each.inputs,
                outputs=each.outputs,
                num_layers=len(members) * len(own),
                kind=ProjectionKind.EXPERTS,
                numbers=_numbers(members),
                experts=experts,
            )
        )
    return found


def _older(causal: PreTrainedModel, path: str) -> dict[tuple[str, int], list[str]]:
    """Names of modules of single experts, by the parameter and the part of it that they are."""
    if causal.config.model_type not in CONVERTED:
        return {}
    parents = dict.fromkeys((path, path.replace(*_OLD_PARENT)))
    # Each name has an expert's number of its own, by which the conversion keeps them apart.
    tried = [f"{parent}.{{}}.{name}" for parent in parents for name in _OLD_NAMES]
    names = [name.format(number) + ".weight" for number, name in enumerate(tried)]
    sources = SourceNames(causal, names)
    found: dict[tuple[str, int], list[str]] = defaultdict(list)
    for parameter in ("gate_up_proj", "up_proj", "down_proj"):
        stacked = sources.stacked(f"{path}.{parameter}")
        for part, own in (stacked.parts if stacked is not None else {}).items():
            found[parameter, part] += [tried[number] for number in own]
    return found


def _template_of(name: str) -> str:
    """A module's path with the layer and the expert left open; name: with `{}` for the expert."""
    layer, _, rest = name.partition("{}")
    return f"{layer_template(layer)}{{expert}}{rest}"


def routers(
    causal: PreTrainedModel, kinds: dict[str, list[tuple[str, Any]]]
) -> dict[str, list[tuple[str, Any]]]:
    """The modules beside experts that have a row of weights for each of them, by their template.

    Those that are nn.Linear are adapted as such.
    """
    found: dict[str, list[tuple[str, Any]]] = defaultdict(list)
    for path, experts in (member for members in kinds.values() for member in members):
        parent = path.rpartition(".")[0]
        for name, module in causal.get_submodule(parent).named_children():
            weight = dict(module.named_parameters(recurse=False)).get("weight")
            is_map = weight is not None and weight.dim() == 2 and len(weight) == experts.num_experts
            if is_map and type(module) is not nn.Linear:
                found[layer_template(f"{parent}.{name}")].append((f"{parent}.{name}", module))
    return found


def router_projection(
    causal: PreTrainedModel, template: str, members: Sequence[tuple[str, Any]]
) -> Projection:
    """The projection of the routers; their older names are those that transformers converts."""
    path, module = members[0]
    tried = dict.fromkeys((path, path.replace(*_OLD_PARENT), path.replace("router", "gate")))
    tried |= dict.fromkeys(each.replace(*_OLD_PARENT) for each in list(tried))
    names = [name for name in tried if name != path]
    older = []
    for name in names:
        if SourceNames(causal, [f"{name}.weight"]).plain().get(f"{path}.weight") is not None:
            older.append(name)
    outputs, inputs = module.weight.shape
    return Projection(
        name=path.rpartition(".")[2],
        module=template,
        aliases=tuple(map(layer_template, older)),
        in_features=inputs,
        out_features=outputs,
        inputs=whole(inputs),
        outputs=whole(outputs),
        num_layers=len(members),
        kind=ProjectionKind.ROUTER,
        numbers=_numbers(members),
    )

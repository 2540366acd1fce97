"""Adapters on the experts and routers of transformers' modules.

transformers keeps a layer's experts as parameters of three dimensions and computes them by one
formula for all families (`use_experts_implementation`): a grouped product, the gate, another
grouped product. Steps with adapters of experts compute that formula here, with the deltas between;
all others call transformers' own code. A module of another form takes no adapters.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from modeling.adapters.experts import (
    RoutedPairs,
    add_routing,
    grouped_product,
    is_aligned,
    route,
)
from modeling.adapters.projection import (
    ExpertMatrices,
    ModulePosition,
    Projection,
    ProjectionKind,
)
from modeling.models.generic.cuts import CutPlan
from modeling.models.generic.fused_experts import ExpertKernels
from modeling.models.generic.linears import NUMBER
from modeling.models.generic.names import SourceNames
from modeling.models.generic.step import CurrentStep
from sharding.slicing import Segments, whole

CONVERTED = frozenset(
    (
        "afmoe", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe",
        "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "hunyuan_v1_moe", "mellum",
        "minimax_m2", "mixtral", "olmoe", "qwen3_moe", "solar_open",
    )
)  # fmt: skip
"""Types for which PEFT joins modules of single experts (peft/utils/transformers_weight_conversion
.py); over others it ignores such modules."""

ON_GPUS = frozenset(("qwen3_moe",))
"""Types that take adapters of experts and routers on a GPU, where they were compared."""

_OLD_NAMES = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
_OLD_PARENT = (".mlp.", ".block_sparse_moe.")


@dataclass(frozen=True)
class Target:
    """A projection of the experts, and its first column in the product that has it."""

    projection: int
    offset: int


@dataclass(frozen=True)
class RoutedModule:
    """The experts or the router of one layer.

    layer: its index among those that have it. targets: what adapters change, by product; of a
    router one, by "router".
    """

    module: Any
    layer: int
    targets: Mapping[str, Sequence[Target]]


class RoutedLayers:
    """A model's experts and routers.

    projections: what adapters change of them; none on a GPU where on_gpus is false.
    on_gpus: whether they were compared there.
    """

    def __init__(
        self, causal: PreTrainedModel, plan: CutPlan, taken: int, on_gpu: bool = False
    ) -> None:
        """Find them, while parameters have their whole shapes; taken: the other projections."""
        kinds: dict[str, list[tuple[str, Any]]] = defaultdict(list)
        for path, module in causal.named_modules():
            if plan.covers(path) and _is_known(module):
                kinds[_template(path)].append((path, module))
        made: list[Projection] = []
        self._experts: list[RoutedModule] = []
        self._routers: list[RoutedModule] = []
        self.on_gpus = not kinds or causal.config.model_type in ON_GPUS
        is_adapted = self.on_gpus or not on_gpu
        for template, members in kinds.items():
            maps = _projections(causal, plan, template, members) if is_adapted else []
            targets = _targets(maps, taken + len(made))
            made += maps
            self._experts += [RoutedModule(m, i, targets) for i, (_, m) in enumerate(members)]
        for template, members in _routers(causal, kinds).items():
            targets = {"router": [Target(taken + len(made), 0)]}
            made += [_router(causal, template, members)] if is_adapted else []
            self._routers += [RoutedModule(m, i, targets) for i, (_, m) in enumerate(members)]
        self.projections: tuple[Projection, ...] = tuple(made)

    def install(self, step: CurrentStep, device: torch.device) -> None:
        """Let them be computed with the step's adapters, and by our kernels where those fit.

        To be called when the weights were read.
        """
        kernels = ExpertKernels(device)
        for each in self._experts:
            plain = kernels.experts(each.module) or each.module.forward
            each.module.forward = partial(_experts_adapted, each, step, plain)
        for each in self._routers:
            plain = kernels.router(each.module) or each.module.forward
            each.module.forward = partial(_route_adapted, each, step, plain)


def _numbers(members: Sequence[tuple[str, Any]]) -> tuple[int, ...]:
    """The layers' numbers in their paths."""
    return tuple(int(NUMBER.findall(path)[0]) for path, _ in members)


def _template(path: str) -> str:
    return NUMBER.sub("{layer}", path)


def _is_known(module: Any) -> bool:
    """Whether it is computed by transformers' one formula, from two tensors of all experts."""
    up = getattr(module, "gate_up_proj", getattr(module, "up_proj", None))
    tensors = (up, getattr(module, "down_proj", None))
    has_form = hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")
    are_stacked = all(isinstance(each, nn.Parameter) and each.dim() == 3 for each in tensors)
    return has_form and are_stacked and module.num_experts > 1


@dataclass(frozen=True)
class _Map:
    """A linear map of each expert: its outputs start .. start + size - 1 of a parameter's."""

    name: str
    parameter: str
    start: int
    size: int
    inputs: Segments
    outputs: Segments


def _maps(plan: CutPlan, path: str, module: Any) -> Iterator[_Map]:
    up = "gate_up_proj" if module.has_gate else "up_proj"
    for parameter in (up, "down_proj"):
        shape = tuple(getattr(module, parameter).shape)
        cut = plan.experts(f"{path}.{parameter}", shape) or (whole(shape[1]), whole(shape[2]))
        sizes = shape[1:]
        if module.is_transposed:
            cut, sizes = cut[::-1], sizes[::-1]
        outputs, inputs = cut
        if parameter == up and module.has_gate and module.is_concatenated:
            # The same part of both halves: that of the first is that of each.
            half = sizes[0] // 2
            own = tuple((a, min(b, half)) for a, b in outputs if a < half)
            yield _Map("gate_proj", parameter, 0, half, inputs, own)
            yield _Map("up_proj", parameter, half, half, inputs, own)
        else:
            yield _Map(parameter, parameter, 0, sizes[0], inputs, outputs)


def _projections(
    causal: PreTrainedModel, plan: CutPlan, template: str, members: Sequence[tuple[str, Any]]
) -> list[Projection]:
    """One projection for each linear map of the experts, over all layers that have them."""
    path, module = members[0]
    older = _older(causal, path)
    config: Any = causal.config
    active: Any = getattr(config, "num_experts_per_tok", getattr(config, "top_k_experts", 1))
    found = []
    for each in _maps(plan, path, module):
        of_part = (each.parameter, int(each.start > 0))
        sizes = dict(
            zip(("rows", "columns"), getattr(module, each.parameter).shape[1:], strict=True)
        )
        inputs = sizes["rows" if module.is_transposed else "columns"]
        outputs = sizes["columns" if module.is_transposed else "rows"]
        experts = ExpertMatrices(
            count=module.num_experts,
            active=int(active),
            parameter=each.parameter,
            parameters=tuple(name for name, _ in module.named_parameters(recurse=False)),
            start=each.start,
            total=outputs,
            older=tuple(_template_of(name) for name in older.get(of_part, ())),
        )
        found.append(
            Projection(
                name=f"experts.{each.name}",
                module=template,
                in_features=inputs,
                out_features=each.size,
                inputs=each.inputs,
                outputs=each.outputs,
                num_layers=len(members) * module.num_experts,
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
    return f"{_template(layer)}{{expert}}{rest}"


def _targets(maps: Sequence[Projection], first: int) -> dict[str, list[Target]]:
    """Which maps are computed by which product; first: the first map's projection."""
    targets: dict[str, list[Target]] = {"up": [], "down": []}
    for number, each in enumerate(maps):
        assert each.experts is not None
        own = targets["down" if each.experts.parameter == "down_proj" else "up"]
        offset = sum(maps[target.projection - first].local_outputs for target in own)
        own.append(Target(first + number, offset))
    return targets


def _experts_adapted(
    layer: RoutedModule,
    step: CurrentStep,
    plain: Callable[..., Tensor],
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """[tokens, hidden] to the same shape; top_k_index, top_k_weights: [tokens, experts of one]."""
    module, groups = layer.module, step.routed
    if not groups and is_aligned(module.down_proj):
        return plain(hidden_states, top_k_index, top_k_weights)
    pairs = RoutedPairs.of(top_k_index.flatten(), module.num_experts)
    adapters, active = route(groups, top_k_index, pairs), top_k_index.shape[1]

    def product(x: Tensor, parameter: str, which: str) -> Tensor:
        weight = getattr(module, parameter)
        weight = weight if module.is_transposed else weight.transpose(1, 2)
        y = grouped_product(x, weight, pairs.ends)
        if module.has_bias:
            y += getattr(module, f"{parameter}_bias")[top_k_index.flatten()[pairs.rows]]
        for adapter in adapters:
            for target in layer.targets[which]:
                first = layer.layer * module.num_experts
                adapter.add(y, x, target.projection, first, target.offset)
        return y

    up = product(
        hidden_states[pairs.rows // active],
        "gate_up_proj" if module.has_gate else "up_proj",
        "up",
    )
    inner = module._apply_gate(up) if module.has_gate else module.act_fn(up)
    out = product(inner, "down_proj", "down")
    if getattr(module, "has_post_expert_norm", False):
        out = module.post_expert_norm(out)
    out = out * top_k_weights.flatten()[pairs.rows].unsqueeze(1)
    # In the order of the tokens, so that a token's sum does not depend on its neighbours.
    summed = torch.empty_like(out).index_copy_(0, pairs.rows, out)
    return summed.view(*top_k_index.shape, -1).sum(1).to(hidden_states.dtype)


def _routers(
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
                found[_template(f"{parent}.{name}")].append((f"{parent}.{name}", module))
    return found


def _router(
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
        aliases=tuple(map(_template, older)),
        in_features=inputs,
        out_features=outputs,
        inputs=whole(inputs),
        outputs=whole(outputs),
        num_layers=len(members),
        kind=ProjectionKind.ROUTER,
        numbers=_numbers(members),
    )


class _WithDeltas(TorchFunctionMode):
    """Adds a router's deltas to the first linear map that is computed meanwhile."""

    def __init__(self, step: CurrentStep, at: ModulePosition) -> None:
        super().__init__()
        self._step = step
        self._at: ModulePosition | None = at

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`."""
        found = func(*args, **(kwargs or {}))
        if func is not F.linear or self._at is None:
            return found
        at, self._at = self._at, None
        x, y = args[0].flatten(0, -2), found.flatten(0, -2)
        return add_routing(y, x, self._step.routed, at).view(found.shape)


def _route_adapted(
    layer: RoutedModule, step: CurrentStep, plain: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    """Call a router, with the step's deltas in its logits."""
    if not step.routed:
        return plain(*args, **options)
    (target,) = layer.targets["router"]
    with _WithDeltas(step, ModulePosition(target.projection, layer.layer)):
        return type(layer.module).forward(layer.module, *args, **options)

"""Adapters on the experts and routers of transformers' modules.

transformers keeps a layer's experts as parameters of three dimensions and computes them by one
formula for all families (`use_experts_implementation`): a grouped product, the gate, another
grouped product. Steps with adapters of experts compute that formula here, with the deltas between;
all others call transformers' own code. A module of another form takes no adapters.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from configs.architectures.base import ArchitectureError
from modeling.adapters.experts import (
    RoutedPairs,
    add_routing,
    grouped_product,
    has_aligned_sides,
    route,
)
from modeling.adapters.product import ExpertDeltas, TokenGroup
from modeling.adapters.projection import ModulePosition, Projection
from modeling.models.generic.cuts import CutPlan
from modeling.models.generic.fp4_experts import Fp4Matrices
from modeling.models.generic.fused_experts import ExpertKernels, FusedExperts
from modeling.models.generic.fused_stored import StoredKernels, stored_kernels
from modeling.models.generic.integer_experts import IntegerMatrices
from modeling.models.generic.routed_projections import (
    expert_projections,
    layer_template,
    router_projection,
    routers,
)
from modeling.models.generic.scaled_experts import ScaledMatrices
from modeling.models.generic.step import CurrentStep
from modeling.models.generic.stored_experts import StoredMatrices, has_stored, inputs_of
from sharding.group import TensorParallel
from sharding.slicing import spread_experts

ON_GPUS = frozenset(
    (
        "afmoe", "axk1", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe",
        "exaone_moe", "flex_olmo", "gemma4_text", "glm4_moe", "glm4_moe_lite", "gpt_oss",
        "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe",
        "kimi_linear", "lfm2_moe", "mellum", "minimax_m2", "minimax_m3_vl_text", "mixtral",
        "nemotron_h", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next",
        "solar_open",
    )
)  # fmt: skip
"""Types that take adapters of experts and routers on a GPU, where they were compared; kernels
multiply them in bfloat16."""

DELTAS_OF_STORED: dict[type[StoredMatrices], frozenset[str]] = {
    Fp4Matrices: frozenset(("deepseek_v3", "gpt_oss", "qwen3_moe")),
    IntegerMatrices: frozenset(("deepseek_v3", "glm4_moe", "mixtral", "qwen3_moe")),
    ScaledMatrices: frozenset(("deepseek_v3", "glm4_moe", "minimax_m2", "mixtral", "qwen3_moe")),
}
"""Types of which they multiply those of experts that a checkpoint quantised, by the form."""

SPREAD_ON_GPUS = frozenset(("qwen3_moe",))
"""Types of which ranks may have whole experts on GPUs, where they were compared in float32 and in
bfloat16; quantised experts were not."""


@dataclass(frozen=True)
class Target:
    """A projection of the experts, and its first column in the product that has it."""

    projection: int
    offset: int


@dataclass(frozen=True)
class RoutedModule:
    """The experts or the router of one layer.

    layer: its index among those that have it. targets: what adapters change, by product; of a
    router one, by "router". own: this rank's experts.
    """

    module: Any
    layer: int
    targets: Mapping[str, Sequence[Target]]
    own: range = range(0)

    @property
    def is_spread(self) -> bool:
        """Whether other ranks have other experts."""
        count: int = self.module.num_experts
        return len(self.own) < count

    def local(self, ids: Tensor) -> Tensor:
        """Experts' numbers among this rank's; another's get the number behind the last."""
        if not self.is_spread:
            return ids
        first, count = self.own.start, len(self.own)
        return torch.where((ids >= first) & (ids < first + count), ids - first, count)


class RoutedLayers:
    """A model's experts and routers.

    projections: what adapters change of them; none on a GPU where on_gpus is false.
    on_gpus: whether they were compared there.
    own: this rank's experts, by the module's path, where ranks have whole ones.
    """

    def __init__(
        self,
        causal: PreTrainedModel,
        plan: CutPlan,
        taken: int,
        on_gpu: bool = False,
        over: TensorParallel | None = None,
    ) -> None:
        """Find them, while parameters have their whole shapes; taken: the other projections.

        over: the ranks over which whole experts are spread; None: each has a part of every expert.
        ArchitectureError and ValueError where they cannot be.
        """
        kinds: dict[str, list[tuple[str, Any]]] = defaultdict(list)
        for path, module in causal.named_modules():
            if plan.covers(path) and _is_known(module):
                kinds[layer_template(path)].append((path, module))
        made: list[Projection] = []
        self._experts: list[RoutedModule] = []
        self._routers: list[RoutedModule] = []
        if over is not None and not kinds:
            raise ArchitectureError(
                f"expert_parallel: {type(causal).__name__} has no routed experts that ranks can "
                "have whole: remove it"
            )
        self.own: dict[str, range] = {}
        self._model_type: str = causal.config.model_type
        is_spread = over is not None and over.size > 1
        if is_spread and on_gpu and self._model_type not in SPREAD_ON_GPUS:
            raise ArchitectureError(
                f"expert_parallel: whole experts on ranks were not compared on GPUs for "
                f"{self._model_type}: remove it, then each rank has a part of every expert"
            )
        self.on_gpus = not kinds or self._model_type in ON_GPUS
        is_adapted = self.on_gpus or not on_gpu
        for template, members in kinds.items():
            count = members[0][1].num_experts
            own, shares = range(count), tuple[range, ...]()
            if over is not None:
                own = spread_experts(count, over.rank, over.size)
                shares = tuple(spread_experts(count, i, over.size) for i in range(over.size))
                self.own |= {path: own for path, _ in members}
            given = (causal, plan, template, members, own, shares)
            maps = expert_projections(*given) if is_adapted else []
            targets = _targets(maps, taken + len(made))
            made += maps
            self._experts += [RoutedModule(m, i, targets, own) for i, (_, m) in enumerate(members)]
        for template, members in routers(causal, kinds).items():
            targets = {"router": [Target(taken + len(made), 0)]}
            made += [router_projection(causal, template, members)] if is_adapted else []
            self._routers += [RoutedModule(m, i, targets) for i, (_, m) in enumerate(members)]
        self.projections: tuple[Projection, ...] = tuple(made)

    @property
    def have_kernels(self) -> bool:
        """Whether kernels can multiply adapters of experts, once the weights were read."""
        forms = [
            types
            for form, types in DELTAS_OF_STORED.items()
            if any(has_stored(each.module, form) for each in self._experts)
        ]
        are_compared = all(self._model_type in types for types in forms or (ON_GPUS,))
        return self.on_gpus and are_compared

    @property
    def _are_stored(self) -> bool:
        return any(has_stored(each.module) for each in self._experts)

    def leave_stored(self, on_gpu: bool, dtype: torch.dtype) -> None:
        """Take no adapters on a GPU where a checkpoint quantised experts, if none compared them.

        ArchitectureError where ranks have whole ones there.
        """
        if on_gpu and self._are_stored and any(each.is_spread for each in self._experts):
            raise ArchitectureError(
                "expert_parallel: whole quantised experts on ranks were not compared on GPUs: "
                "remove it, then each rank has a part of every expert"
            )
        is_compared = self.have_kernels and dtype is torch.bfloat16
        if self._are_stored and not is_compared:
            self.on_gpus = False
            self.projections = () if on_gpu else self.projections

    def install(self, step: CurrentStep, device: torch.device) -> None:
        """Let them be computed with the step's adapters, and by our kernels where those fit.

        To be called when the weights were read.
        """
        kernels = ExpertKernels(device)
        plain: Callable[..., Any]
        for each in self._experts:
            if has_stored(each.module) and device.type == "cuda":
                plain = stored_kernels(each.module, device)
            else:
                plain = kernels.experts(each.module) or each.module.forward
            each.module.forward = partial(_experts_adapted, each, step, plain)
        for each in self._routers:
            plain = kernels.router(each.module) or each.module.forward
            each.module.forward = partial(_route_adapted, each, step, plain)


def _is_known(module: Any) -> bool:
    """Whether it is computed by transformers' one formula, from two tensors of all experts."""
    up = getattr(module, "gate_up_proj", getattr(module, "up_proj", None))
    tensors = (up, getattr(module, "down_proj", None))
    has_form = hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")
    are_stacked = all(isinstance(each, nn.Parameter) and each.dim() == 3 for each in tensors)
    return has_form and are_stacked and module.num_experts > 1


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
    module, deltas = layer.module, step.expert_deltas
    groups = step.routed if deltas is None else ()
    if _is_plain(layer, plain, groups):
        given = (hidden_states, top_k_index, top_k_weights)
        at_once = plain(*given) if deltas is None else _at_once(layer, plain, given, deltas)
        if at_once is not None:
            return at_once
    ids, count, active = layer.local(top_k_index), len(layer.own), top_k_index.shape[1]
    pairs = RoutedPairs.of(ids.flatten(), count)
    of_pairs = ids.flatten()[pairs.rows]
    adapters = route(groups, ids, pairs)

    def product(x: Tensor, parameter: str, which: str) -> Tensor:
        y = _base_product(module, parameter, x, of_pairs.clamp(max=count - 1), pairs.ends)
        for target in layer.targets[which]:
            for adapter in adapters:
                adapter.add(y, x, target.projection, layer.layer, target.offset)
            if deltas is not None:
                at = (target.projection, layer.layer, count, target.offset)
                deltas.add(y, x, of_pairs, pairs.rows // active, *at)
        return y

    parameter = "gate_up_proj" if module.has_gate else "up_proj"
    up = product(hidden_states[pairs.rows // active], parameter, "up")
    inner = module._apply_gate(up) if module.has_gate else module.act_fn(up)
    out = product(inner, "down_proj", "down")
    if getattr(module, "has_post_expert_norm", False):
        out = module.post_expert_norm(out)
    out = out * top_k_weights.flatten()[pairs.rows].unsqueeze(1)
    if layer.is_spread:
        # Other ranks' experts: nothing was computed there, and NaN times zero is NaN.
        out.masked_fill_((of_pairs == count).unsqueeze(1), 0)
    # In the order of the tokens, so that a token's sum does not depend on its neighbours.
    summed = torch.empty_like(out).index_copy_(0, pairs.rows, out)
    return summed.view(*top_k_index.shape, -1).sum(1).to(hidden_states.dtype)


def _base_product(module: Any, parameter: str, x: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows of x with their experts' matrices, and add the biases, but no adapters.

    experts: int64, of the rows. ends: see `grouped_product`.
    """
    weight = getattr(module, parameter)
    weight = weight if module.is_transposed else weight.transpose(1, 2)
    inputs = inputs_of(module, parameter, x, experts)
    parts = zip(inputs, weight.chunk(len(inputs), 2), strict=True)
    made = [grouped_product(part, own, ends) for part, own in parts]
    y = made[0] if len(made) == 1 else torch.cat(made, 1)
    if module.has_bias:
        y += getattr(module, f"{parameter}_bias")[experts]
    return y


def _is_plain(
    layer: RoutedModule, plain: Callable[..., Tensor], groups: Sequence[TokenGroup]
) -> bool:
    """Whether `plain` computes a layer's experts, with adapters that kernels multiply or none."""
    if layer.is_spread:
        return False
    if isinstance(plain, StoredKernels):
        adapted = [own.projection for each in layer.targets.values() for own in each]
        return not any(group.adapter.adapts(own) for group in groups for own in adapted)
    is_float = not has_stored(layer.module)
    return is_float and not groups and has_aligned_sides(layer.module.down_proj)


def _at_once(
    layer: RoutedModule,
    plain: Callable[..., Tensor],
    given: tuple[Tensor, Tensor, Tensor],
    deltas: ExpertDeltas,
) -> Tensor | None:
    """Compute experts with a step's adapters by our kernels; None where those do not fit.

    given: hidden_states, top_k_index, top_k_weights.
    """
    if not isinstance(plain, FusedExperts | StoredKernels):
        return None
    targets = {key: [own.projection for own in layer.targets[key]] for key in layer.targets}
    return plain.adapted(*given, deltas=deltas, targets=targets, layer=layer.layer)


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

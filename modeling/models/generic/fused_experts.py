"""Our kernels instead of transformers' experts and routers, where both compute the same.

As in `fusions.py`, what a class computes is not read from its name: it is run on a few random
numbers in float32 and compared with the formula.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modeling.adapters.product import ExpertDeltas
from modeling.layers.scored_routing import ScoredRouting
from modeling.models.generic.comparing import same

HALF = (torch.bfloat16, torch.float16)
"""Types of weights that the kernels take."""

_SCORED = {"weight", "e_score_correction_bias"}
"""What a router has that selects by scores of its own."""


@dataclass(frozen=True)
class FusedExperts:
    """One layer's experts by our kernels, or by transformers' own code where tokens are many.

    weights: of gate and up, and of down. counts: see the kernels' `experts`.
    """

    kernels: Any
    plain: Callable[..., Tensor]
    weights: tuple[Tensor, Tensor]
    counts: Tensor

    def __call__(self, hidden_states: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        """[tokens, hidden] to the same shape; ids, shares: [tokens, experts of one]."""
        if not self.kernels.takes(hidden_states, ids.shape[1], len(self.weights[0])):
            return self.plain(hidden_states, ids, shares)
        return self._computed(hidden_states, ids, shares, None)

    def adapted(
        self,
        hidden_states: Tensor,
        ids: Tensor,
        shares: Tensor,
        deltas: ExpertDeltas,
        targets: Mapping[str, Sequence[int]],
        layer: int,
    ) -> Tensor | None:
        """Return the same with a step's adapters; None where tokens are too many.

        targets: the projections of "up" and "down". layer: its index among those with experts.
        """
        if not self.kernels.takes(hidden_states, ids.shape[1], len(self.weights[0])):
            return None
        own = self.kernels.LayerDeltas(deltas, tuple(targets["up"]), *targets["down"], layer)
        return self._computed(hidden_states, ids, shares, own)

    def _computed(self, hidden_states: Tensor, ids: Tensor, shares: Tensor, deltas: Any) -> Tensor:
        parts = (hidden_states.contiguous(), *self.weights, ids.contiguous(), shares.contiguous())
        found: Tensor = self.kernels.experts(*parts, self.counts, deltas)
        return found


class ExpertKernels:
    """The kernels of a model's device, and the counters that its layers share."""

    def __init__(self, device: torch.device) -> None:
        self._kernels, self._routing, self._scored = _kernels(device)
        self._device = device
        self._zeros: dict[int, Tensor] = {}

    def experts(self, module: Any) -> "FusedExperts | None":
        """The kernels instead of a layer's experts; None where they do not fit."""
        kernels, plain = self._kernels, module.forward
        has_form = module.has_gate and module.is_concatenated and not module.is_transposed
        if kernels is None or not has_form or module.has_bias or not is_silu(module):
            return None
        if getattr(module, "has_post_expert_norm", False):
            return None
        up, down = module.gate_up_proj, module.down_proj
        if not kernels.fits(up, down):
            return None
        counts = self._counters(len(up))
        return FusedExperts(kernels, plain, (up, down), counts)

    def router(self, module: Any) -> Callable[..., tuple[Tensor, Tensor, Tensor]] | None:
        """The kernel instead of a router that takes the best of a softmax, or of scores.

        None for others.
        """
        weight = module.weight
        if self._routing is None:
            return None
        active = getattr(module, "top_k", None)
        zeros = self._counters(self._routing.MOST_ROUTED)
        correction = getattr(module, "e_score_correction_bias", None)
        if correction is not None:
            form = _scored_routing_of(module, weight, correction)
            own = partial(_route_scored, self._scored, module)
            return None if form is None else partial(own, form, zeros)
        if not isinstance(active, int) or weight.dtype not in HALF:
            return None
        for summed in (True, False):
            if _takes_best(module, active, summed):
                both = (weight, getattr(module, "bias", None))
                return partial(_route, self._routing, both, active, summed, zeros)
        return None

    def _counters(self, count: int) -> Tensor:
        """int32 zeros."""
        if count not in self._zeros:
            self._zeros[count] = torch.zeros(count, dtype=torch.int32, device=self._device)
        return self._zeros[count]


def _route(
    routing: Any,
    own: tuple[Tensor, Tensor | None],
    active: int,
    summed: bool,
    zeros: Tensor,
    hidden_states: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, weights of the best, their ids); own: the router's weight and bias."""
    x = hidden_states.flatten(0, -2).contiguous()
    found: tuple[Tensor, Tensor, Tensor] = routing.route(x, *own, active, summed, zeros)
    return found


def _kernels(device: torch.device) -> tuple[Any, Any, Any]:
    """The modules of experts' kernels and of routers', by a softmax and by scores."""
    if device.type != "cuda":
        return None, None, None
    try:
        # Here, not above: Triton comes with CUDA builds of torch only.
        from modeling.layers.kernels import experts, routing, scored_routing
    except ImportError:
        return None, None, None
    return experts, routing, scored_routing


def _route_scored(
    routing: Any, module: Any, form: ScoredRouting, zeros: Tensor, hidden_states: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, weights of the best, their ids)."""
    x = hidden_states.flatten(0, -2).contiguous()
    own = (module.weight, module.e_score_correction_bias)
    found: tuple[Tensor, Tensor, Tensor] = routing.route(x, *own, form, zeros)
    return found


@torch.inference_mode()
def _scored_routing_of(module: Any, weight: Tensor, correction: Tensor) -> ScoredRouting | None:
    """How a router selects by scores, as its own names say and a few tokens confirm, or None."""
    active, groups = getattr(module, "top_k", None), getattr(module, "num_group", 1)
    kept, summed = getattr(module, "topk_group", 1), getattr(module, "norm_topk_prob", True)
    if not isinstance(active, int) or not isinstance(groups, int) or not isinstance(kept, int):
        return None
    if len(weight) % groups or {name for name, _ in module.named_parameters()} - _SCORED:
        return None
    factor = float(getattr(module, "routed_scaling_factor", 1.0))
    form = ScoredRouting(active, bool(summed), groups, kept, factor)
    generator = torch.Generator().manual_seed(0)
    x, own = torch.randn(5, weight.shape[1], generator=generator), weight.detach().float().cpu()
    bias = torch.rand(len(weight), generator=generator)
    logits = F.linear(x, own)
    probe = copy.copy(module)
    probe._parameters, probe._buffers = {}, {}
    probe.weight, probe.e_score_correction_bias = own, bias
    try:
        found = type(module).forward(probe, x)
    except (RuntimeError, AttributeError, TypeError):
        return None
    if not isinstance(found, tuple) or len(found) != 3 or found[2].dtype != torch.int64:
        return None
    wanted = logits, _by_expert(*form.weights(logits, bias), len(own))
    is_alike = same(found[0], wanted[0]) and same(_by_expert(*found[1:], len(own)), wanted[1])
    return form if is_alike else None


def _by_expert(weights: Tensor, ids: Tensor, count: int) -> Tensor:
    """[tokens, count], zeros for experts that were not selected: ids come in any order."""
    return weights.new_zeros(len(ids), count).scatter(1, ids, weights)


def is_silu(module: Any) -> bool:
    """Whether an expert computes silu(gate) * up between its products."""
    both = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    gate, up = both.chunk(2, -1)
    try:
        return same(module._apply_gate(both), F.silu(gate) * up)
    except (RuntimeError, AttributeError, TypeError):
        return False


@torch.inference_mode()
def _takes_best(module: Any, active: int, summed: bool) -> bool:
    """Whether a router returns logits, the weights of the best and their ids."""
    probe = copy.copy(module)
    own = {name: each.detach().float().cpu() for name, each in module.named_parameters()}
    if not {"weight"} <= own.keys() <= {"weight", "bias"}:
        return False
    weight, bias = own["weight"], own.get("bias")
    probe._parameters = {
        name: torch.nn.Parameter(each, requires_grad=False) for name, each in own.items()
    }
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, weight.shape[1], generator=generator)
    try:
        found = type(module).forward(probe, x)
    except (RuntimeError, AttributeError, TypeError):
        return False
    logits = F.linear(x, weight, bias)
    best, ids = logits.softmax(-1).topk(active)
    best = best / best.sum(-1, keepdim=True) if summed else best
    wanted = (logits, best, ids)
    is_alike = isinstance(found, tuple) and len(found) == 3
    return is_alike and all(same(a, b) for a, b in zip(found, wanted, strict=True))

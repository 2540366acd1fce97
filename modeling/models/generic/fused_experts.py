"""Our kernels instead of transformers' experts and routers, where both compute the same.

As in `fusions.py`, what a class computes is not read from its name: it is run on a few random
numbers in float32 and compared with the formula.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

TOLERANCE = 1e-5

HALF = (torch.bfloat16, torch.float16)
"""Types of weights that the kernels take."""


class ExpertKernels:
    """The kernels of a model's device, and the counters that its layers share."""

    def __init__(self, device: torch.device) -> None:
        self._kernels, self._routing = _kernels(device)
        self._device = device
        self._zeros: dict[int, Tensor] = {}

    def experts(self, module: Any) -> Callable[..., Tensor] | None:
        """The kernels instead of a layer's experts; None where they do not fit."""
        kernels, plain = self._kernels, module.forward
        has_form = module.has_gate and module.is_concatenated and not module.is_transposed
        if kernels is None or not has_form or module.has_bias or not _is_silu(module):
            return None
        if getattr(module, "has_post_expert_norm", False):
            return None
        up, down = module.gate_up_proj, module.down_proj
        if not kernels.fits(up, down):
            return None
        counts = self._counters(len(up))

        def forward(hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            if len(hidden_states) > kernels.MOST_TOKENS:
                whole: Tensor = plain(hidden_states, ids, weights)
                return whole
            parts = (hidden_states.contiguous(), up, down, ids.contiguous(), weights.contiguous())
            found: Tensor = kernels.experts(*parts, counts)
            return found

        return forward

    def router(self, module: Any) -> Callable[..., tuple[Tensor, Tensor, Tensor]] | None:
        """The kernel instead of a router that takes the best of a softmax; None for others."""
        weight = module.weight
        if self._routing is None or getattr(module, "bias", None) is not None:
            return None
        active = getattr(module, "top_k", None)
        if not isinstance(active, int) or weight.dtype not in HALF:
            return None
        for summed in (True, False):
            if _takes_best(module, active, summed):
                zeros = self._counters(self._routing.MOST_ROUTED)
                return partial(_route, self._routing, weight, active, summed, zeros)
        return None

    def _counters(self, count: int) -> Tensor:
        """int32 zeros."""
        if count not in self._zeros:
            self._zeros[count] = torch.zeros(count, dtype=torch.int32, device=self._device)
        return self._zeros[count]


def _route(
    routing: Any, weight: Tensor, active: int, summed: bool, zeros: Tensor, hidden_states: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, weights of the best, their ids)."""
    x = hidden_states.flatten(0, -2).contiguous()
    found: tuple[Tensor, Tensor, Tensor] = routing.route(x, weight, active, summed, zeros)
    return found


def _kernels(device: torch.device) -> tuple[Any, Any]:
    """The modules of experts' kernels and of routers'."""
    if device.type != "cuda":
        return None, None
    try:
        # Here, not above: Triton comes with CUDA builds of torch only.
        from modeling.layers import triton_experts, triton_routing
    except ImportError:
        return None, None
    return triton_experts, triton_routing


def _is_silu(module: Any) -> bool:
    """Whether an expert computes silu(gate) * up between its products."""
    both = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    gate, up = both.chunk(2, -1)
    try:
        return _same(module._apply_gate(both), F.silu(gate) * up)
    except (RuntimeError, AttributeError, TypeError):
        return False


@torch.inference_mode()
def _takes_best(module: Any, active: int, summed: bool) -> bool:
    """Whether a router returns logits, the weights of the best and their ids."""
    probe = copy.copy(module)
    weight = module.weight.detach().float().cpu()
    probe._parameters = {"weight": torch.nn.Parameter(weight, requires_grad=False)}
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, weight.shape[1], generator=generator)
    try:
        found = type(module).forward(probe, x)
    except (RuntimeError, AttributeError, TypeError):
        return False
    logits = F.linear(x, weight)
    best, ids = logits.softmax(-1).topk(active)
    best = best / best.sum(-1, keepdim=True) if summed else best
    wanted = (logits, best, ids)
    is_alike = isinstance(found, tuple) and len(found) == 3
    return is_alike and all(_same(a, b) for a, b in zip(found, wanted, strict=True))


def _same(found: Any, wanted: Tensor) -> bool:
    return (
        isinstance(found, Tensor)
        and found.shape == wanted.shape
        and torch.allclose(found.float(), wanted.float(), TOLERANCE, TOLERANCE)
    )

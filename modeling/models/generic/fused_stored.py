"""Kernels instead of transformers' experts, where a checkpoint quantised those, on GPUs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from configs.architectures.base import ArchitectureError
from modeling.adapters.product import ExpertDeltas
from modeling.models.generic.comparing import same
from modeling.models.generic.fp4_experts import Fp4Matrices
from modeling.models.generic.fused_experts import is_silu
from modeling.models.generic.integer_experts import LEAST, IntegerMatrices
from modeling.models.generic.scaled_experts import ScaledMatrices

if TYPE_CHECKING:
    from modeling.layers.kernels.stored_weights import Gate, StoredWeight

MOST_ADAPTED = 1024
"""Tokens with adapters that are computed at once: their deltas take float32 for each pair."""

_CAPABILITY = (9, 0)
"""Of GPUs with the kernels' instructions."""


@dataclass(frozen=True)
class StoredKernels:
    """One layer's quantised experts by our kernels; counts: see `stored_experts`."""

    up: "StoredWeight"
    down: "StoredWeight"
    gate: "Gate"
    counts: Tensor

    def __call__(self, hidden_states: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        """[tokens, hidden] to the same shape; ids, shares: [tokens, experts of one]."""
        return self._computed(hidden_states, ids, shares, None)

    def adapted(
        self,
        hidden_states: Tensor,
        ids: Tensor,
        shares: Tensor,
        deltas: ExpertDeltas,
        targets: Mapping[str, Sequence[int]],
        layer: int,
    ) -> Tensor:
        """Return the same with a step's adapters; see `FusedExperts.adapted`."""
        from modeling.layers.kernels.expert_deltas import LayerDeltas

        own = LayerDeltas(cast(Any, deltas), tuple(targets["up"]), targets["down"][0], layer)
        starts = range(0, len(hidden_states), MOST_ADAPTED)
        ends = (slice(start, start + MOST_ADAPTED) for start in starts)
        parts = [
            self._computed(hidden_states[at], ids[at], shares[at], own.of_tokens(at)) for at in ends
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _computed(self, hidden_states: Tensor, ids: Tensor, shares: Tensor, deltas: Any) -> Tensor:
        from modeling.layers.kernels.stored_experts import stored_experts

        x, ids, shares = (each.contiguous() for each in (hidden_states, ids, shares))
        return stored_experts(x, self.up, self.down, self.gate, ids, shares, self.counts, deltas)


def stored_kernels(module: Any, device: torch.device) -> StoredKernels:
    """Return what computes a layer's experts; ArchitectureError where no kernel does.

    The module's stored matrices are put into the kernels' order.
    """
    if torch.cuda.get_device_capability(device) < _CAPABILITY:
        raise ArchitectureError(
            f"quantised experts: {torch.cuda.get_device_name(device)} is older than Hopper: take a "
            "checkpoint in bfloat16"
        )
    gate = _gate(module)
    if gate is None:
        raise ArchitectureError(
            f"{type(module).__name__}: no kernel computes these quantised experts on GPUs: take a "
            "checkpoint in bfloat16"
        )
    up, down = _weight(module, "gate_up_proj"), _weight(module, "down_proj")
    counts = torch.zeros(len(up.codes), dtype=torch.int32, device=device)
    return StoredKernels(up, down, gate, counts)


def _gate(module: Any) -> "Gate | None":
    """What the module computes of gate and up, found by running it; None if no kernel does."""
    # Here, not above: Triton comes with CUDA builds of torch only.
    from modeling.layers.kernels.stored_weights import Gate

    if not module.has_gate or getattr(module, "has_post_expert_norm", False):
        return None
    if module.is_concatenated:
        return Gate() if is_silu(module) else None
    limit, alpha = (getattr(module, name, None) for name in ("limit", "alpha"))
    if limit is None or alpha is None:
        return None
    both = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)) * limit
    gate, up = both[..., ::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
    wanted = (up + 1) * gate * torch.sigmoid(gate * alpha)
    is_alike = same(module._apply_gate(both), wanted)
    return Gate(True, float(limit), float(alpha)) if is_alike else None


def _weight(module: Any, name: str) -> "StoredWeight":
    from modeling.layers.kernels.stored_weights import StoredWeight

    stored: nn.Module | None = getattr(module, f"{name}_stored", None)
    bias: Tensor | None = getattr(module, f"{name}_bias") if module.has_bias else None
    if isinstance(stored, ScaledMatrices):
        shape = stored.codes.shape[1], stored.codes.shape[2]
    elif isinstance(stored, IntegerMatrices | Fp4Matrices):
        shape = stored.codes.shape[2], stored.inputs_of_output
    else:
        raise ArchitectureError(f"{name}: a checkpoint quantises all of an expert's maps, or none")
    if any(size % LEAST for size in shape):
        raise ArchitectureError(
            f"{name}: GPUs multiply quantised experts of sizes that are multiples of {LEAST}, not "
            f"{shape}: take a checkpoint in bfloat16"
        )
    fields = {"scales": stored.scales.data, **stored.kernel_fields()}
    return StoredWeight(stored.codes.data, bias=bias, shape=shape, **fields)

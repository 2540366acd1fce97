"""Puts our fused layers in place of transformers' where both compute the same.

What a class computes is not read from its name: its own forward is run on a few random numbers
in float32 and compared with the formula. Whatever differs stays transformers'.
"""

import copy
import inspect
import logging
from collections import Counter
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configs.architectures.base import Activation
from modeling.layers.activation import ACTIVATIONS
from modeling.layers.fused import fused_ops
from modeling.models.generic.comparing import activation_of, same
from modeling.models.generic.layer_sums import fuse_sums
from modeling.models.generic.modules import GenericLinear, MergedColumns, MergedPart
from modeling.models.generic.norms import FusedRMSNorm
from modeling.models.generic.step import CurrentStep

logger = logging.getLogger("loray.modeling")

ROTATIONS = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave")
"""transformers' names of the functions that rotate q and k, in each family's own module."""

OF_POSITIONS = ("get_llama_4_attn_scale",)
"""Functions of a step's positions, which every layer calls with the same arguments."""

_WIDTH = 8
"""Of the probes' vectors and heads."""


class FusedGatedMLP(nn.Module):
    """down( act(gate x) * (up x) ), gate and up as one product."""

    def __init__(
        self, gate_up: nn.Module, down: GenericLinear, step: CurrentStep, activation: Activation
    ) -> None:
        """gate_up: an AdapterColumnLinear; its output is gate's columns, then up's."""
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self._step = step
        self._act = ACTIVATIONS[activation]
        ops = fused_ops(down.weight.device)
        kernels = {} if ops is None else {
            Activation.SILU: ops.silu_mul,
            Activation.GELU_TANH: ops.gelu_tanh_mul,
        }  # fmt: skip
        self._kernel = kernels.get(activation)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to the same shape, equal on every rank."""
        both: Tensor = self.gate_up(x.flatten(0, -2), self._step.adapter_data)
        if self._kernel is not None:
            inner = self._kernel(both)
        else:
            gate, up = both.chunk(2, dim=-1)
            inner = self._act(gate) * up
        out: Tensor = self.down(inner)
        return out.view(x.shape)


def norm_heads_alone(causal: nn.Module) -> None:
    """Norm the heads of q, k and v where layers call for it."""
    for module in causal.modules():
        if isinstance(module, FusedRMSNorm):
            module.deferral = None


def fuse(causal: nn.Module, step: CurrentStep, dtype: torch.dtype) -> None:
    """Replace norms and feed-forwards, and let attention rotate q and k itself; logs what it did.

    The weights must be there: a norm's is kept in float32, as it is computed with. dtype: of what
    layers compute.
    """
    done: Counter[str] = Counter()
    for path, module in list(causal.named_modules()):
        if not type(module).__module__.startswith("transformers."):
            continue
        fused: nn.Module | None = _mlp(module, step)
        if fused is None and not _reads_types(causal.get_submodule(path.rpartition(".")[0])):
            fused = _norm(module)
        if fused is not None:
            causal.set_submodule(path, fused)
            done[type(fused).__name__] += 1
        elif _defer_rotation(module, step):
            done["rotation with the cache's store"] += 1
    done["norm of heads with their rotation"] = _defer_norms(causal, step)
    done += fuse_sums(causal, dtype)
    text = ", ".join(f"{name} ({count})" for name, count in sorted(done.items()) if count)
    logger.info("fused in %s: %s", type(causal).__name__, text or "nothing")


def _norm(module: nn.Module) -> FusedRMSNorm | None:
    """The fused norm that computes what `module` does; None where there is none."""
    parameters = dict(module.named_parameters())
    eps: Any = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if set(parameters) != {"weight"} or not isinstance(eps, float):
        return None
    weight = parameters["weight"]
    if weight.dim() != 1 or list(module.children()) or not _takes_one(module):
        return None
    probe = copy.deepcopy(module).to(device="cpu", dtype=torch.float32)
    # So small that eps has a say.
    x = torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0)) * 1e-2
    for plus in (0.0, 1.0):
        wide = weight.float() + plus
        if same(probe(x), F.rms_norm(x, weight.shape, wide.cpu(), eps)):
            return FusedRMSNorm(wide, eps, module, plus)
    return None


def _reads_types(layer: nn.Module) -> bool:
    """Whether a layer's forward looks at the type of weights, as of its norm's; ours is float32."""
    code = getattr(inspect.unwrap(type(layer).forward), "__code__", None)
    return code is not None and {"weight", "dtype"} <= {*code.co_names}


def _takes_one(module: nn.Module) -> bool:
    """Whether a module takes one input alone: norms of recurrent layers have a gate beside it."""
    return len(inspect.signature(module.forward).parameters) == 1


def _mlp(module: nn.Module, step: CurrentStep) -> FusedGatedMLP | None:
    """The fused feed-forward that computes what `module` does; None where there is none."""
    parts = dict(module.named_children())
    down, act = parts.get("down_proj"), getattr(module, "act_fn", None)
    act = getattr(module, "activation_fn", act)
    gate_up = _gate_up(parts.get("gate_up_proj", parts.get("gate_proj")))
    if act is None or not isinstance(down, GenericLinear) or gate_up is None:
        return None
    activation = activation_of(act)
    if activation is None or not _computes_gated(module, activation):
        return None
    return FusedGatedMLP(gate_up, down, step, activation)


def _gate_up(gate: nn.Module | None) -> nn.Module | None:
    """The product that gives gate's columns and then up's."""
    if isinstance(gate, MergedPart):
        gate = gate.merged if gate.is_first else None
    return gate.linear if isinstance(gate, GenericLinear | MergedColumns) else None


class _Stub:
    """Replaces a feed-forward; it has only the linear layers and the activation."""

    def __init__(self, module: nn.Module, gate: Tensor, up: Tensor, down: Tensor) -> None:
        names = dict(module.named_children())
        both = torch.cat((gate, up))
        linears = {"gate_proj": gate, "up_proj": up, "gate_up_proj": both, "down_proj": down}
        for name, weight in linears.items():
            if name in names:
                setattr(self, name, _linear(weight))
        for name in ("act_fn", "activation_fn", "activation_sparsity"):
            if hasattr(module, name):
                setattr(self, name, getattr(module, name))


def _linear(weight: Tensor) -> Any:
    return lambda x: F.linear(x, weight)


def _computes_gated(module: nn.Module, activation: Activation) -> bool:
    """Whether the class's forward is the formula, of its three linear layers alone."""
    generator = torch.Generator().manual_seed(0)
    gate, up, down = torch.randn(3, _WIDTH, _WIDTH, generator=generator)
    x = torch.randn(1, 3, _WIDTH, generator=generator)
    forward: Any = type(module).forward
    try:
        found = forward(_Stub(module, gate, up, down), x)
    except (AttributeError, TypeError, RuntimeError):
        return False
    act = ACTIVATIONS[activation]
    return same(found, F.linear(act(F.linear(x, gate)) * F.linear(x, up), down))


def _defer_rotation(module: nn.Module, step: CurrentStep) -> bool:
    """Let a layer hand on q and k as they are to its attention, with their angles."""
    forward = _undecorated(type(module).forward)
    scope: dict[str, Any] = getattr(forward, "__globals__", {})
    code = getattr(forward, "__code__", None)
    names = [name for name in ROTATIONS if name in scope and name in getattr(code, "co_names", ())]
    if not hasattr(module, "layer_idx") or code is None or not names:
        return False
    replaced = {name: partial(step.once, scope[name]) for name in OF_POSITIONS if name in scope}
    replaced |= {name: partial(step.defer_rotation, scope[name]) for name in names}
    own = FunctionType(
        code,
        {**scope, **replaced},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    # Of this module alone: transformers itself stays as it is.
    module.forward = MethodType(own, module)
    return True


def _undecorated(forward: Any) -> Any:
    """Return a forward without transformers' decorator that takes old names of arguments.

    Layers call each other with the new ones.
    """
    while getattr(forward, "__globals__", {}).get("__name__") == "transformers.utils.deprecation":
        forward = forward.__wrapped__
    return forward


def _defer_norms(causal: nn.Module, step: CurrentStep) -> int:
    """Let attention norm the heads of q, k and v itself where it rotates; return how many norms."""
    count = 0
    for module in list(causal.modules()):
        forward = module.__dict__.get("forward")
        scope = getattr(forward, "__globals__", {})
        if not any(name in scope for name in ROTATIONS) or _overwrites(forward):
            continue
        for name in ("q_norm", "k_norm", "v_norm"):
            norm, width = getattr(module, name, None), getattr(module, "head_dim", 0)
            if name == "v_norm" and isinstance(norm, nn.Module):
                norm = _plain_norm(norm, width, next(causal.parameters()).device)
            # Other norms of these names are of all heads at once.
            if isinstance(norm, FusedRMSNorm) and len(norm.weight) == width:
                setattr(module, name, norm)
                norm.deferral, norm.is_of_values = step, name == "v_norm"
                count += 1
    return count


def _overwrites(forward: Any) -> bool:
    """Return whether a forward overwrites tensors, as OLMoE clips q and k behind their norms.

    What stands for its norm until attention would be changed before it is normed.
    """
    names = (name for name in forward.__code__.co_names if not name.startswith("_"))
    return any(name.endswith("_") and hasattr(Tensor, name) for name in names)


def _plain_norm(module: nn.Module, width: int, device: torch.device) -> nn.Module:
    """The fused norm of what has no weights; the module itself if it is no such norm."""
    eps = getattr(module, "eps", None)
    if list(module.parameters()) or not isinstance(eps, float) or not _takes_one(module):
        return module
    x = torch.randn(3, _WIDTH, generator=torch.Generator().manual_seed(0)) * 1e-2
    is_known = same(module(x), F.rms_norm(x, (_WIDTH,), None, eps))
    return FusedRMSNorm(torch.ones(width, device=device), eps, module) if is_known else module

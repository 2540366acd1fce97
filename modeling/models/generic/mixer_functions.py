"""Which functions a recurrent mixer calls: torch's, an installed library's, or a kernel of ours.

transformers takes kernels of flash-linear-attention where it is installed. They run on GPUs alone
and round what they multiply, so elsewhere, and in float32, mixers call its functions in torch. On
GPUs one token's gated delta rule is a kernel that changes states where they lie.
"""

import inspect
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

RULE = "torch_recurrent_gated_delta_rule"
"""What transformers' mixers call for one token of a sequence that has a state."""

Forward = Callable[..., Tensor]


class SlotStates(NamedTuple):
    """Some rows' states where they lie: of all batch slots [slots, ...], and int64 [rows]."""

    of_slots: Tensor
    slots: Tensor


def mixer_forward(module: nn.Module, device: torch.device, dtype: torch.dtype) -> Forward:
    """Return a mixer's forward for inputs of this type, there."""
    forward, own = _as_written(module), dict[str, Any]()
    if forward is None:
        return MethodType(type(module).forward, module)
    named = {name: forward.__globals__.get(name) for name in forward.__code__.co_names}
    if device.type != "cuda" or dtype is torch.float32:
        # What transformers puts in front of a function of its own keeps that.
        plain = {n: getattr(f, "__wrapped__", None) for n, f in named.items()}
        own = {n: _with_known_options(f) for n, f in plain.items() if f is not None}
    if takes_slots(module, device):
        own[RULE] = partial(_step, own.get(RULE, named[RULE]))
    names = {**forward.__globals__, **own}
    changed = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    changed.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(changed if own else type(module).forward, module)


def takes_slots(module: nn.Module, device: torch.device) -> bool:
    """Whether a mixer takes `SlotStates`, for rows of one token each, and changes those."""
    forward = _as_written(module)
    calls = forward is not None and RULE in forward.__code__.co_names
    return calls and _kernel(device.type) is not None


def _as_written(module: nn.Module) -> Any:
    """The forward of a mixer's class, behind what transformers puts in front of it.

    None where another's function is in front of it, which counts.
    """
    forward: Any = type(module).forward
    while hasattr(forward, "__wrapped__"):
        if not forward.__globals__["__name__"].startswith("transformers."):
            return None
        forward = forward.__wrapped__
    return forward


@cache
def _kernel(device_type: str) -> Callable[..., Tensor] | None:
    if device_type != "cuda":
        return None
    try:
        # Here, not above: Triton comes with CUDA builds of torch only.
        from modeling.layers.triton_delta_rule import delta_rule_step
    except ImportError:
        return None
    return delta_rule_step


def _with_known_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that leaves out options which it has not, as transformers does."""
    known = frozenset(inspect.signature(function).parameters)

    def call(*given: Any, **options: Any) -> Any:
        return function(*given, **{name: own for name, own in options.items() if name in known})

    return call


def _step(rule: Callable[..., Any], *given: Tensor, initial_state: Any, **options: Any) -> Any:
    """Compute the rule; states of batch slots are changed where they lie, and none is returned."""
    if not isinstance(initial_state, SlotStates):
        return rule(*given, initial_state=initial_state, **options)
    kernel = _kernel(given[0].device.type)
    assert kernel is not None, "states of batch slots without the kernel that reads them"
    gates, norm = (options["g"], options["beta"]), options["use_qk_l2norm_in_kernel"]
    return kernel(*given, *gates, *initial_state, norm), None

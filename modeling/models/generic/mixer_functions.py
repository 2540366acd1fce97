"""Which functions a recurrent mixer calls: torch's, an installed library's, or a kernel of ours.

transformers takes kernels of flash-linear-attention where it is installed. They run on GPUs alone
and round what they multiply, so elsewhere, and in float32, mixers call its functions in torch. On
GPUs one token's gated delta rule is a kernel that changes states where they lie. Mamba 1's scan of
several tokens is ours everywhere: transformers' begins without a state, as its `generate` computes
a prompt at once.
"""

import inspect
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modeling.layers.selective_scan import selective_scan
from modeling.models.generic.lightning import STATE, LightningForward

RULE = "torch_recurrent_gated_delta_rule"
"""What transformers' mixers call for one token of a sequence that has a state."""

SCAN = "mamba_selective_scan"
"""What they call for several tokens of a Mamba 1 mixer, or for one without a state."""


class SlotStates(NamedTuple):
    """Some rows' states where they lie: of all batch slots [slots, ...], and int64 [rows]."""

    of_slots: Tensor
    slots: Tensor


class MixerForward(NamedTuple):
    """A mixer's forward.

    takes_slots: whether it takes `SlotStates` for rows of one token each, and changes those.
    scan: gets the state of a row of several tokens before a call; None: the cache alone has it.
    """

    compute: Callable[..., Any]
    takes_slots: bool
    scan: "SelectiveScan | None" = None


class SelectiveScan:
    """Replaces transformers' function of that name in one mixer.

    state: that of the next call, [1, channels, states]; None for a row that begins.
    """

    state: Tensor | None = None

    def __call__(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *,
        D: Tensor,
        z: Tensor,
        delta_bias: Tensor,
        delta_softplus: bool,
        return_last_state: bool,
        **_options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs and the state behind the last token; shapes are `selective_scan`'s."""
        assert delta_softplus
        assert return_last_state
        dt = F.softplus(dt + delta_bias.to(dt.dtype)[:, None])
        return selective_scan(hidden_states, dt, A, B, C, D, z, self.state)


def mixer_forward(module: nn.Module, device: torch.device, dtype: torch.dtype) -> MixerForward:
    """Return a mixer's forward for inputs of this type, there."""
    forward, own = _as_written(module), dict[str, Any]()
    if forward is None:
        return MixerForward(MethodType(type(module).forward, module), False)
    if STATE in forward.__code__.co_names:
        plain = MethodType(type(module).forward, module)
        return MixerForward(LightningForward(module, plain), False)
    named = {name: forward.__globals__.get(name) for name in forward.__code__.co_names}
    if device.type != "cuda" or dtype is torch.float32:
        # What transformers puts in front of a function of its own keeps that.
        torchs = {n: getattr(f, "__wrapped__", None) for n, f in named.items()}
        own = {n: _with_known_options(f) for n, f in torchs.items() if f is not None}
    kernel = _kernel(device.type) if RULE in named else None
    if kernel is not None:
        own[RULE] = partial(_step, kernel, own.get(RULE, named[RULE]))
    scan = SelectiveScan() if SCAN in named else None
    if scan is not None:
        own[SCAN] = scan
    names = {**forward.__globals__, **own}
    changed = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    changed.__kwdefaults__ = forward.__kwdefaults__
    used = changed if own else type(module).forward
    return MixerForward(MethodType(used, module), kernel is not None, scan)


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
        from modeling.layers.kernels.delta_rule import delta_rule_step
    except ImportError:
        return None
    return delta_rule_step


def _with_known_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that leaves out options which it has not, as transformers does."""
    known = frozenset(inspect.signature(function).parameters)

    def call(*given: Any, **options: Any) -> Any:
        return function(*given, **{name: own for name, own in options.items() if name in known})

    return call


def _step(
    kernel: Callable[..., Tensor],
    rule: Callable[..., Any],
    *given: Tensor,
    initial_state: Any,
    **options: Any,
) -> Any:
    """Compute the rule; states of batch slots are changed where they lie, and none is returned."""
    if not isinstance(initial_state, SlotStates):
        return rule(*given, initial_state=initial_state, **options)
    gates, norm = (options["g"], options["beta"]), options["use_qk_l2norm_in_kernel"]
    return kernel(*given, *gates, *initial_state, norm), None

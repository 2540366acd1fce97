"""One layer's experts in each stored form, of random numbers, and the equation of one expert."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from configs.quantisation import Activations
from modeling.models.generic.fp4_experts import Fp4Matrices
from modeling.models.generic.integer_experts import IntegerMatrices
from modeling.models.generic.scaled_experts import ScaledMatrices
from modeling.quantisation.activations import FP8, rounded_by_group, to_codes
from modeling.quantisation.fp4 import MXFP4, NVFP4, pack, rounded
from modeling.quantisation.integers import IntegerWeight, local_groups
from modeling.quantisation.scaled import RowScaledWeight

Layer = tuple[Any, Any, Any, Callable[..., Tensor]]
Deltas = Sequence[Callable[[Tensor], Tensor]]
"""What is added to gate and up, and to down, of their inputs."""

NO_DELTAS: Deltas = (lambda x: x.new_zeros(()), lambda x: x.new_zeros(()))

INTEGERS: dict[str, dict[str, Any]] = {
    "4 bits": {"group": 128},
    "4 bits, zero points": {"group": 128, "zero_points": True},
    "4 bits, groups of 64": {"group": 64},
    "4 bits, groups of 32": {"group": 32, "zero_points": True},
    "4 bits, one group": {"group": 2**20},
    "4 bits, act-order": {"group": 64, "zero_points": True, "ordered": True},
    "4 bits, float16": {"group": 128, "zero_points": True, "dtype": torch.float16},
}
"""What `integer_weights` makes."""

SCALED: dict[str, dict[str, Any]] = {
    "fp8 by output": {},
    "fp8 by output, float16": {"dtype": torch.float16},
    "fp8 by output, static": {"activations": Activations.STATIC},
    "fp8 by output, weights alone": {"activations": Activations.NONE},
    "8 bits": {"kind": torch.int8},
    "8 bits, static": {"kind": torch.int8, "activations": Activations.STATIC},
}
"""What `scaled_weights` makes."""


def fp4_weights(
    count: int,
    shape: tuple[int, int],
    size: int,
    rounds: bool = False,
    device: str = "cuda",
    alike: bool = False,
) -> tuple[Any, Tensor]:
    """A `StoredWeight` of so many experts in nvfp4 or mxfp4, and its numbers in float32.

    An expert of nvfp4 has two maps below each other. The numbers are exact in bfloat16, so that
    what kernels make of them, unrounded, is the same. alike: whether experts round their inputs
    alike.
    """
    from modeling.layers.kernels.stored_weights import StoredWeight

    of_groups = count, shape[0], shape[1] // size
    codes = torch.randint(0, 16, (count, *shape), device=device).byte()
    if size == MXFP4:
        scales, outer, inputs = torch.randint(118, 122, of_groups, device=device).byte(), None, None
    else:
        scales = torch.randint(40, 80, of_groups, device=device).byte()
        outer = torch.exp2(torch.randint(-9, -6, (count, 2), device=device).double())
        inputs = torch.rand(count, 1, device=device).mul(800).add(100) if rounds else None
        if inputs is not None and alike:
            inputs[:] = inputs[0]
    pairs = map(pack, codes, scales)
    stored = Fp4Matrices(pairs, shape[1], torch.bfloat16, outer, rounds, inputs)
    fields = stored.kernel_fields()
    own = StoredWeight(stored.codes.data, stored.scales.data, None, shape, **fields)
    return own, stored.numbers().float()


def inputs_of(weight: Any, x: Tensor, expert: int) -> Tensor:
    """x as it counts in the product with an expert, by the reference."""
    if not weight.rounds:
        return x
    scales = weight.input_scales
    if weight.rounds_by_expert:
        scales = scales[expert : expert + 1]
    return rounded(x, weight.size, scales)


def layer_fp4(size: int, rounds: bool, hidden: int, inner: int, count: int) -> Layer:
    """up, down, gate, and the equation of one expert in float32, like Qwen3-MoE's."""
    from modeling.layers.kernels.stored_weights import Gate

    up, up_numbers = fp4_weights(count, (2 * inner, hidden), size, rounds)
    down, down_numbers = fp4_weights(count, (hidden, inner), size, rounds)

    def expert(x: Tensor, number: int, deltas: Deltas = NO_DELTAS) -> Tensor:
        y = inputs_of(up, x.bfloat16(), number).float() @ up_numbers[number].T + deltas[0](x)
        found = (F.silu(y[:, :inner]) * y[:, inner:]).bfloat16()
        own = inputs_of(down, found, number).float()
        return F.linear(own, down_numbers[number]) + deltas[1](found.float())

    return up, down, Gate(), expert


def layer_gpt_oss(hidden: int, inner: int, count: int) -> Layer:
    """The same in mxfp4, like gpt-oss'."""
    from modeling.layers.kernels.stored_weights import Gate

    def weight(out: int, wide: int) -> tuple[Any, Tensor]:
        own, numbers = fp4_weights(count, (out, wide), MXFP4)
        return replace(own, bias=torch.randn(count, out, device="cuda").bfloat16()), numbers

    (up, up_numbers), (down, down_numbers) = weight(2 * inner, hidden), weight(hidden, inner)

    def expert(x: Tensor, number: int, deltas: Deltas = NO_DELTAS) -> Tensor:
        y = x @ up_numbers[number].T + up.bias[number].float() + deltas[0](x)
        gate, other = y[:, 0::2].clamp(max=7.0), y[:, 1::2].clamp(-7.0, 7.0)
        found = ((other + 1) * gate * torch.sigmoid(gate * 1.702)).bfloat16().float()
        y = F.linear(found, down_numbers[number], down.bias[number].float())
        return y + deltas[1](found)

    return up, down, Gate(True, 7.0, 1.702), expert


def layer_fp8(hidden: int, inner: int, count: int) -> Layer:
    """The same, like Qwen3-MoE's: x and inner columns are rounded too."""
    from modeling.layers.kernels.stored_weights import Gate, StoredWeight

    def weight(out: int, wide: int) -> tuple[Any, Tensor]:
        codes = torch.randn(count, out, wide, device="cuda").mul(64).clamp(-448, 448).to(FP8)
        blocks = torch.rand(count, out // 128, wide // 128, device="cuda").add(0.5) / 64
        whole = blocks.repeat_interleave(128, 1).repeat_interleave(128, 2) / wide**0.5
        return StoredWeight(codes, blocks / wide**0.5, None, (out, wide)), codes.float() * whole

    (up, up_numbers), (down, down_numbers) = weight(2 * inner, hidden), weight(hidden, inner)

    def expert(x: Tensor, number: int, deltas: Deltas = NO_DELTAS) -> Tensor:
        y = rounded_by_group(x, 128) @ up_numbers[number].T + deltas[0](x)
        found = (F.silu(y[:, :inner]) * y[:, inner:]).bfloat16().float()
        return F.linear(rounded_by_group(found, 128), down_numbers[number]) + deltas[1](found)

    return up, down, Gate(), expert


def random_integers(
    shape: tuple[int, int],
    group: int,
    zero_points: bool,
    ordered: bool,
    dtype: torch.dtype,
    device: str,
) -> IntegerWeight:
    """A matrix [out, in]. group: inputs that share a scale. ordered: by act-order."""
    outputs, inputs = shape
    count = -(-inputs // group)
    codes = torch.randint(0, 16, shape, device=device).byte()
    zeros = torch.randint(0, 16, (outputs, count), device=device).byte() if zero_points else None
    scales = torch.rand(outputs, count, device=device).add(0.5).div(5 * inputs**0.5).to(dtype)
    group_of = torch.arange(inputs, device=device) // group
    group_of = group_of[torch.randperm(inputs, device=device)] if ordered else group_of
    return IntegerWeight(codes, local_groups(scales, zeros, group_of, 8), 4, dtype)


def integer_weights(
    count: int,
    shape: tuple[int, int],
    group: int,
    zero_points: bool = False,
    ordered: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
) -> tuple[Any, Tensor]:
    """A `StoredWeight` of so many experts, and its numbers in float32, [experts, out, in]."""
    from modeling.layers.kernels.stored_weights import StoredWeight

    form = (group, zero_points, ordered, dtype, device)
    stored = IntegerMatrices([[random_integers(shape, *form)] for _ in range(count)])
    fields = stored.kernel_fields()
    own = StoredWeight(stored.codes.data, stored.scales.data, None, shape, **fields)
    return own, stored.numbers().float()


def layer_integers(form: str, hidden: int, inner: int, count: int) -> Layer:
    """The same, in integers of 4 bits."""
    from modeling.layers.kernels.stored_weights import Gate

    up, up_numbers = integer_weights(count, (2 * inner, hidden), **INTEGERS[form])
    down, down_numbers = integer_weights(count, (hidden, inner), **INTEGERS[form])
    dtype = dtype_of(form)

    def expert(x: Tensor, number: int, deltas: Deltas = NO_DELTAS) -> Tensor:
        y = x @ up_numbers[number].T + deltas[0](x)
        found = (F.silu(y[:, :inner]) * y[:, inner:]).to(dtype).float()
        return F.linear(found, down_numbers[number]) + deltas[1](found)

    return up, down, Gate(), expert


def scaled_weights(
    count: int,
    shape: tuple[int, int],
    kind: torch.dtype = FP8,
    activations: Activations = Activations.TOKEN,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    alike: bool = False,
) -> tuple[Any, Callable[[Tensor, int], Tensor]]:
    """A `StoredWeight` of so many experts in codes of 8 bits, and the product with one in float32.

    alike: whether experts have the same STATIC scale of their inputs.
    """
    from modeling.layers.kernels.stored_weights import StoredWeight

    parts = []
    for number in range(count):
        values = torch.randn(shape, device=device).mul(40)
        scales = torch.rand(shape[0], 1, device=device).add(0.5).div(40 * shape[1] ** 0.5)
        step = torch.tensor([1.0 if alike else 1 + number % 3], device=device)
        own = step * (0.03 if kind is torch.int8 else 0.01)
        given = own if activations is Activations.STATIC else None
        codes = to_codes(values, torch.ones((), device=device), kind)
        parts.append([RowScaledWeight(codes, scales, activations, dtype, given)])
    stored = ScaledMatrices(parts)
    numbers = stored.codes.float() * stored.scales

    def multiplied(x: Tensor, expert: int) -> Tensor:
        experts = torch.full((len(x),), expert, device=device)
        return F.linear(stored.inputs(x, experts)[0], numbers[expert])

    return StoredWeight(stored.codes, bias=None, shape=shape, **stored.kernel_fields()), multiplied


def layer_scaled(form: str, hidden: int, inner: int, count: int) -> Layer:
    """The same, in codes of 8 bits with scales of outputs."""
    from modeling.layers.kernels.stored_weights import Gate

    up, by_up = scaled_weights(count, (2 * inner, hidden), **SCALED[form])
    down, by_down = scaled_weights(count, (hidden, inner), **SCALED[form])
    dtype = dtype_of(form)

    def expert(x: Tensor, number: int, deltas: Deltas = NO_DELTAS) -> Tensor:
        y = by_up(x, number) + deltas[0](x)
        found = (F.silu(y[:, :inner]) * y[:, inner:]).to(dtype).float()
        return by_down(found, number) + deltas[1](found)

    return up, down, Gate(), expert


def dtype_of(form: str) -> torch.dtype:
    """The type of what is multiplied with it."""
    how: dict[str, Any] = {**INTEGERS, **SCALED}.get(form, {})
    found: torch.dtype = how.get("dtype", torch.bfloat16)
    return found


LAYERS: dict[str, Callable[[int, int, int], Layer]] = {
    "gpt-oss": layer_gpt_oss,
    "nvfp4": partial(layer_fp4, NVFP4, True),
    "nvfp4, weights alone": partial(layer_fp4, NVFP4, False),
    "mxfp4": partial(layer_fp4, MXFP4, True),
    "mxfp4, weights alone": partial(layer_fp4, MXFP4, False),
    "fp8": layer_fp8,
    **{form: partial(layer_integers, form) for form in INTEGERS},
    **{form: partial(layer_scaled, form) for form in SCALED},
}

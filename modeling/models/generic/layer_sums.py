"""Computes the sums of decoder layers together with the norms and factors around them.

A layer's own forward is followed once. The same calls are made from then on, with each sum, the
norm and the factor of what is added, the factor of the sum and the norm of it in one launch, and
with an activation and the product that reads it in one launch. A layer that cannot be followed
stays as it is.
"""

import operator
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from configs.architectures.base import Activation
from modeling.layers.fused import fused_ops
from modeling.models.generic.comparing import activation_of
from modeling.models.generic.following import (
    MORE,
    Argument,
    Call,
    Computed,
    Followed,
    Operation,
    Value,
    follow,
    operands,
)
from modeling.models.generic.norms import FusedRMSNorm, NormedSum


@dataclass(frozen=True)
class SumStep:
    """A sum with what is computed with it; x, residual: the numbers of its values.

    total: the number of what it gives; normed: of the outer norm, None where the layer has none.
    """

    x: int
    residual: int
    parts: NormedSum
    total: int
    normed: int | None


@dataclass(frozen=True)
class GateStep:
    """act(gate) * other; gate: the number of a value, act: the name of a module."""

    act: str
    gate: int
    other: Value | Argument
    is_gelu: bool


@dataclass(frozen=True)
class Addend:
    """inner(x) * factor; left_out: the numbers of the norm and the product."""

    x: int
    inner: FusedRMSNorm | None
    factor: float
    left_out: tuple[int, ...]


class LayerSums:
    """One layer's operations, with its sums and norms together."""

    def __init__(self, layer: nn.Module, followed: Followed) -> None:
        self._layer = layer
        self._followed = followed
        self._uses = Counter(number for each in followed.operations for number in operands(each))
        returned = followed.result if isinstance(followed.result, tuple) else (followed.result,)
        self._uses.update(each.number for each in returned if isinstance(each, Value))
        self._steps: dict[int, Operation | SumStep | GateStep] = {}

    @property
    def entry(self) -> FusedRMSNorm | None:
        """The norm of the layer's input."""
        number = self._norm_of(0)
        return None if number is None else self._norm(number)

    def link(self, following: FusedRMSNorm | None) -> Counter[str]:
        """Plan the forward; return how many launches have several operations, by what they are.

        following: what normalises the layer's result next, if known. It gets that norm ahead.
        """
        self._steps = dict(enumerate(self._followed.operations))
        count: Counter[str] = Counter()
        for number, each in enumerate(self._followed.operations):
            if isinstance(each, Computed) and all(isinstance(own, Value) for own in each.args):
                is_sum = each.function is operator.add
                count["sum with its norms"] += is_sum and self._plan_sum(number, each, following)
            if isinstance(each, Computed) and each.function is operator.mul:
                count["activation with its product"] += self._plan_gate(number, each)
        return count

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer's own forward returns."""
        followed = self._followed
        given = {**followed.defaults, **dict(zip(followed.names, args, strict=False)), **kwargs}
        values: dict[int, Any] = {}

        def real(operand: Any) -> Any:
            if isinstance(operand, Value):
                return values[operand.number]
            return given[operand.name] if isinstance(operand, Argument) else operand

        for number, step in self._steps.items():
            if isinstance(step, Argument):
                values[number] = given[step.name]
            elif isinstance(step, Computed):
                values[number] = step.function(*map(real, step.args))
            elif isinstance(step, Call):
                named = {name: real(each) for name, each in step.kwargs.items() if name != MORE}
                if MORE in step.kwargs:
                    named |= {
                        name: own for name, own in given.items() if name not in followed.names
                    }
                values[number] = getattr(self._layer, step.module)(*map(real, step.args), **named)
            elif isinstance(step, GateStep):
                act = getattr(self._layer, step.act)
                values[number] = _gated(act, values[step.gate], real(step.other), step.is_gelu)
            else:
                _add(step, values)
        if isinstance(followed.result, tuple):
            return tuple(map(real, followed.result))
        return real(followed.result)

    def _plan_sum(self, number: int, each: Computed, following: FusedRMSNorm | None) -> bool:
        """Replace a sum, its norms and factors by one step; False if it has none of these."""
        left, right = (self._addend(own.number) for own in each.args)
        addend, residual = right, each.args[0].number
        if len(left.left_out) > len(right.left_out):
            addend, residual = left, each.args[1].number
        total, total_factor = self._multiplied(number)
        normed = self._norm_of(total)
        outer = None if normed is None else self._norm(normed)
        if normed is None and total == self._followed.last:
            outer = following
        if outer is None and total == number and not addend.left_out:
            return False
        parts = NormedSum(addend.inner, outer, addend.factor, total_factor)
        self._steps[number] = SumStep(addend.x, residual, parts, total, normed)
        for own in (*addend.left_out, total, normed):
            if own is not None and own != number:
                del self._steps[own]
        return True

    def _addend(self, number: int) -> Addend:
        """What gives a value of a sum, as far as it is for that sum alone."""
        x, factor, inner = number, 1.0, None
        left_out: list[int] = []
        scaled = self._scaled(x) if self._is_left(x) else None
        if scaled is not None:
            left_out.append(x)
            x, factor = scaled
        if self._is_left(x) and (inner := self._norm(x)) is not None:
            left_out.append(x)
            (x,) = operands(self._followed.operations[x])
        return Addend(x, inner, factor, tuple(left_out))

    def _is_left(self, number: int) -> bool:
        """Whether a value is read once, and computed by no step that was planned before."""
        return self._uses[number] == 1 and number in self._steps

    def _scaled(self, number: int) -> tuple[int, float] | None:
        """The number of the value, and the factor, of a product of a value and a number."""
        each = self._followed.operations[number]
        if not isinstance(each, Computed) or each.function is not operator.mul:
            return None
        values = [own for own in each.args if isinstance(own, Value)]
        factors = [own for own in each.args if isinstance(own, int | float | Tensor)]
        return (values[0].number, float(factors[0])) if values and factors else None

    def _multiplied(self, number: int) -> tuple[int, float]:
        """The number and the factor of the product that alone reads a value; itself, and 1."""
        for product, each in enumerate(self._followed.operations):
            scaled = self._scaled(product) if operands(each) == [number] else None
            if scaled is not None and self._uses[number] == 1:
                return product, scaled[1]
        return number, 1.0

    def _norm(self, number: int) -> FusedRMSNorm | None:
        """The norm that gives this value, of one other value alone."""
        call = self._followed.operations[number]
        if not isinstance(call, Call) or call.kwargs or len(call.args) != 1:
            return None
        module = getattr(self._layer, call.module)
        return module if isinstance(module, FusedRMSNorm) and operands(call) else None

    def _norm_of(self, of: int) -> int | None:
        """The first norm of a value."""
        for number, each in enumerate(self._followed.operations):
            if self._norm(number) is not None and operands(each) == [of]:
                return number
        return None

    def _plan_gate(self, number: int, product: Computed) -> bool:
        """Replace an activation and the product that alone reads it by one step."""
        for gate, other in (product.args, product.args[::-1]):
            call = self._followed.operations[gate.number] if isinstance(gate, Value) else None
            if not isinstance(call, Call) or not isinstance(other, Value | Argument):
                continue
            activation = self._activation(call) if self._is_left(gate.number) else None
            if activation in (Activation.SILU, Activation.GELU_TANH):
                is_gelu = activation is Activation.GELU_TANH
                (read,) = operands(call)
                self._steps[number] = GateStep(call.module, read, other, is_gelu)
                del self._steps[gate.number]
                return True
        return False

    def _activation(self, call: Call) -> Activation | None:
        """What a call computes of one value, if it is an activation."""
        module = getattr(self._layer, call.module)
        if call.kwargs or len(call.args) != 1 or not operands(call) or list(module.parameters()):
            return None
        return activation_of(module)


def _add(step: SumStep, values: dict[int, Any]) -> None:
    """Compute a sum with its norms."""
    total, normed = step.parts.compute(values[step.x], values[step.residual])
    values[step.total] = total
    if step.normed is not None:
        values[step.normed] = normed
    elif step.parts.outer is not None and normed is not None:
        step.parts.outer.keep_ahead(total, normed)


def _gated(act: nn.Module, gate: Tensor, other: Tensor, is_gelu: bool) -> Tensor:
    """act(gate) * other, in one launch where there is a kernel."""
    ops = fused_ops(gate.device)
    is_alike = gate.shape == other.shape and gate.dtype == other.dtype
    # Rows may be far from each other, but not the numbers of a row.
    if ops is None or not is_alike or gate.stride(-1) != 1 or other.stride(-1) != 1:
        found: Tensor = act(gate) * other
        return found
    return ops.gated_mul(gate.flatten(0, -2), other.flatten(0, -2), is_gelu).view(gate.shape)


def fuse_sums(causal: nn.Module, dtype: torch.dtype) -> Counter[str]:
    """Plan every layer that can be followed; return how many launches have several operations.

    dtype: of what layers compute.
    """
    count: Counter[str] = Counter()
    for parent in causal.modules():
        for layers in parent.children():
            if isinstance(layers, nn.ModuleList):
                count += _fuse_list(layers, _only_norm(parent), dtype)
    return count


def _fuse_list(
    layers: nn.ModuleList, last: FusedRMSNorm | None, dtype: torch.dtype
) -> Counter[str]:
    """last: what normalises the last layer's result, if it does."""
    planned = []
    for layer in layers:
        is_known = type(layer).__module__.startswith("transformers.")
        followed = follow(layer, dtype) if is_known else None
        planned.append(None if followed is None else LayerSums(layer, followed))
    entries = [None if sums is None else sums.entry for sums in planned]
    count: Counter[str] = Counter()
    for layer, sums, following in zip(layers, planned, [*entries[1:], last], strict=True):
        if sums is not None and (fused := sums.link(following)).total():
            layer.forward = sums.forward
            count += fused
    return count


def _only_norm(parent: nn.Module) -> FusedRMSNorm | None:
    found = [each for each in parent.children() if isinstance(each, FusedRMSNorm)]
    return found[0] if len(found) == 1 else None

"""Computes the sums of decoder layers together with the norms around them.

A layer's own forward is followed once, its modules replaced by stubs that write down their calls.
If it consists of calls and sums alone, the same calls are made from then on, with each sum, the
norm of it and the norm before it in one launch. A layer that does more stays as it is.
"""

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor, nn

from modeling.models.generic.norms import FusedRMSNorm

NOT_FOLLOWED = (AttributeError, TypeError, ValueError, RuntimeError, LookupError)
"""What following a forward raises if it does more than call and add."""

MORE = "loray_more"
"""Stands for what a layer takes as **kwargs."""


@dataclass(frozen=True)
class Argument:
    """One of a layer's arguments, which it may only hand on to its modules."""

    name: str

    def __bool__(self) -> NoReturn:
        """Not followed: another call may decide otherwise."""
        raise TypeError(f"a layer decides by {self.name}")


@dataclass(frozen=True)
class Call:
    """The result of the layer's child of that name, called with values and arguments."""

    module: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class Item:
    """One of two results of a call; of: the call's value."""

    of: int
    index: int


@dataclass(frozen=True)
class Sum:
    """The sum of two values."""

    left: int
    right: int


Operation = Call | Item | Sum | Argument
"""What computes a value: value 0 is the layer's input, an argument."""


@dataclass(frozen=True)
class Value:
    """Replaces a tensor while a forward is followed: it can be added, handed on and unpacked.

    operations: all that were followed so far. number: the index of its own.
    """

    operations: list[Operation]
    number: int

    def then(self, operation: Operation) -> "Value":
        """What the operation gives."""
        self.operations.append(operation)
        return Value(self.operations, len(self.operations) - 1)

    def __add__(self, other: object) -> "Value":
        """The sum; TypeError for anything but two values."""
        if not isinstance(other, Value):
            return NotImplemented
        return self.then(Sum(self.number, other.number))

    def __iter__(self) -> Iterator["Value"]:
        """Two results: attention returns weights too."""
        return iter([self.then(Item(self.number, index)) for index in range(2)])

    def __bool__(self) -> NoReturn:
        """Not followed, as for an argument."""
        raise TypeError("a layer decides by its numbers")


class _Stub:
    """Replaces a layer: its modules write down their calls, all else is the layer's."""

    def __init__(self, layer: nn.Module, given: Value) -> None:
        self._layer = layer
        self._given = given

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._layer, name)
        if not isinstance(found, nn.Module):
            return found
        return lambda *args, **kwargs: self._given.then(Call(name, args, kwargs))


@dataclass(frozen=True)
class Followed:
    """What a layer computes.

    names: of its parameters, the input first; defaults: of those that have one. operations: in
    the order of computing, each value's. result: the number of the layer's.
    """

    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    operations: tuple[Operation, ...]
    result: int


def follow(layer: nn.Module) -> Followed | None:
    """What the layer computes; None if it does more than call its modules and add."""
    # Without what checkpoints activations in training, which looks at the class.
    forward: Any = inspect.unwrap(type(layer).forward)
    try:
        first, *others = list(inspect.signature(forward).parameters.values())[1:]
        named = [each for each in others if each.kind is not each.VAR_KEYWORD]
        given = Value([Argument(first.name)], 0)
        arguments = {each.name: Argument(each.name) for each in named}
        if len(named) < len(others):
            arguments[MORE] = Argument(MORE)
        result = forward(_Stub(layer, given), given, **arguments)
    except NOT_FOLLOWED:
        return None
    if not isinstance(result, Value):
        return None
    return Followed(
        (first.name, *(each.name for each in named)),
        {each.name: each.default for each in named if each.default is not each.empty},
        tuple(given.operations),
        result.number,
    )


@dataclass(frozen=True)
class NormedSum:
    """residual + x or residual + inner(x), and the outer norm of it.

    normed: the number of the outer norm; None where the layer ends with the sum.
    """

    residual: int
    x: int
    inner: FusedRMSNorm | None
    outer: FusedRMSNorm
    normed: int | None


class LayerSums:
    """One layer's calls, with its sums and norms together."""

    def __init__(self, layer: nn.Module, followed: Followed) -> None:
        self._layer = layer
        self._followed = followed
        self._uses = Counter(number for each in followed.operations for number in _operands(each))
        self._steps: dict[int, Operation | NormedSum] = {}

    @property
    def entry(self) -> FusedRMSNorm | None:
        """The norm of the layer's input."""
        number = self._norm_of(0)
        return None if number is None else self._norm(number)

    def link(self, following: FusedRMSNorm | None) -> int:
        """Plan the forward; return how many sums are computed with a norm.

        following: what normalises the layer's result next, if known. It gets that norm ahead.
        """
        self._steps = dict(enumerate(self._followed.operations))
        count = 0
        for number, operation in enumerate(self._followed.operations):
            if isinstance(operation, Sum):
                count += self._plan_sum(number, operation, following)
        return count

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the layer's own forward returns."""
        followed = self._followed
        given = {**followed.defaults, **dict(zip(followed.names, args, strict=False)), **kwargs}
        values: dict[int, Any] = {}
        for number, step in self._steps.items():
            if isinstance(step, Argument):
                values[number] = given[step.name]
            elif isinstance(step, Call):
                values[number] = self._call(step, values, given)
            elif isinstance(step, Item):
                values[number] = values[step.of][step.index]
            elif isinstance(step, Sum):
                values[number] = values[step.left] + values[step.right]
            else:
                _add(number, step, values)
        result: Tensor = values[followed.result]
        return result

    def _plan_sum(self, number: int, each: Sum, following: FusedRMSNorm | None) -> bool:
        """Replace a sum and its norms by one step, if anything normalises it next."""
        normed = self._norm_of(number)
        outer = None if normed is None else self._norm(normed)
        if normed is None and number == self._followed.result:
            outer = following
        if outer is None:
            return False
        step = NormedSum(each.left, each.right, None, outer, normed)
        for x, residual in ((each.right, each.left), (each.left, each.right)):
            inner = self._norm(x)
            # Not if the sum before has computed it already.
            if inner is not None and self._uses[x] == 1 and x in self._steps:
                (of,) = _operands(self._followed.operations[x])
                step = NormedSum(residual, of, inner, outer, normed)
                del self._steps[x]
                break
        self._steps[number] = step
        if normed is not None:
            del self._steps[normed]
        return True

    def _norm(self, number: int) -> FusedRMSNorm | None:
        """The norm that gives this value, of one other value alone."""
        call = self._followed.operations[number]
        if not isinstance(call, Call) or call.kwargs or len(call.args) != 1:
            return None
        module = getattr(self._layer, call.module)
        return module if isinstance(module, FusedRMSNorm) and _operands(call) else None

    def _norm_of(self, of: int) -> int | None:
        """The first norm of a value."""
        for number, each in enumerate(self._followed.operations):
            if self._norm(number) is not None and _operands(each) == [of]:
                return number
        return None

    def _call(self, call: Call, values: Mapping[int, Any], given: Mapping[str, Any]) -> Any:
        def real(operand: Any) -> Any:
            if isinstance(operand, Value):
                return values[operand.number]
            return given[operand.name] if isinstance(operand, Argument) else operand

        kwargs = {name: real(each) for name, each in call.kwargs.items() if name != MORE}
        if MORE in call.kwargs:
            names = self._followed.names
            kwargs |= {name: each for name, each in given.items() if name not in names}
        return getattr(self._layer, call.module)(*map(real, call.args), **kwargs)


def _add(number: int, step: NormedSum, values: dict[int, Any]) -> None:
    """Compute a sum and its norm."""
    total, normed = step.outer.after_sum(values[step.x], values[step.residual], step.inner)
    values[number] = total
    if step.normed is None:
        step.outer.keep_ahead(total, normed)
    else:
        values[step.normed] = normed


def _operands(operation: Operation) -> list[int]:
    """Numbers of the values that an operation reads."""
    if isinstance(operation, Call):
        found = (*operation.args, *operation.kwargs.values())
        return [each.number for each in found if isinstance(each, Value)]
    if isinstance(operation, Sum):
        return [operation.left, operation.right]
    return [operation.of] if isinstance(operation, Item) else []


def fuse_sums(causal: nn.Module) -> int:
    """Plan every layer if its forward can be followed; return how many sums go with a norm."""
    count = 0
    for parent in causal.modules():
        for layers in parent.children():
            if isinstance(layers, nn.ModuleList):
                count += _fuse_list(layers, _only_norm(parent))
    return count


def _fuse_list(layers: nn.ModuleList, last: FusedRMSNorm | None) -> int:
    """last: what normalises the last layer's result, if it does."""
    planned = []
    for layer in layers:
        followed = follow(layer) if type(layer).__module__.startswith("transformers.") else None
        planned.append(None if followed is None else LayerSums(layer, followed))
    entries = [None if sums is None else sums.entry for sums in planned]
    count = 0
    for layer, sums, following in zip(layers, planned, [*entries[1:], last], strict=True):
        if sums is not None and (fused := sums.link(following)):
            layer.forward = sums.forward
            count += fused
    return count


def _only_norm(parent: nn.Module) -> FusedRMSNorm | None:
    found = [each for each in parent.children() if isinstance(each, FusedRMSNorm)]
    return found[0] if len(found) == 1 else None

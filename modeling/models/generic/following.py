"""Follows a decoder layer's forward once, and writes down what it computes.

Its modules are replaced by stubs that write down their calls, and tensors by what writes down sums,
products and changes of shape. A layer that does more is not followed.
"""

import dis
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

NOT_FOLLOWED = (AttributeError, TypeError, ValueError, RuntimeError, LookupError)
"""What following a forward raises if it does more."""

MORE = "loray_more"
"""Stands for what a layer takes as **kwargs."""

ARITHMETIC = (operator.add, operator.mul)


@dataclass(frozen=True, eq=False)
class Argument:
    """One of a layer's arguments, which it may hand on to its modules, add and multiply."""

    name: str

    def __bool__(self) -> NoReturn:
        """Not followed: another call may decide otherwise."""
        raise TypeError(f"a layer decides by {self.name}")

    def __eq__(self, _other: object) -> NoReturn:
        """Not followed, as for a decision."""
        raise TypeError(f"a layer decides by {self.name}")


@dataclass(frozen=True)
class Call:
    """The result of the layer's child of that name, called with values, arguments and others."""

    module: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class Computed:
    """The result of a function of values, arguments and numbers."""

    function: Callable[..., Any]
    args: Sequence[Any]


Operation = Call | Computed | Argument
"""What computes a value: value 0 is the layer's input, an argument."""


@dataclass(frozen=True)
class Trace:
    """What was followed so far.

    dtype: of the layer's values. overwritten: the numbers of values that were changed in place.
    """

    dtype: torch.dtype
    operations: list[Operation] = field(default_factory=list)
    overwritten: set[int] = field(default_factory=set)

    def then(self, operation: Operation) -> "Value":
        """What the operation gives; TypeError if it reads what was changed since."""
        self.check(operands(operation))
        self.operations.append(operation)
        return Value(self, len(self.operations) - 1)

    def check(self, numbers: Sequence[int]) -> None:
        """TypeError if a value of these numbers was changed."""
        if self.overwritten.intersection(numbers):
            raise TypeError("a layer reads what it has changed")

    def takes(self, operand: object) -> bool:
        """Whether values are added to it, and multiplied by it, as followed.

        None is an argument that is left out. A tensor of one element has the type of the values,
        so it counts as its number.
        """
        if isinstance(operand, Tensor) and not isinstance(operand, nn.Parameter):
            return operand.numel() == 1 and operand.dim() < 2 and operand.dtype == self.dtype
        return operand is None or isinstance(operand, Value | Argument | int | float)


@dataclass(frozen=True, eq=False)
class Value:
    """Replaces a tensor, or its shape, while a forward is followed; number: of its operation."""

    trace: Trace = field(repr=False)
    number: int

    def __add__(self, other: object) -> "Value":
        """The sum with what `Trace.takes`."""
        return self._with(operator.add, self, other)

    def __radd__(self, other: object) -> "Value":
        """The sum, this value behind."""
        return self._with(operator.add, other, self)

    def __iadd__(self, other: object) -> "Value":
        """The sum, if nothing else reads this value."""
        return self._overwrite(operator.add, other)

    def __mul__(self, other: object) -> "Value":
        """The product with what `Trace.takes`."""
        return self._with(operator.mul, self, other)

    def __rmul__(self, other: object) -> "Value":
        """The product, this value behind."""
        return self._with(operator.mul, other, self)

    def __imul__(self, other: object) -> "Value":
        """The product, if nothing else reads this value."""
        return self._overwrite(operator.mul, other)

    def __getitem__(self, index: object) -> "Value":
        """One of several results, or of sizes."""
        if not isinstance(index, int):
            raise TypeError("a layer takes a part of a tensor")
        return self.trace.then(Computed(operator.getitem, (self, index)))

    def __iter__(self) -> Iterator["Value"]:
        """As many items as the unpacking wants; nothing else iterates over a value."""
        frame = inspect.currentframe()
        caller = None if frame is None else frame.f_back
        # A frame that holds itself would keep alive what all of its callers hold: the model.
        del frame
        assert caller is not None
        code, at = caller.f_code.co_code, caller.f_lasti
        if code[at] != dis.opmap["UNPACK_SEQUENCE"]:
            raise TypeError("a layer iterates over a tensor")
        return iter([self[index] for index in range(code[at + 1])])

    def __bool__(self) -> NoReturn:
        """Not followed, as for an argument."""
        raise TypeError("a layer decides by its numbers")

    def __eq__(self, _other: object) -> NoReturn:
        """Not followed, as for a decision."""
        raise TypeError("a layer decides by its numbers")

    @property
    def shape(self) -> "Value":
        """Its sizes."""
        return self.trace.then(Computed(operator.attrgetter("shape"), (self,)))

    def reshape(self, *sizes: object) -> "Value":
        """The same numbers in another shape."""
        if not all(isinstance(each, int | Value) for each in sizes):
            raise TypeError("a layer reshapes otherwise")
        return self.trace.then(Computed(Tensor.reshape, (self, *sizes)))

    view = reshape

    def _with(self, function: Callable[..., Any], left: object, right: object) -> "Value":
        if not (self.trace.takes(left) and self.trace.takes(right)):
            raise TypeError("a layer computes otherwise")
        return self.trace.then(Computed(function, (left, right)))

    def _overwrite(self, function: Callable[..., Any], other: object) -> "Value":
        """As a new value, of a sum or product that nothing else has read nor reads later."""
        own = self.trace.operations[self.number]
        is_new = isinstance(own, Computed) and own.function in ARITHMETIC
        is_read = any(self.number in operands(each) for each in self.trace.operations)
        is_number = self.trace.takes(other) and not isinstance(other, Value | Argument)
        if not is_new or is_read or not is_number:
            raise TypeError("a layer changes a tensor")
        found = self.trace.then(Computed(function, (self, other)))
        self.trace.overwritten.add(self.number)
        return found


class _Stub:
    """Replaces a layer: its modules write down their calls, all else is the layer's."""

    def __init__(self, layer: nn.Module, trace: Trace) -> None:
        self._layer = layer
        self._trace = trace

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._layer, name)
        if not isinstance(found, nn.Module):
            return found
        return lambda *args, **kwargs: self._trace.then(Call(name, args, kwargs))


@dataclass(frozen=True)
class Followed:
    """What a layer computes.

    names: of its parameters, the input first; defaults: of those that have one. operations: in
    the order of computing, each value's. result: what the layer returns, a value or a tuple that
    begins with one.
    """

    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    operations: tuple[Operation, ...]
    result: Any

    @property
    def last(self) -> int:
        """The number of the value that the next layer reads."""
        first: Value = self.result[0] if isinstance(self.result, tuple) else self.result
        return first.number


def follow(layer: nn.Module, dtype: torch.dtype) -> Followed | None:
    """What the layer computes of tensors of that type; None if it does more than is followed."""
    # Without what checkpoints activations in training, which looks at the class.
    forward: Any = inspect.unwrap(type(layer).forward)
    try:
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        found = _followed(layer, dtype, forward, parameters, None)
        for each in parameters[1:]:
            if each.default is None:
                without = _followed(layer, dtype, forward, parameters, each.name)
                if _text(without) != _text(found).replace(str(Argument(each.name)), "None"):
                    # It computes something else without the argument.
                    return None
    except NOT_FOLLOWED:
        return None
    return found


def _followed(
    layer: nn.Module,
    dtype: torch.dtype,
    forward: Any,
    parameters: Sequence[inspect.Parameter],
    absent: str | None,
) -> Followed:
    """absent: the name of an argument that is None."""
    first, *others = parameters
    named = [each for each in others if each.kind is not each.VAR_KEYWORD]
    trace = Trace(dtype)
    names = [each.name for each in named] + [MORE] * (len(named) < len(others))
    arguments = {each: None if each == absent else Argument(each) for each in names}
    result = forward(_Stub(layer, trace), trace.then(Argument(first.name)), **arguments)
    begins, *rest = result if isinstance(result, tuple) else (result,)
    if not isinstance(begins, Value) or any(_is_nested(each) for each in rest):
        raise TypeError("a layer returns something else")
    trace.check([each.number for each in (begins, *rest) if isinstance(each, Value)])
    return Followed(
        (first.name, *(each.name for each in named)),
        {each.name: each.default for each in named if each.default is not each.empty},
        tuple(trace.operations),
        result,
    )


def operands(operation: Operation) -> list[int]:
    """Numbers of the values that an operation reads; TypeError where they cannot be known."""
    if isinstance(operation, Argument):
        return []
    named = operation.kwargs.values() if isinstance(operation, Call) else ()
    found = (*operation.args, *named)
    if any(_is_nested(each) for each in found):
        raise TypeError("a layer puts tensors into others")
    return [each.number for each in found if isinstance(each, Value)]


def _is_nested(operand: object) -> bool:
    """Whether there may be values in it."""
    return isinstance(operand, list | tuple | dict | set)


def _text(followed: Followed) -> str:
    return str((followed.operations, followed.result))

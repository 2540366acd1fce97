"""How transformers' functions rotate heads: found by trying them, not by their names.

Families pair a head's numbers by halves or by neighbours, rotate all of a head or its first part,
and give a pair's cosine once or twice. All of that is one of our forms, which one kernel computes.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Any

import torch
from torch import Tensor

from modeling.layers.angles import Angles
from modeling.layers.attention import rotate_queries
from modeling.models.generic.comparing import same

Function = Callable[..., Any]
"""(q, k, cos, sin, ...) to both rotated, or (x, cos, sin, ...) to x rotated."""


class Layout(Enum):
    """Where the last dimension of transformers' cosines has those of the pairs."""

    ONCE = slice(None)
    HALVES = "first half"
    NEIGHBOURS = slice(0, None, 2)

    def of(self, numbers: Tensor) -> Tensor:
        """[..., width] to [..., pairs]."""
        if self is Layout.HALVES:
            return numbers[..., : numbers.shape[-1] // 2]
        return numbers[..., self.value]


@dataclass(frozen=True)
class RotationForm:
    """What a function computes.

    layout: of its cosines and sines. neighbours: see `Angles`. backwards: by the negated angles.
    heads_at: the dimension of heads in what it rotates, 1 or 2; tokens are in the other. unfolds:
    whether it returns the first numbers of all pairs, then the others.
    """

    layout: Layout
    neighbours: bool
    backwards: bool
    heads_at: int
    unfolds: bool = False

    def angles(self, cos: Tensor, sin: Tensor) -> Angles:
        """Of [1, tokens, width] each."""
        cos, sin = (self.layout.of(numbers[0]).unsqueeze(1) for numbers in (cos, sin))
        signs = (sin, -sin) if self.backwards else (-sin, sin)
        return Angles(torch.cat((cos, cos), -1), torch.cat(signs, -1), self.neighbours)

    def rotated(self, x: Tensor, angles: Angles) -> Tensor:
        """What the function returns for x."""
        if self.heads_at == 2:
            found = rotate_queries(x[0], angles, None)[None]
        else:
            found = rotate_queries(x[0].transpose(0, 1), angles, None).transpose(0, 1)[None]
        return torch.cat((found[..., ::2], found[..., 1::2]), -1) if self.unfolds else found


def rotation_form(function: Function, *args: Any, **kwargs: Any) -> RotationForm | None:
    """What the function computes of heads such as it was given; None for none of our forms.

    Positions of several tokens must be among them.
    """
    heads, (cos, sin, *options) = split_arguments(args)
    heads_at = _heads_at(function, len(heads) + 2, options, kwargs)
    if heads[0].dim() != 4 or heads_at not in (1, 2):
        return None
    if cos.shape[:-1] != (1, heads[0].shape[3 - heads_at]):
        return None
    generator = torch.Generator().manual_seed(0)
    probes = [torch.randn(part.shape, generator=generator).to(cos.device) for part in heads]
    try:
        found = function(*probes, cos.float(), sin.float(), *options, **kwargs)
    except (TypeError, RuntimeError):
        return None
    results = found if isinstance(found, tuple) else (found,)
    for form in _forms(heads[0].shape[-1], cos.shape[-1], heads_at):
        angles = form.angles(cos.float(), sin.float())
        wanted = [form.rotated(x, angles) for x in probes]
        if len(results) == len(heads) and all(map(same, results, wanted)):
            return form
    return None


def split_arguments(args: tuple[Any, ...]) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """The heads that a function is to rotate, q and k or one of them, and the rest."""
    count = 2 if len(args) > 3 and isinstance(args[3], Tensor) else 1
    return args[:count], args[count:]


def _forms(head_dim: int, width: int, heads_at: int) -> Iterator[RotationForm]:
    """All forms of cosines of such a width that rotate no more than a head."""
    for layout, neighbours, backwards in product(Layout, (False, True), (False, True)):
        pairs = width if layout is Layout.ONCE else width // 2
        if 2 * pairs <= head_dim and (layout is Layout.ONCE or width % 2 == 0):
            yield RotationForm(layout, neighbours, backwards, heads_at)
            if neighbours and 2 * pairs == head_dim:
                yield RotationForm(layout, neighbours, backwards, heads_at, unfolds=True)


def _heads_at(function: Function, given: int, options: list[Any], kwargs: dict[str, Any]) -> Any:
    """The dimension of heads in what is rotated."""
    parameters = inspect.signature(function).parameters
    by_name = {**dict(zip(list(parameters)[given:], options, strict=False)), **kwargs}
    default = parameters.get("unsqueeze_dim")
    return by_name.get("unsqueeze_dim", 1 if default is None else default.default)

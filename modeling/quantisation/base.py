"""Quantised weights: what all forms share, and maps that stay apart though they share an input."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sharding.linear_weight import LinearWeight

LEAST_CHUNK = 64
"""Inputs: a kernel's quarter of a chunk of codes of 4 bits is what tensor cores take at a time."""


class QuantisedWeight(LinearWeight):
    """Weights that are made into numbers of a float type for each product: the reference.

    dtype: of these numbers, which is the activations'.
    """

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        super().__init__(shape)
        self.dtype = dtype

    def keep(self, tensor: Tensor) -> nn.Parameter:
        """Make a parameter, so that its bytes are counted as the model's."""
        return nn.Parameter(tensor, requires_grad=False)

    @property
    def device(self) -> torch.device:
        """Return where its tensors are."""
        return next(self.parameters()).device

    @abstractmethod
    def joined(self, others: Sequence[LinearWeight]) -> Self | None:
        """Return one weight of this one's rows and the others' below; None if they differ."""

    def with_alike(self, others: Sequence[LinearWeight]) -> list[Self]:
        """Return this weight and the others, or none of them where another is of another kind."""
        alike = [other for other in others if isinstance(other, type(self))]
        return [self, *alike] if len(alike) == len(others) else []

    def inputs(self, x: Tensor) -> Tensor:
        """Return x as it counts in the product: rounded where the form rounds activations."""
        return x

    def forward(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """x W^T + bias."""
        y = F.linear(self.inputs(x), self[:], bias)
        return y if out is None else out.copy_(y)


class SeparateWeights(LinearWeight):
    """Maps of one input in several forms: each is multiplied by itself."""

    def __init__(self, parts: Sequence[LinearWeight]) -> None:
        """parts: their outputs are side by side in y."""
        super().__init__((sum(part.shape[0] for part in parts), parts[0].shape[1]))
        self.parts = nn.ModuleList(parts)
        self._parts = tuple(parts)
        self._heights = [part.shape[0] for part in parts]

    @property
    def device(self) -> torch.device:
        """Return where its parts are."""
        return self._parts[0].device

    @property
    def form(self) -> str:
        """Return the names of its parts' forms."""
        return " + ".join(dict.fromkeys(part.form for part in self._parts))

    def forward(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """x W^T + bias."""
        biases = [None] * len(self._parts) if bias is None else torch.split(bias, self._heights)
        pairs = zip(self._parts, biases, strict=True)
        return torch.cat([part(x, own) for part, own in pairs], dim=-1, out=out)

    def __getitem__(self, rows: slice) -> Tensor:
        """Return some rows in a float type."""
        start, stop, _ = rows.indices(self.shape[0])
        found, first = [], 0
        for part, height in zip(self._parts, self._heights, strict=True):
            own = slice(max(start - first, 0), max(min(stop - first, height), 0))
            found.append(part[own])
            first += height
        return torch.cat(found)


def join(parts: Sequence[LinearWeight]) -> LinearWeight:
    """Return one weight of maps that share their input, each part's rows below another's."""
    first, *others = parts
    if not others:
        return first
    made = first.joined(others) if isinstance(first, QuantisedWeight) else None
    return made or SeparateWeights(parts)

"""Norms of which an adapter brings weight and bias (modules_to_save): PEFT's copy of the module.

The norm is computed once more for the adapter's rows, by its own code, with the adapter's
parameters. Steps without such adapters compute nothing more.

Captured steps compute RMS norms alone: their kernel takes each token's weight from the page of the
token's adapter (`norm_rows.py`). Models with other norms do not capture steps with such adapters.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakMethod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call

from modeling.adapters.bank import PAGE_ROWS, AdapterBank
from modeling.adapters.norm_rows import NormRows, NormStep
from modeling.adapters.product import NormAdapters, TokenGroup
from modeling.adapters.projection import NormVector, Projection, ProjectionKind
from modeling.adapters.token_rows import groups_of
from sharding.slicing import whole

PARAMETERS = {"weight", "bias"}


@dataclass(frozen=True)
class NormModule:
    """A norm of a model.

    path: PEFT's.
    module: what the model calls.
    code: what computes it of the checkpoint's parameters, `module` itself or what that replaces.
    tokens_at: the dimension of its input that counts tokens.
    """

    path: str
    module: nn.Module
    code: nn.Module
    tokens_at: int = 0


def is_norm(module: nn.Module) -> bool:
    """Return whether a module has a weight for each feature, perhaps a bias, and nothing else."""
    own = dict(module.named_parameters())
    is_leaf = not list(module.children())
    return is_leaf and {"weight"} <= own.keys() <= PARAMETERS and own["weight"].dim() == 1


def are_capturable(norms: Iterable[NormModule]) -> bool:
    """Return whether captured steps can have adapters that bring these norms."""
    return all(hasattr(norm.module, "rows") for norm in norms)


def norm_projection(norms: Iterable[NormModule], width: int) -> Projection | None:
    """Return the parameters of all norms as one projection; None where there are none.

    width: of the page's rows.
    """
    vectors, values, start = [], [], 0
    for norm in norms:
        for name, parameter in norm.code.named_parameters():
            vectors.append(NormVector((f"{norm.path}.{name}",), start, len(parameter)))
            values.append(parameter.detach().float())
            start += len(parameter)
    if not vectors:
        return None
    return Projection(
        name=ProjectionKind.NORMS.value,
        module=ProjectionKind.NORMS.value,
        in_features=width,
        out_features=0,
        inputs=whole(width),
        outputs=(),
        num_layers=-(-start // (width * PAGE_ROWS)),
        kind=ProjectionKind.NORMS,
        base=torch.cat(values),
        vectors=tuple(vectors),
    )


class AdaptedNorms:
    """The norms of one rank's model, with the adapters of the step that is computed.

    capturable: whether captured steps can have adapters that bring norms.
    """

    def __init__(self, bank: AdapterBank, norms: Sequence[NormModule]) -> None:
        """Watch the norms' calls; norms: as `norm_projection` was given them."""
        self._bank = bank
        self._groups: list[TokenGroup] = []
        self._step = NormStep()
        self._index = bank.norms
        self.capturable = False
        if self._index is None:
            return
        self.capturable = are_capturable(norms)
        numbers = bank.pools[self._index].a.flatten(1)
        known = {each.names[0]: each for each in bank.projections[self._index].vectors}
        # Weakly: a model that keeps its bank alive would keep the memory of all its adapters.
        adapt = WeakMethod(self._adapt)
        for norm in norms:
            own = {name: known[f"{norm.path}.{name}"] for name, _ in norm.code.named_parameters()}
            norm.module.register_forward_hook(partial(_call, adapt, norm, own))
            if self.capturable:
                weights = numbers[:, own["weight"].start : own["weight"].stop]
                plus = getattr(norm.module, "plus", 0.0)
                # Adapters know no models: those with such an attribute read it in captured steps.
                setattr(norm.module, "rows", NormRows(self._step, weights, plus))  # noqa: B010
        # What computes norms together with other things must leave them alone.
        self._fusable = [each.module for each in norms if hasattr(each.module, "called_alone")]

    def changes(self, slots: Sequence[int]) -> bool:
        """Return whether an adapter of these slots (-1: base) brings norms."""
        return self._bank.changes(slots, (ProjectionKind.NORMS,))

    @contextmanager
    def using(self, slots: Sequence[int], lengths: Sequence[int]) -> Iterator[None]:
        """Compute a step with the norms of its adapters; one slot and one length for each run."""
        if not self.changes(slots):
            yield
            return
        assert self._index is not None
        of_token: npt.NDArray[np.int64] = np.repeat(np.asarray(slots), np.asarray(lengths))
        self._groups = groups_of(self._bank, of_token, self._index)
        self._call_alone(True)
        try:
            yield
        finally:
            self._groups = []
            self._call_alone(False)

    @contextmanager
    def captured(self, adapters: object) -> Iterator[None]:
        """Compute what is captured with these adapters' data, if it names the tokens' pages."""
        pages = adapters.norm_pages if isinstance(adapters, NormAdapters) else None
        self._step.pages = pages if self.capturable else None
        try:
            yield
        finally:
            self._step.pages = None

    def _call_alone(self, alone: bool) -> None:
        for module in self._fusable:
            setattr(module, "called_alone", alone)  # noqa: B010 - adapters know no models

    def _adapt(
        self,
        norm: NormModule,
        vectors: Mapping[str, NormVector],
        _module: nn.Module,
        inputs: tuple[Tensor | None, ...],
        output: Any,
    ) -> None:
        """Overwrite the rows of adapters in a norm's output; the first output is the norm."""
        if not self._groups:
            return
        # The norm's own code is called below, and this again behind it.
        groups, self._groups = self._groups, []
        try:
            for group in groups:
                at = (*[slice(None)] * norm.tokens_at, group.rows)
                part = tuple(each if each is None else each[at] for each in inputs)
                found = functional_call(norm.code, self._parameters(group, norm, vectors), part)
                _first(output)[at] = _first(found)
        finally:
            self._groups = groups

    def _parameters(
        self, group: TokenGroup, norm: NormModule, vectors: Mapping[str, NormVector]
    ) -> dict[str, Tensor]:
        assert self._index is not None
        values = group.adapter.matrix(self._index).flatten()
        own = dict(norm.code.named_parameters())
        return {
            name: values[vector.start : vector.stop].to(own[name].dtype)
            for name, vector in vectors.items()
        }


def _call(method: WeakMethod[Callable[..., None]], *arguments: Any) -> None:
    found = method()
    assert found is not None, "a model is called after its runner has ended"
    found(*arguments)


def _first(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found

"""Row norms of adapted weights, by which DoRA (arXiv:2402.09353) scales a module's outputs.

For output row j, with the scaling already in B:

    ||W_j + B_j A||^2 = ||W_j||^2 + 2 (W_j A^T) . B_j + B_j (A A^T) B_j^T

The first two terms are sums over the columns of W. A rank that has some of the columns knows its
part of them; the last needs A and B alone, which every rank reads whole. So no rank ever makes
W + B A, and ||W_j||^2 is computed once for each module.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from configs.wire.adapters import AdapterNeedsSums
from modeling.adapters.faults import refuse
from modeling.adapters.projection import BaseLinear, ModulePosition, Projection, select_columns
from modeling.adapters.stacks import LoraStack
from sharding.linear_weight import LinearWeight, WeightRows

BLOCK_NUMBERS = 2**22
"""Most elements of W that are read at once: a float32 copy of a block takes 16 MiB."""


class SummedRows:
    """What the ranks found by `AdapterNeedsSums`, added; taken module by module, in file order."""

    def __init__(self, summed: bytes) -> None:
        self._rows = torch.frombuffer(bytearray(summed or 4), dtype=torch.float32)
        self._taken = 0

    def take(self, count: int) -> Tensor:
        """Return the next module's rows."""
        self._taken += count
        return self._rows[self._taken - count : self._taken]


class RowNorms:
    """This rank's weights, and what adapters' norms need of them; for any thread."""

    def __init__(
        self, projections: Sequence[Projection], base_linears: Mapping[ModulePosition, BaseLinear]
    ) -> None:
        """base_linears: this rank's part of each linear map that adapters may change."""
        self._projections = tuple(projections)
        self._base_linears = base_linears
        self._squares: dict[ModulePosition, Tensor] = {}

    def scales(self, stack: LoraStack, sums: SummedRows) -> Tensor:
        """Return m / ||W + B A|| of a stack's modules, float32 [layers, this rank's out].

        sums: for the modules of which this rank has some columns of W.
        """
        assert stack.magnitudes is not None
        projection = self._projections[stack.projection]
        b = select_columns(stack.b.transpose(1, 2), projection.outputs).transpose(1, 2)
        a = stack.a.float()
        squares = (b @ (a @ a.transpose(1, 2)) * b).sum(-1)
        for index, own in enumerate(squares):
            cut = projection.cuts_inputs
            own += sums.take(len(own)) if cut else self._part(stack, index)
        scales = select_columns(stack.magnitudes, projection.outputs) / squares.sqrt()
        if not torch.isfinite(scales).all():
            refuse(
                f"use_dora=True: a row of the adapted {projection.name} is zero or not finite and "
                "has no norm: save a good checkpoint"
            )
        return scales

    def check_sums(self, stacks: Iterator[LoraStack]) -> None:
        """Raise AdapterNeedsSums where ranks must add first; stacks: all of an adapter's."""
        if not any(projection.cuts_inputs for projection in self._projections):
            return
        parts = [
            self._part(stack, index)
            for stack in stacks
            if self._projections[stack.projection].cuts_inputs and stack.magnitudes is not None
            for index in range(len(stack.layers))
        ]
        if parts:
            raise AdapterNeedsSums(torch.cat(parts).numpy().tobytes())

    def _part(self, stack: LoraStack, index: int) -> Tensor:
        """||W||^2 + 2 (W A^T) . B over this rank's columns, of one module: float32 [local out]."""
        projection = self._projections[stack.projection]
        position = ModulePosition(stack.projection, stack.layers[index])
        weight = self._base_linears[position].weight
        a = select_columns(stack.a[index].float(), projection.inputs)
        b = select_columns(stack.b[index].t(), projection.outputs)
        with _beside_steps(weight.device):
            if position not in self._squares:
                squares = [block.square().sum(1) for block in _blocks(weight)]
                self._squares[position] = torch.cat(squares).cpu()
            right = a.t().to(weight.device)
            products = torch.cat([block @ right for block in _blocks(weight)]).cpu()
        return self._squares[position] + 2 * (products * b.t()).sum(-1)


def _blocks(weight: Tensor | LinearWeight | WeightRows) -> Iterator[Tensor]:
    """Yield some rows of a weight after the other, in float32."""
    height = max(1, BLOCK_NUMBERS // weight.shape[1])
    for first in range(0, weight.shape[0], height):
        yield weight[first : first + height].float()


def _beside_steps(device: torch.device) -> AbstractContextManager[object]:
    """Launch on a stream that no step waits for."""
    if device.type != "cuda":
        return nullcontext()
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(stream)

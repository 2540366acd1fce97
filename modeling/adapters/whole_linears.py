"""Whole linear maps that adapters bring (modules_to_save): W' x instead of W x, for their rows.

Each adapter's rows are one product of their own, so steps with such adapters are not captured, and
cost a product more for each such adapter and map. W' itself is kept, because half precision would
round the difference to W, which has full rank.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.nn import functional as F

from modeling.adapters.bank import PAGE_ROWS, AdapterBank
from modeling.adapters.latents import LatentMap
from modeling.adapters.product import OutputSlice, TokenGroup
from modeling.adapters.projection import ModulePosition, Projection, ProjectionKind
from modeling.adapters.token_rows import groups_of


def whole_projections(
    projections: Sequence[Projection], wanted: Mapping[str, int]
) -> tuple[Projection, ...]:
    """Return the projections of whole linear maps; ValueError for a name that no map has.

    wanted: how many adapters may bring each, by the map's name.
    """
    linear = [each for each in projections if each.kind is ProjectionKind.LINEAR]
    unknown = sorted(wanted.keys() - {each.name for each in linear})
    if unknown:
        raise ValueError(
            f"adapters.whole_linears names {', '.join(unknown)}; this model's linear maps are "
            + ", ".join(sorted({each.name for each in linear}))
        )
    return tuple(
        _whole(index, each, wanted[each.name])
        for index, each in enumerate(projections)
        if each.kind is ProjectionKind.LINEAR and each.name in wanted
    )


def _whole(index: int, linear: Projection, copies: int) -> Projection:
    blocks = -(-linear.local_outputs // PAGE_ROWS)
    return Projection(
        name=f"{linear.name}.whole",
        module=linear.module,
        in_features=linear.in_features,
        out_features=0,
        inputs=linear.inputs,
        outputs=(),
        num_layers=linear.num_layers * blocks,
        kind=ProjectionKind.WHOLE_LINEAR,
        replaces=index,
        copies=copies,
        blocks=blocks,
    )


class WholeLinears:
    """The whole linear maps of a step's adapters."""

    def __init__(self, bank: AdapterBank, slots: npt.NDArray[np.int64]) -> None:
        """slots: each token's (-1: base)."""
        self._projections = bank.projections
        # By the replaced map: the index of its whole matrices, and the rows of each adapter.
        self._parts: dict[int, tuple[int, list[TokenGroup]]] = {
            each.replaces: (index, groups)
            for index, each in enumerate(bank.projections)
            if each.kind is ProjectionKind.WHOLE_LINEAR
            if (groups := groups_of(bank, slots, index))
        }

    def replace(
        self,
        y: Tensor,
        x: Tensor,
        layer: int,
        targets: tuple[OutputSlice, ...],
        bias: Tensor | None,
    ) -> None:
        """Overwrite rows of y; see `WholeAdapters`."""
        for target in targets:
            size = self._projections[target.projection].local_outputs
            columns = slice(target.offset, target.offset + size)
            own = None if bias is None else bias[columns]
            for rows, weight in self._weights(ModulePosition(target.projection, layer)):
                y[rows, columns] = F.linear(x[rows], weight, own)

    def latent_queries(self, y: Tensor, x: Tensor, latents: LatentMap) -> None:
        """Overwrite rows of y [tokens, heads, latent]; see `AdapterData`."""
        for rows, weight in self._weights(latents.position):
            y[rows] = latents.with_weight(weight).queries(x[rows])

    def latent_values(self, y: Tensor, x: Tensor, latents: LatentMap) -> None:
        """Overwrite rows of y [tokens, heads, values]; see `AdapterData`."""
        for rows, weight in self._weights(latents.position):
            y[rows] = latents.with_weight(weight).values(x[rows])

    def _weights(self, at: ModulePosition) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """The rows of each adapter that brings the map at a position, and W' [out, in]."""
        index, groups = self._parts.get(at.projection, (-1, []))
        for group in groups:
            if group.adapter.rank(index, at.layer):
                size = self._projections[at.projection].local_outputs
                first = at.layer * self._projections[index].blocks * PAGE_ROWS
                yield group.rows, group.adapter.matrix(index)[first : first + size]

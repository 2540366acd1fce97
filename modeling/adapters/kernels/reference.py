"""The multi-adapter product in plain torch: the CPU path, and the reference of other kernels.

It computes in x's type, as PEFT does once its weights are cast to the model's: in half
precision x A^T is rounded before it is multiplied by Bt.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from modeling.adapters.bank import AdapterBank
from modeling.adapters.latents import LatentMap, adapted_values, query_deltas
from modeling.adapters.product import AdapterData, OutputSlice, TokenGroup
from modeling.transfer import to_device


class ReferenceBatch(AdapterData):
    """The adapters of one step, grouped once for all layers."""

    def __init__(self, groups: Sequence[TokenGroup]) -> None:
        self._groups = tuple(groups)

    def add(self, y: Tensor, x: Tensor, layer: int, targets: tuple[OutputSlice, ...]) -> None:
        """Add the deltas of `targets` at `layer` to y [tokens, out]; x: [tokens, in].

        y[t, o + j] += sum_r (sum_i x[t, i] * A[r, i]) * Bt[r, j], r below the true rank.
        """
        for group in self._groups:
            wanted = [t for t in targets if group.adapter.rank(t.projection, layer)]
            if not wanted:
                continue
            rows = group.rows
            inputs = x[rows]
            for target in wanted:
                factors = group.adapter.factors(target.projection, layer)
                part = y[:, target.offset : target.offset + factors.bt.shape[1]]
                if group.adapter.output_rows(target.projection).changes_outputs:
                    part[rows] = group.adapter.change_outputs(part[rows], target.projection, layer)
                # One operation for tokens that lie together, as those of most steps do.
                if isinstance(rows, slice):
                    part[rows].addmm_(inputs @ factors.a, factors.bt)
                else:
                    part.index_add_(0, rows, inputs @ factors.a @ factors.bt)

    def latent_queries(self, y: Tensor, x: Tensor, latents: LatentMap) -> None:
        """Change y [tokens, heads, latent]; see `AdapterData`."""
        for group in self._adapting(latents):
            y[group.rows] += query_deltas(group.adapter, x[group.rows], latents)

    def latent_values(self, y: Tensor, x: Tensor, latents: LatentMap) -> None:
        """Change y [tokens, heads, values]; see `AdapterData`."""
        for group in self._adapting(latents):
            rows = group.rows
            y[rows] = adapted_values(group.adapter, y[rows], x[rows], latents)

    def _adapting(self, latents: LatentMap) -> list[TokenGroup]:
        at = latents.position
        return [each for each in self._groups if each.adapter.rank(at.projection, at.layer)]


NO_DELTAS = ReferenceBatch(())
"""Adapters of a step after its layers, which are computed already."""


def reference_batch(bank: AdapterBank, slots: Sequence[int], lengths: Sequence[int]) -> AdapterData:
    """Group a step's tokens by adapter; one slot (-1: base) and one length for each row."""
    of_token = np.repeat(np.asarray(slots, dtype=np.int64), np.asarray(lengths, dtype=np.int64))
    device = bank.page_table.device
    groups = []
    for slot in sorted(set(slots) - {-1}):
        rows = np.flatnonzero(of_token == slot)
        start, stop = int(rows[0]), int(rows[-1]) + 1
        together = stop - start == len(rows)
        index = slice(start, stop) if together else to_device(rows, device)
        groups.append(TokenGroup(index, bank.loaded(slot)))
    return ReferenceBatch(groups)

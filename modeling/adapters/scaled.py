"""Steps with adapters that scale what the base model's layers give (DoRA, arXiv:2402.09353).

    y[t, o + j] += c[t, j] (y[t, o + j] - b[o + j])        c: the scale m / ||W + B A|| less 1

b is the layer's bias, which DoRA leaves as it is. B has the scale since it was staged, so the
kernels then add its product as any other's. A row-parallel layer's y is this rank's summand, and
scales as the sum does.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from modeling.adapters.bank import PAGE_ROWS, AdapterBank
from modeling.adapters.product import AdapterData, OutputSlice
from modeling.transfer import to_device


class ScaledAdapters:
    """A step's adapters: the kernel's, and the scales of those that have them."""

    def __init__(
        self, kernel: AdapterData, bank: AdapterBank, slots: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """slots, lengths: one adapter slot (-1: base) and number of tokens for each row."""
        self._kernel = kernel
        self._bank = bank
        self._slots = np.repeat(np.asarray(slots), np.asarray(lengths))
        self._found: dict[int, tuple[Tensor, Tensor] | None] = {}

    def has_product(self, x: Tensor, weight: Tensor, targets: tuple[OutputSlice, ...]) -> bool:
        """Return False: outputs are scaled between the base product and the adapters'."""
        return False

    def product(
        self, y: Tensor, x: Tensor, weight: Tensor, layer: int, targets: tuple[OutputSlice, ...]
    ) -> None:
        """Is never called: `has_product` returns False."""
        raise NotImplementedError

    def add(
        self,
        y: Tensor,
        x: Tensor,
        layer: int,
        targets: tuple[OutputSlice, ...],
        bias: Tensor | None = None,
    ) -> None:
        """Scale y [tokens, out] where an adapter does, then add all deltas; see `AdapterData`."""
        for target in targets:
            found = self._scales(target.projection)
            if found is None:
                continue
            tokens, rows = found
            pool = self._bank.pools[target.projection].bt.flatten(0, 2)
            scales = pool[rows + layer * PAGE_ROWS]
            columns = slice(target.offset, target.offset + pool.shape[1])
            whole = y[tokens, columns]
            product = whole if bias is None else whole - bias[columns]
            y[tokens, columns] = torch.addcmul(whole, scales, product)
        self._kernel.add(y, x, layer, targets)

    def _scales(self, projection: int) -> tuple[Tensor, Tensor] | None:
        """Return the tokens that a projection scales, and layer 0's row of each in Bt's pool."""
        if projection not in self._found:
            row_of = {
                slot: self._bank.loaded(slot).scale_row(projection)
                for slot in set(self._slots.tolist()) - {-1}
            }
            rows = np.array([row_of.get(slot, -1) for slot in self._slots.tolist()])
            tokens = np.flatnonzero(rows >= 0)
            device = self._bank.page_table.device
            self._found[projection] = (
                (to_device(tokens, device), to_device(rows[tokens], device))
                if len(tokens)
                else None
            )
        return self._found[projection]

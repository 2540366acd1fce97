"""Steps with adapters that change the base model's outputs by the rows of `output_rows.py`."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from modeling.adapters.bank import PAGE_ROWS, AdapterBank
from modeling.adapters.output_rows import OutputRows
from modeling.adapters.product import AdapterData, OutputSlice
from modeling.transfer import to_device

TokenRows = tuple[Tensor, Tensor]
"""Tokens, and the row of each in Bt's pool at layer 0: int64 [n] each."""


class OutputAdapters:
    """A step's adapters: the kernel's, and the rows behind their LoRA rank rows."""

    def __init__(
        self, kernel: AdapterData, bank: AdapterBank, slots: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """slots, lengths: one adapter slot (-1: base) and number of tokens for each row."""
        self._kernel = kernel
        self._bank = bank
        self._slots = np.repeat(np.asarray(slots), np.asarray(lengths))
        self._found: dict[int, list[TokenRows | None]] = {}

    def has_product(self, x: Tensor, weight: Tensor, targets: tuple[OutputSlice, ...]) -> bool:
        """Return False: outputs are scaled between the base product and the adapters'."""
        return False

    def product(
        self, y: Tensor, x: Tensor, weight: Tensor, layer: int, targets: tuple[OutputSlice, ...]
    ) -> None:
        """Is never called: `has_product` returns False."""
        raise NotImplementedError

    def add(self, y: Tensor, x: Tensor, layer: int, targets: tuple[OutputSlice, ...]) -> None:
        """Scale y [tokens, out] and add biases where adapters do, then add all deltas."""
        for target in targets:
            scaled, biased = self._rows(target.projection)
            pool = self._bank.pools[target.projection].bt.flatten(0, 2)
            columns = slice(target.offset, target.offset + pool.shape[1])
            if scaled is not None:
                tokens, rows = scaled
                whole = y[tokens, columns]
                y[tokens, columns] = torch.addcmul(whole, pool[rows + layer * PAGE_ROWS], whole)
            if biased is not None:
                tokens, rows = biased
                y[tokens, columns] += pool[rows + layer * PAGE_ROWS]
        self._kernel.add(y, x, layer, targets)

    def _rows(self, projection: int) -> list[TokenRows | None]:
        """Return the rows of a projection's scales and biases; None where no token has any."""
        if projection not in self._found:
            self._found[projection] = list(self._find(projection))
        return self._found[projection]

    def _find(self, projection: int) -> Iterator[TokenRows | None]:
        adapters = {slot: self._bank.loaded(slot) for slot in set(self._slots.tolist()) - {-1}}
        found = {slot: adapter.output_rows(projection) for slot, adapter in adapters.items()}
        device = self._bank.page_table.device
        for kind in range(len(OutputRows._fields)):
            row_of = {slot: rows[kind] for slot, rows in found.items()}
            rows = np.array([row_of.get(slot, -1) for slot in self._slots.tolist()])
            tokens = np.flatnonzero(rows >= 0)
            has_any = len(tokens) > 0
            yield (to_device(tokens, device), to_device(rows[tokens], device)) if has_any else None

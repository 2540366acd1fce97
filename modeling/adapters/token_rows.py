"""Trained rows of embedding and head (PEFT's trainable_token_indices) in a step.

    embedding: y[t] = R[k]               where id(t) = ids[k]
    head:      z[n, ids[k]] = R[k] x[n]

Rows are set, not added, so that no difference is rounded. Every rank has all rows, and sets them
after the sum or the gather over the ranks. A page of a pool holds 8 rows in A, and in Bt the digits
of their token ids.
"""

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.nn import functional as F

from modeling.adapters.bank import AdapterBank, DeviceAdapter
from modeling.adapters.peft.tokens import ids_of
from modeling.adapters.product import TokenGroup
from modeling.transfer import to_device


def groups_of(bank: AdapterBank, slots: npt.NDArray[np.int64], projection: int) -> list[TokenGroup]:
    """Return the rows of each adapter that has this projection; -1: of none.

    slots: each row's (-1: base).
    """
    groups: list[TokenGroup] = []
    if projection < 0:
        return groups
    for slot in np.unique(slots[slots >= 0]).tolist():
        if bank.adapts(slot, projection):
            rows = to_device(np.flatnonzero(slots == slot), bank.page_table.device)
            groups.append(TokenGroup(rows, bank.loaded(slot)))
    return groups


class TokenRows:
    """The trained rows of one adapter, for some rows of a step."""

    def __init__(self, where: slice | Tensor, adapter: DeviceAdapter, projection: int) -> None:
        """where: the step's rows. projection: the index of the embedding's rows or the head's."""
        factors = adapter.factors(projection, 0)
        self._where = where
        self._rows, self._ids = factors.a.t(), ids_of(factors.bt)

    def embed(self, y: Tensor, input_ids: Tensor) -> None:
        """Set trained tokens' vectors in y [tokens, width]; input_ids: int64 [tokens]."""
        same = input_ids[self._where].unsqueeze(1) == self._ids
        found = self._rows[same.int().argmax(1)]
        y[self._where] = found.where(same.any(1, keepdim=True), y[self._where])

    def logits(self, z: Tensor, x: Tensor) -> None:
        """Set trained tokens' logits in z [n, vocab_size]; x: [n, width]."""
        part = z[self._where]
        part[:, self._ids] = F.linear(x[self._where], self._rows)
        z[self._where] = part

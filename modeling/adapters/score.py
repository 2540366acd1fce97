"""Classification heads: the base model's own, and those that adapters bring.

    logits[l] = sum_i W[l, i] x[i]        x: what the head of the vocabulary would read

An adapter's head replaces the base model's for the adapter's rows, and has labels of its own
number. Every rank holds all of W, for x is the same on all of them.
"""

from torch import Tensor
from torch.nn import functional as F

from modeling.adapters.bank import AdapterBank
from modeling.adapters.projection import ProjectionKind


class ScoreHeads:
    """The heads of one rank, by adapter slot."""

    def __init__(self, bank: AdapterBank, base: Tensor | None) -> None:
        """base: the base model's own head [labels, hidden]; None where it has none."""
        self._bank = bank
        self._base = base
        kinds = [projection.kind for projection in bank.projections]
        self._index = kinds.index(ProjectionKind.SCORE) if ProjectionKind.SCORE in kinds else None

    def logits(self, states: Tensor, slot: int) -> Tensor | None:
        """Return float32 [n, labels] of states [n, hidden]; None for a slot without a head.

        slot: the adapter's, -1 for the base model.
        """
        index = self._index
        if slot >= 0 and index is not None and self._bank.adapts(slot, index):
            return (states @ self._bank.loaded(slot).factors(index, 0).a).float()
        return None if self._base is None else F.linear(states, self._base).float()

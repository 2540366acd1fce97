"""Embedding (token ids to vectors) and head (vectors to logits), both cut by vocabulary."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sharding.loader import Weights
from sharding.slicing import cut_vocabulary


class VocabParallelEmbedding(nn.Module):
    """Token ids to vectors; each rank holds a range of the vocabulary, padded to equal size.

    cut: this rank's range.
    """

    def __init__(self, name: str, vocab_size: int, hidden_size: int, weights: Weights) -> None:
        """Read this rank's rows; padding rows are zero."""
        super().__init__()
        self._group = weights.group
        self.cut = cut_vocabulary(vocab_size, weights.group.rank, weights.group.size)
        self.vocab_size = vocab_size
        self.weight = _vocabulary_rows(name, vocab_size, hidden_size, weights)

    def clear(self, token: int) -> None:
        """Set a token's row to zero."""
        if self.cut.start <= token < self.cut.stop:
            self.weight[token - self.cut.start].zero_()

    def local_ids(self, input_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return this rank's row of each token, and which tokens are other ranks' (None: none)."""
        if self._group.size == 1:
            return input_ids, None
        # A mask, not a selection: shapes stay the same, so a CUDA graph holds for any ids.
        foreign = (input_ids < self.cut.start) | (input_ids >= self.cut.stop)
        return (input_ids - self.cut.start).masked_fill(foreign, 0), foreign

    def partial(self, input_ids: Tensor) -> Tensor:
        """This rank's summand of [tokens, hidden]: zero for another rank's ids."""
        local, foreign = self.local_ids(input_ids)
        rows = F.embedding(local, self.weight)
        return rows if foreign is None else rows.masked_fill(foreign.unsqueeze(-1), 0)

    def reduce(self, partial: Tensor) -> Tensor:
        """Sum the ranks' summands."""
        return self._group.all_reduce(partial)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[tokens] to [tokens, hidden], the same on every rank."""
        return self.reduce(self.partial(input_ids))


class ParallelHead(nn.Module):
    """Vectors to logits: each rank computes its range of the vocabulary, then all are gathered."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        weights: Weights,
        tied: VocabParallelEmbedding | None = None,
    ) -> None:
        """Read this rank's rows, or share the memory of `tied`.

        A checkpoint may hold a head though its config ties the two. If they differ in any
        row they are not tied, as in transformers 5.
        """
        super().__init__()
        self._group = weights.group
        self.vocab_size = vocab_size
        if tied is not None and not weights.lists(f"{name}.weight"):
            self.weight = tied.weight
            return
        self.weight = _vocabulary_rows(name, vocab_size, hidden_size, weights)
        if tied is not None and self._equal_everywhere(tied.weight):
            self.weight = tied.weight

    def _equal_everywhere(self, other: Tensor) -> bool:
        """Return whether the rows equal those of `other` on all ranks."""
        # A sum over ranks: all must decide alike, as each holds only its own rows.
        differs = torch.tensor([float(not torch.equal(self.weight, other))], device=other.device)
        return not bool(self._group.all_reduce(differs))

    def partial(self, hidden: Tensor) -> Tensor:
        """[n, hidden] to the logits of this rank's range, padding columns included."""
        return F.linear(hidden, self.weight)

    def gather(self, partial: Tensor) -> Tensor:
        """Join the ranks' ranges to [n, vocab_size]; padding columns are dropped."""
        return self._group.all_gather(partial)[:, : self.vocab_size]

    def forward(self, hidden: Tensor) -> Tensor:
        """[n, hidden] to [n, vocab_size], the same on every rank."""
        return self.gather(self.partial(hidden))


def _vocabulary_rows(
    name: str, vocab_size: int, hidden_size: int, weights: Weights
) -> nn.Parameter:
    """Read this rank's rows of [vocab_size, hidden_size], zero-padded to the common size."""
    cut = cut_vocabulary(vocab_size, weights.group.rank, weights.group.size)
    rows = weights.read(f"{name}.weight", (vocab_size, hidden_size), rows=cut.rows)
    padding = cut.num_rows - (cut.stop - cut.start)
    if padding:
        rows = F.pad(rows, (0, 0, 0, padding))
    return nn.Parameter(rows, requires_grad=False)

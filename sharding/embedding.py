"""The vocabulary's two ends: token ids to vectors, vectors to logits, both cut by vocabulary."""

from torch import Tensor, nn
from torch.nn import functional as F

from sharding.loader import Weights
from sharding.slicing import cut_vocabulary


class VocabParallelEmbedding(nn.Module):
    """Token ids to vectors; each rank holds a run of the vocabulary, padded to equal size."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, weights: Weights) -> None:
        """Read this rank's rows; padding rows are zero."""
        super().__init__()
        self._group = weights.group
        self._cut = cut_vocabulary(vocab_size, weights.group.rank, weights.group.size)
        self.vocab_size = vocab_size
        self.weight = _vocabulary_rows(name, vocab_size, hidden_size, weights)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[tokens] to [tokens, hidden]: zero for another rank's ids, then summed over ranks."""
        if self._group.size == 1:
            return F.embedding(input_ids, self.weight)
        local = input_ids - self._cut.start
        foreign = (input_ids < self._cut.start) | (input_ids >= self._cut.stop)
        rows = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return self._group.all_reduce(rows.masked_fill(foreign.unsqueeze(-1), 0))


class ParallelHead(nn.Module):
    """Vectors to logits: each rank computes its run of the vocabulary, then all are gathered."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        weights: Weights,
        tied: VocabParallelEmbedding | None = None,
    ) -> None:
        """Read this rank's rows, or share the memory of `tied`."""
        super().__init__()
        self._group = weights.group
        self.vocab_size = vocab_size
        self.weight = (
            _vocabulary_rows(name, vocab_size, hidden_size, weights)
            if tied is None
            else tied.weight
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[n, hidden] to [n, vocab_size], the same on every rank; padding columns are dropped."""
        logits = self._group.all_gather(F.linear(hidden, self.weight))
        return logits[:, : self.vocab_size]


def _vocabulary_rows(
    name: str, vocab_size: int, hidden_size: int, weights: Weights
) -> nn.Parameter:
    """This rank's run of a [vocab_size, hidden_size] matrix, zero-padded to the common size."""
    cut = cut_vocabulary(vocab_size, weights.group.rank, weights.group.size)
    rows = weights.read(f"{name}.weight", (vocab_size, hidden_size), rows=cut.rows)
    padding = cut.num_rows - (cut.stop - cut.start)
    if padding:
        rows = F.pad(rows, (0, 0, 0, padding))
    return nn.Parameter(rows, requires_grad=False)

"""Adapters at the vocabulary's two ends: deltas of embedded tokens, and of logits.

    embedding: y[t, o] += sum_r A[r, id(t)] Bt[r, o]        A cut over the vocabulary
    head:      z[n, v] += sum_r (sum_i x[n, i] A[r, i]) Bt[r, v]    B cut over the vocabulary

The embedding's delta joins before the all-reduce of the base product, the head's before the
all-gather. Both are two small products for each adapter that has them, in plain torch.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from modeling.adapters.bank import AdapterBank
from modeling.adapters.kernels.base import AdapterData, Target
from modeling.adapters.kernels.reference import Group
from modeling.adapters.projection import Projection, ProjectionKind
from modeling.transfer import to_device
from sharding.embedding import ParallelHead, VocabParallelEmbedding
from sharding.slicing import whole


def vocabulary_projections(
    names: tuple[str, str], embedding: VocabParallelEmbedding, head: ParallelHead
) -> tuple[Projection, Projection]:
    """The two ends as projections; names: the module paths of both."""
    vocab_size, hidden, cut = embedding.vocab_size, embedding.weight.shape[1], embedding.cut
    held = cut.stop - cut.start
    tokens = Projection(
        name=names[0].rsplit(".", 1)[-1],
        module=names[0],
        in_features=vocab_size,
        out_features=hidden,
        inputs=cut.rows,
        outputs=whole(hidden),
        num_layers=1,
        kind=ProjectionKind.EMBEDDING,
        base=embedding.weight[:held],
    )
    logits = Projection(
        name=names[1].rsplit(".", 1)[-1],
        module=names[1],
        in_features=hidden,
        out_features=vocab_size,
        inputs=whole(hidden),
        outputs=cut.rows,
        num_layers=1,
        kind=ProjectionKind.HEAD,
        base=head.weight[:held],
    )
    return tokens, logits


class VocabularyAdapters:
    """A step's adapters: the kernel's for layers, and those of the two ends."""

    def __init__(
        self,
        layers: AdapterData,
        bank: AdapterBank,
        token_slots: npt.NDArray[np.int64],
        logit_slots: npt.NDArray[np.int64],
    ) -> None:
        """token_slots: each token's adapter slot (-1: base); logit_slots: each logits row's."""
        kinds = [projection.kind for projection in bank.projections]
        self._layers = layers
        self._embedding = kinds.index(ProjectionKind.EMBEDDING)
        self._head = kinds.index(ProjectionKind.HEAD)
        self._tokens = _groups(bank, token_slots, self._embedding)
        self._logits = _groups(bank, logit_slots, self._head)
        self._num_logits = len(logit_slots)

    def add(self, y: Tensor, x: Tensor, layer: int, targets: tuple[Target, ...]) -> None:
        """Add the deltas of a layer's projections; see `AdapterData`."""
        self._layers.add(y, x, layer, targets)

    def embed(self, y: Tensor, local_ids: Tensor, foreign: Tensor | None) -> None:
        """Add to y [tokens, hidden] what this rank's part of A gives; see `local_ids`."""
        for group in self._tokens:
            factors = group.placement.factors(self._embedding, 0)
            if not len(factors.a):  # a rank whose rows of the vocabulary are all padding
                continue
            found = factors.a[local_ids[group.rows]]
            if foreign is not None:
                found = found.masked_fill(foreign[group.rows].unsqueeze(-1), 0)
            y[group.rows] += found @ factors.bt

    def logits(self, z: Tensor, x: Tensor) -> None:
        """Add to z [n, this rank's run] the deltas of the head, x: [n, hidden]."""
        assert len(x) == self._num_logits, (x.shape, self._num_logits)
        for group in self._logits:
            factors = group.placement.factors(self._head, 0)
            part = z[:, : factors.bt.shape[1]]
            part[group.rows] += x[group.rows] @ factors.a @ factors.bt


def adapts_vocabulary(bank: AdapterBank, slots: Sequence[int]) -> bool:
    """Whether some adapter of a step (-1: base) changes the embedding or the head."""
    ends = [i for i, p in enumerate(bank.projections) if p.kind is not ProjectionKind.LINEAR]
    return any(bank.adapts(slot, end) for end in ends for slot in set(slots) - {-1})


def _groups(bank: AdapterBank, slots: npt.NDArray[np.int64], projection: int) -> list[Group]:
    """The rows of each adapter that has this projection."""
    groups = []
    for slot in np.unique(slots[slots >= 0]).tolist():
        if bank.adapts(slot, projection):
            rows = to_device(np.flatnonzero(slots == slot), bank.page_table.device)
            groups.append(Group(rows, bank.placement(slot)))
    return groups


def embed_adapted(
    base: VocabParallelEmbedding, input_ids: Tensor, adapter_data: AdapterData | None
) -> Tensor:
    """[tokens] to [tokens, hidden], with the step's adapters."""
    y = base.partial(input_ids)
    if isinstance(adapter_data, VocabularyAdapters):
        adapter_data.embed(y, *base.local_ids(input_ids))
    return base.reduce(y)


def logits_adapted(base: ParallelHead, x: Tensor, adapter_data: AdapterData | None) -> Tensor:
    """[n, hidden] to [n, vocab_size], with the step's adapters."""
    z = base.partial(x)
    if isinstance(adapter_data, VocabularyAdapters):
        adapter_data.logits(z, x)
    return base.gather(z)

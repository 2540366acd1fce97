"""Adapters of embedding and head: deltas of embedded tokens, and of logits.

    embedding: y[t, o] += sum_r A[r, id(t)] Bt[r, o]        A cut over the vocabulary
    head:      z[n, v] += sum_r (sum_i x[n, i] A[r, i]) Bt[r, v]    B cut over the vocabulary

The embedding's delta joins before the all-reduce of the base product, the head's before the
all-gather. Captured steps compute both in the kernels of the layers' deltas; other steps as two
small products for each adapter that has them, in plain torch.

An adapter may bring a whole matrix W' instead of factors. It then replaces W for the adapter's
rows: y[t] = W'[id(t)], z[n] = W' x[n], cut like the base weight. W' itself is kept, because half
precision would round the difference W' - W. Steps with such an adapter are not captured.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.nn import functional as F

from modeling.adapters.bank import PAGE_ROWS, AdapterBank
from modeling.adapters.latents import LatentMap
from modeling.adapters.product import (
    AdapterData,
    EndAdapters,
    ExpertAdapters,
    ExpertDeltas,
    OutputSlice,
    TokenAdapters,
    TokenGroup,
)
from modeling.adapters.projection import (
    ROUTED_KINDS,
    TOKEN_KINDS,
    WHOLE_KINDS,
    Projection,
    ProjectionKind,
)
from modeling.adapters.token_rows import TokenRows, groups_of
from modeling.adapters.whole_linears import WholeLinears
from modeling.transfer import to_device
from sharding.embedding import ParallelHead, VocabParallelEmbedding
from sharding.linear_weight import LinearWeight
from sharding.slicing import whole

VOCABULARY_KINDS = tuple(kind for kind in ProjectionKind if kind.of_vocabulary)


@dataclass(frozen=True)
class EndNames:
    """The module paths of embedding and head; head_alias: a second path of the head."""

    embedding: str
    head: str
    head_alias: str | None = None


def vocabulary_projections(
    names: EndNames, embedding: VocabParallelEmbedding, head: ParallelHead, whole_ends: bool = False
) -> tuple[Projection, ...]:
    """The two ends as projections, of factors and, with whole_ends, of matrices too."""
    vocab_size, hidden, cut = embedding.vocab_size, embedding.weight.shape[1], embedding.cut
    rows = embedding.weight[: cut.stop - cut.start]
    tokens = Projection(
        name=names.embedding.rsplit(".", 1)[-1],
        module=names.embedding,
        in_features=vocab_size,
        out_features=hidden,
        inputs=cut.rows,
        outputs=whole(hidden),
        num_layers=1,
        kind=ProjectionKind.EMBEDDING,
        base=rows,
    )
    logits = Projection(
        name=names.head.rsplit(".", 1)[-1],
        module=names.head,
        aliases=() if names.head_alias is None else (names.head_alias,),
        in_features=hidden,
        out_features=vocab_size,
        inputs=whole(hidden),
        outputs=cut.rows,
        num_layers=1,
        kind=ProjectionKind.HEAD,
        # Tied ends share one tensor: that is how adapters see that they are tied.
        base=rows if head.weight is embedding.weight else head.weight[: len(rows)],
    )
    if not whole_ends:
        return tokens, logits
    return tokens, logits, *(_whole(end, cut.num_rows, hidden) for end in (tokens, logits))


def _whole(end: Projection, num_rows: int, hidden: int) -> Projection:
    """The projection of whole matrices at an end; num_rows: of the base weight, with padding."""
    return Projection(
        name=f"{end.name}.whole",
        module=end.module,
        in_features=hidden,
        out_features=0,
        inputs=whole(hidden),
        outputs=(),
        num_layers=-(-num_rows // PAGE_ROWS),
        kind=WHOLE_KINDS[end.kind],
    )


class VocabularyAdapters:
    """The adapters of a step that is not captured: the kernel's for layers, and the ends'.

    It has whole linear maps of the layers too.

    routed: the tokens of each adapter that changes experts or routers (`experts.py`).
    """

    def __init__(
        self,
        layers: AdapterData,
        bank: AdapterBank,
        token_slots: npt.NDArray[np.int64],
        logit_slots: npt.NDArray[np.int64],
    ) -> None:
        """token_slots: each token's adapter slot (-1: base); logit_slots: each logits row's."""
        kinds = {projection.kind: index for index, projection in enumerate(bank.projections)}
        self._layers = layers
        self._embedding = -1 if bank.embedding is None else bank.embedding
        self._head = -1 if bank.head is None else bank.head
        self._tokens = groups_of(bank, token_slots, self._embedding)
        self._logits = groups_of(bank, logit_slots, self._head)
        self._whole_tokens = _matrices(bank, token_slots, kinds.get(ProjectionKind.WHOLE_EMBEDDING))
        self._whole_logits = _matrices(bank, logit_slots, kinds.get(ProjectionKind.WHOLE_HEAD))
        self._set_tokens = _rows(bank, token_slots, kinds.get(ProjectionKind.EMBEDDING_TOKENS, -1))
        self._set_logits = _rows(bank, logit_slots, kinds.get(ProjectionKind.HEAD_TOKENS, -1))
        self._num_logits = len(logit_slots)
        self.routed = _routed_groups(bank, token_slots)
        self._whole_linears = WholeLinears(bank, token_slots)

    @property
    def expert_deltas(self) -> ExpertDeltas | None:
        """The kernels' adapters of experts; see `ExpertAdapters`."""
        layers = self._layers
        return layers.expert_deltas if isinstance(layers, ExpertAdapters) else None

    def has_product(
        self, x: Tensor, weight: LinearWeight, targets: tuple[OutputSlice, ...]
    ) -> bool:
        """Whether the layers' kernel computes the base product; see `AdapterData`."""
        return self._layers.has_product(x, weight, targets)

    def product(
        self,
        y: Tensor,
        x: Tensor,
        weight: LinearWeight,
        layer: int,
        targets: tuple[OutputSlice, ...],
    ) -> None:
        """Compute the base product of a layer's projections; see `AdapterData`."""
        self._layers.product(y, x, weight, layer, targets)

    def add(self, y: Tensor, x: Tensor, layer: int, targets: tuple[OutputSlice, ...]) -> None:
        """Add the deltas of a layer's projections; see `AdapterData`."""
        self._layers.add(y, x, layer, targets)

    def replace(
        self,
        y: Tensor,
        x: Tensor,
        layer: int,
        targets: tuple[OutputSlice, ...],
        bias: Tensor | None,
    ) -> None:
        """Overwrite rows by whole linear maps; see `WholeAdapters`."""
        self._whole_linears.replace(y, x, layer, targets, bias)

    def latent_queries(self, y: Tensor, x: Tensor, latents: LatentMap) -> None:
        """Change y [tokens, heads, latent]; see `AdapterData`."""
        self._whole_linears.latent_queries(y, x, latents)
        self._layers.latent_queries(y, x, latents)

    def latent_values(self, y: Tensor, x: Tensor, latents: LatentMap) -> None:
        """Change y [tokens, heads, values]; see `AdapterData`."""
        self._whole_linears.latent_values(y, x, latents)
        self._layers.latent_values(y, x, latents)

    def embed(self, y: Tensor, local_ids: Tensor, foreign: Tensor | None) -> None:
        """Change y [tokens, hidden] by this rank's part of A, or of W'; see `local_ids`."""
        for rows, matrix in self._whole_tokens:
            found = F.embedding(local_ids[rows], matrix)
            if foreign is not None:
                found = found.masked_fill(foreign[rows].unsqueeze(-1), 0)
            y[rows] = found
        for group in self._tokens:
            factors = group.adapter.factors(self._embedding, 0)
            if not len(factors.a):  # This rank's rows of the vocabulary are all padding.
                continue
            found = factors.a[local_ids[group.rows]]
            # Another rank's ids count zero here: the all-reduce adds that rank's part.
            if foreign is not None:
                found = found.masked_fill(foreign[group.rows].unsqueeze(-1), 0)
            y[group.rows] += found @ factors.bt

    def logits(self, z: Tensor, x: Tensor) -> None:
        """Change z [n, this rank's range] by the adapters of the head; x: [n, hidden]."""
        assert len(x) == self._num_logits, (x.shape, self._num_logits)
        for rows, matrix in self._whole_logits:
            z[rows] = F.linear(x[rows], matrix[: z.shape[1]])
        for group in self._logits:
            factors = group.adapter.factors(self._head, 0)
            part = z[:, : factors.bt.shape[1]]  # B is not padded, this rank's logits may be.
            part[group.rows] += x[group.rows] @ factors.a @ factors.bt

    def set_embedded(self, y: Tensor, input_ids: Tensor) -> None:
        """Set trained tokens in y [tokens, hidden], which is summed over the ranks."""
        for rows in self._set_tokens:
            rows.embed(y, input_ids)

    def set_logits(self, z: Tensor, x: Tensor) -> None:
        """Set trained tokens' logits in z [n, vocab_size], which is gathered from the ranks."""
        for rows in self._set_logits:
            rows.logits(z, x)


def adapts_more(bank: AdapterBank, slots: Sequence[int]) -> bool:
    """Whether some adapter of a step (-1: base) changes more than the layers' linear maps."""
    kinds = (*VOCABULARY_KINDS, *ROUTED_KINDS, ProjectionKind.WHOLE_LINEAR)
    return bank.changes(slots, kinds)


def needs_launches(bank: AdapterBank, slots: Sequence[int], has_experts: bool = False) -> bool:
    """Whether some adapter of a step (-1: base) changes what captured steps leave as it is.

    Those are a whole embedding, head or linear map, experts, routers, and more trained tokens than
    the largest rank. has_experts: whether the steps have adapters of experts.
    """
    routed = (ProjectionKind.ROUTER,) if has_experts else ROUTED_KINDS
    if bank.changes(slots, (*WHOLE_KINDS.values(), *routed, ProjectionKind.WHOLE_LINEAR)):
        return True
    rows = bank.token_rows
    if rows is None or not bank.changes(slots, TOKEN_KINDS.values()):
        return False
    adapters = [bank.loaded(slot) for slot in set(slots) if slot >= 0]
    return any(each.rank(at, 0) > bank.size.max_rank for each in adapters for at in rows)


def _routed_groups(bank: AdapterBank, slots: npt.NDArray[np.int64]) -> list[TokenGroup]:
    """The rows of each adapter that changes experts or routers."""
    groups: list[TokenGroup] = []
    for slot in np.unique(slots[slots >= 0]).tolist():
        if bank.changes([slot], ROUTED_KINDS):
            rows = to_device(np.flatnonzero(slots == slot), bank.page_table.device)
            groups.append(TokenGroup(rows, bank.loaded(slot)))
    return groups


def _matrices(
    bank: AdapterBank, slots: npt.NDArray[np.int64], projection: int | None
) -> list[tuple[slice | Tensor, Tensor]]:
    """The rows of each adapter that brings a whole matrix, and the matrix."""
    if projection is None:
        return []
    groups = groups_of(bank, slots, projection)
    return [(group.rows, group.adapter.matrix(projection)) for group in groups]


def _rows(bank: AdapterBank, slots: npt.NDArray[np.int64], projection: int) -> list[TokenRows]:
    """What each adapter with trained tokens sets."""
    groups = groups_of(bank, slots, projection)
    return [TokenRows(group.rows, group.adapter, projection) for group in groups]


def embed_adapted(
    base: VocabParallelEmbedding, input_ids: Tensor, adapter_data: AdapterData | None
) -> Tensor:
    """[tokens] to [tokens, hidden], with the step's adapters."""
    y = base.partial(input_ids)
    if isinstance(adapter_data, EndAdapters):
        adapter_data.embed(y, *base.local_ids(input_ids))
    y = base.reduce(y)
    if isinstance(adapter_data, TokenAdapters):
        adapter_data.set_embedded(y, input_ids)
    return y


def logits_adapted(base: ParallelHead, x: Tensor, adapter_data: AdapterData | None) -> Tensor:
    """[n, hidden] to [n, vocab_size], with the step's adapters."""
    z = base.partial(x)
    if isinstance(adapter_data, EndAdapters):
        adapter_data.logits(z, x)
    z = base.gather(z)
    if isinstance(adapter_data, TokenAdapters):
        adapter_data.set_logits(z, x)
    return z

"""The interface between a paged model and its runner."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from modeling.adapters.norms import NormModule
from modeling.adapters.product import AdapterData
from modeling.adapters.projection import BaseRows, Projection
from modeling.models.context import PagedContext
from sharding.embedding import VocabParallelEmbedding


@dataclass(frozen=True)
class AttentionLayer:
    """One layer's attention on one rank; see `AttentionSpec` for what the fields do to scores.

    window: how many of the last tokens a token sees, itself included; None: all.
    chunk: tokens see only those of their own chunk of so many; None: no chunks.
    source: the layer that stores the keys and values this one reads; None: it has its own.
    index_topk: a token sees so many positions at most, which an index chooses; the last head has
        the keys of that. None: no index.
    slopes: of this rank's heads (ALiBi); None: none.
    value_dim: values are the first so many numbers of the keys; None: they are stored beside them.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    chunk: int | None = None
    source: int | None = None
    index_topk: int | None = None
    slopes: tuple[float, ...] | None = None
    value_dim: int | None = None


class RecurrentStates(Protocol):
    """What recurrent layers keep of each batch slot, on one rank."""

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one sequence's states in all layers."""
        ...

    def allocate(self, batch_slots: int, kept: int) -> None:
        """Take the memory of so many sequences' states, the dummy's, and so many kept ones."""
        ...

    def go_on(self, batch_slot: int, kept: int) -> None:
        """Give a batch slot the states that were kept by a number."""
        ...

    def tensors(self) -> Iterator[Tensor]:
        """All states but the dummy's, each [batch slots, ...] or [kept, ...]."""
        ...


class SplitModel(Protocol):
    """A model that computes its end for some tokens alone: those that the head reads.

    Once the last keys and values are stored, no token needs another one's results, and of a prompt
    the head reads the last token. `trunk` computes a step until then, `tail` the rest.
    """

    @property
    def tail_attends(self) -> bool:
        """Whether layers of the tail attend, to keys and values that others have stored."""
        ...

    def trunk(
        self, input_ids: Tensor, position_ids: Tensor, context: PagedContext
    ) -> tuple[Tensor, ...]:
        """What the tail reads, [tokens, ...] each; see `paged`."""
        ...

    def tail(
        self,
        left: Sequence[Tensor],
        input_ids: Tensor,
        position_ids: Tensor,
        context: PagedContext,
    ) -> Tensor:
        """From rows [n, ...] of what `trunk` returned to what `paged` returns without a head.

        input_ids, position_ids: of these n tokens. context: of them as a step of their own, in
        which nothing is stored; without attention unless `tail_attends`.
        """
        ...


class PagedModel(Protocol):
    """One rank's share of a decoder over a paged cache; the engine computes it by `paged`.

    projections: the linear maps that adapters may change; OutputSlice names one by its index.
    attention_layers: one for each layer that attends.
    capturable: whether its steps can be CUDA graphs.
    has_expert_kernels: whether kernels can multiply adapters of its experts on a GPU.
    width: of what the head reads.
    logits_dtype: of what it computes.
    score: its classification head [labels, width]; None where it has none.
    unread: regular expressions of whole names that a checkpoint may hold and the model does
        not read.
    """

    projections: tuple[Projection, ...]
    vocab_size: int
    num_layers: int
    dtype: torch.dtype
    device: torch.device
    unread: tuple[str, ...]
    capturable: bool
    has_expert_kernels: bool
    width: int
    logits_dtype: torch.dtype
    score: Tensor | None

    @property
    def embedding(self) -> VocabParallelEmbedding:
        """The tokens' embedding, without adapters."""
        ...

    @property
    def decoder_layers(self) -> Sequence[nn.Module]:
        """The layers, where each returns the stream behind it or its two summands; else ()."""
        ...

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """What each layer's attention is on this rank."""
        ...

    @property
    def states(self) -> RecurrentStates | None:
        """What recurrent layers keep; None for a model without. Steps name their `state_rows`."""
        ...

    @property
    def split(self) -> SplitModel | None:
        """The model, if it splits."""
        ...

    def paged(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        context: PagedContext,
        lm_head_indices: Tensor | None = None,
        skip_lm_head: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(logits [n, vocab_size], or hidden states without a head; speculative logits or None).

        input_ids, position_ids: int64 [tokens], the rows' tokens packed one row after the other;
            positions name their rope set, see `layers.rotary`.
        context: the step's rows, cache and adapters.
        lm_head_indices: int64 [n], the tokens that get logits; None: all.
        skip_lm_head: return what the head would read instead.
        """
        ...

    def head(self, hidden: Tensor, adapter_data: AdapterData | None) -> Tensor:
        """Logits [n, vocab_size] of hidden states [n, ...] as `paged` gives them without a head.

        adapter_data: None, or the step's with these n tokens as those that get logits.
        """
        ...

    def base_tensors(self) -> Mapping[str, BaseRows]:
        """Embedding and head by PEFT's paths: adapters' files may hold copies of them."""
        ...

    def token_projections(self) -> tuple[Projection, ...]:
        """The rows of single tokens, of embedding and head, that adapters may replace."""
        ...

    def norms(self) -> Sequence[NormModule]:
        """The norms of which adapters may bring weights and biases."""
        ...

    def adapt_vocabulary(self, whole_ends: bool = False) -> None:
        """Add embedding and head to `projections`; called once, before anything reads those.

        whole_ends: adapters may bring a whole embedding or head too.
        """
        ...

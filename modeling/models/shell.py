"""The outer class that all families share: sizes, the vocabulary's two ends, the engine's door.

A family brings its decoder and says where its ends are; what differs beyond that it overrides.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from configs.architectures.base import ModelArchitecture
from modeling.adapters.product import AdapterData
from modeling.adapters.projection import BaseRows, Projection
from modeling.adapters.vocabulary import (
    EndNames,
    embed_adapted,
    logits_adapted,
    vocabulary_projections,
)
from modeling.attention.base import AttentionStep
from modeling.attention.kv_cache import LayerCache
from modeling.attention.paged import AttentionCall, PagedAttention
from sharding.embedding import ParallelHead, VocabParallelEmbedding
from sharding.loader import Weights
from sharding.slicing import HeadCut


@dataclass(frozen=True)
class ModelOutline:
    """What a family tells its outer class.

    head: the head's name in the checkpoint. ends: PEFT's names of embedding and head.
    """

    projections: tuple[Projection, ...]
    heads: HeadCut
    head_dim: int
    attention_scale: float
    embedding: VocabParallelEmbedding
    head: str
    ends: EndNames


class CausalBase(nn.Module):
    """A decoder's sizes, its head, and the adapters of both ends."""

    def __init__(self, config: ModelArchitecture, weights: Weights, outline: ModelOutline) -> None:
        """Read the head, or share the embedding's memory."""
        super().__init__()
        self.group = weights.group
        self.projections = outline.projections
        self.vocab_size = config.vocab_size
        self.num_layers = config.num_layers
        self.num_heads = outline.heads.num_heads
        self.num_kv_heads = outline.heads.num_kv_heads
        self.head_dim = outline.head_dim
        self.attention_scale = outline.attention_scale
        self.dtype: torch.dtype = weights.dtype
        self.device: torch.device = weights.device
        width = outline.embedding.weight.shape[1]
        tied = outline.embedding if config.tie_word_embeddings else None
        self.lm_head = ParallelHead(outline.head, config.vocab_size, width, weights, tied)
        self._ends = outline.ends

    @property
    def embedding(self) -> VocabParallelEmbedding:
        """Where tokens come in."""
        raise NotImplementedError

    def adapt_vocabulary(self, whole_ends: bool = False) -> None:
        """Let adapters change the embedding and the head too."""
        ends = vocabulary_projections(self._ends, self.embedding, self.lm_head, whole_ends)
        self.projections = (*self.projections, *ends)

    def base_tensors(self) -> Mapping[str, BaseRows]:
        """Embedding and head, each under all of its names; see `PagedModel`."""
        ends = vocabulary_projections(self._ends, self.embedding, self.lm_head)
        return {f"{path}.weight": end.base_rows for end in ends for path in end.modules(0)}

    def head(self, hidden: Tensor, adapter_data: AdapterData | None) -> Tensor:
        """[n, width] to logits [n, vocab_size]; see `PagedModel`."""
        return logits_adapted(self.lm_head, hidden, adapter_data)

    def _answer(
        self, hidden: Tensor, adapter_data: AdapterData | None, indices: Tensor | None, bare: bool
    ) -> tuple[Tensor, None]:
        """Logits of the tokens at `indices` (None: all), or, bare, what the head would read."""
        if indices is not None:
            hidden = hidden[indices]
        return (hidden if bare else self.head(hidden, adapter_data)), None


class PagedBase(CausalBase):
    """A family whose one door is the engine's."""

    @property
    def decoder(self) -> nn.Module:
        """From ids to what the head reads; it takes `forward`'s arguments but the last three."""
        raise NotImplementedError

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seqlen_prefill: Tensor,
        kv_cache: list[LayerCache],
        block_tables: Tensor,
        slots: Tensor,
        seqlen: AttentionStep,
        max_s: int,
        adapter_data: AdapterData | None,
        prefill_cache_indices: Tensor | None = None,
        lm_head_indices: Tensor | None = None,
        cross_attention_states: Tensor | None = None,
        skip_lm_head: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(logits [n, vocab_size] or hidden states [tokens, hidden], None); see `PagedModel`."""
        _refuse_states(cross_attention_states)
        hidden: Tensor = self.decoder(
            input_ids,
            position_ids,
            cu_seqlen_prefill,
            kv_cache,
            block_tables,
            slots,
            seqlen,
            max_s,
            adapter_data,
            prefill_cache_indices,
        )
        return self._answer(hidden, adapter_data, lm_head_indices, skip_lm_head)

    paged = forward
    """The engine's way in; such a family has no other."""


class PagedAndPaddedBase(CausalBase):
    """A family with transformers' padded door too; a `PaddedModel` but for `positions`.

    use_cache: what a call of the padded door that does not say gets.
    """

    use_cache: bool

    @property
    def decoder(self) -> nn.Module:
        """From embedded tokens to what the head reads."""
        raise NotImplementedError

    def paged(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seqlen_prefill: Tensor,
        kv_cache: list[LayerCache],
        block_tables: Tensor,
        slots: Tensor,
        seqlen: AttentionStep,
        max_s: int,
        adapter_data: AdapterData | None,
        prefill_cache_indices: Tensor | None = None,
        lm_head_indices: Tensor | None = None,
        cross_attention_states: Tensor | None = None,
        skip_lm_head: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(logits [n, vocab_size] or what the head reads [tokens, ...], None); see `PagedModel`."""
        _refuse_states(cross_attention_states)
        attention = PagedAttention(
            kv_cache, cu_seqlen_prefill, block_tables, slots, seqlen, prefill_cache_indices
        )
        embeds = embed_adapted(self.embedding, input_ids, adapter_data)
        hidden: Tensor = self.decoder(embeds, position_ids, attention, adapter_data)
        return self._answer(hidden, adapter_data, lm_head_indices, skip_lm_head)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Int64 [tokens] to [tokens, embedding width], without adapters."""
        return embed_adapted(self.embedding, input_ids, None)

    def decode(
        self,
        embeds: Tensor,
        position_ids: Tensor,
        attention: AttentionCall,
        trace: list[Tensor] | None,
    ) -> Tensor:
        """[tokens, embedding width] to the same shape, without adapters."""
        out: Tensor = self.decoder(embeds, position_ids, attention, None, trace)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """[tokens, embedding width] to [tokens, vocab_size], without adapters."""
        return self.head(hidden, None)


def _refuse_states(cross_attention_states: Tensor | None) -> None:
    if cross_attention_states is not None:
        raise ValueError("cross_attention_states: this model has no cross-attention layers")

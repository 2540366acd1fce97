"""The base classes of all model families: sizes, both ends of the vocabulary, the interfaces.

A family brings its decoder and says where its embedding and head are; it overrides what differs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from configs.architectures.base import ModelArchitecture
from modeling.adapters.norms import NormModule, is_norm
from modeling.adapters.peft.tokens import token_projections
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
from modeling.models.base import AttentionLayer, SplitModel
from modeling.models.context import GroupStep, PagedContext, StepContext
from sharding.embedding import ParallelHead, VocabParallelEmbedding
from sharding.loader import Weights
from sharding.slicing import HeadCut


@dataclass(frozen=True)
class ModelOutline:
    """What a family passes to its base class.

    projections: the linear maps that adapters may change.
    heads: this rank's attention heads.
    head_dim: of one head.
    attention_scale: of the scores, before the softmax.
    embedding: of the tokens.
    head: the head's name in the checkpoint.
    ends: PEFT's names of embedding and head.
    windows: how many of the last tokens each layer sees (None: all); () for all in all layers.
    """

    projections: tuple[Projection, ...]
    heads: HeadCut
    head_dim: int
    attention_scale: float
    embedding: VocabParallelEmbedding
    head: str
    ends: EndNames
    windows: tuple[int | None, ...] = ()


def read_score(config: ModelArchitecture, weights: Weights, width: int) -> nn.Parameter | None:
    """Read the classification head [labels, width], whole on every rank; None without one."""
    if not config.num_labels:
        return None
    return weights.parameter("score.weight", (config.num_labels, width))


class PagedBase(nn.Module):
    """A decoder's sizes, its head, the adapters of both ends, and the engine's interface."""

    capturable = True
    has_expert_kernels = False
    states = None
    score: Tensor | None

    def __init__(self, config: ModelArchitecture, weights: Weights, outline: ModelOutline) -> None:
        """Read the head, or share the embedding's memory."""
        super().__init__()
        self.group = weights.group
        self.projections = outline.projections
        self.vocab_size = config.vocab_size
        self.num_layers = config.num_layers
        self.head_dim = outline.head_dim
        self.num_heads = outline.heads.num_heads
        self._heads = outline.heads
        self._windows = outline.windows or (None,) * config.num_layers
        self.attention_scale = outline.attention_scale
        self.dtype: torch.dtype = weights.dtype
        self.logits_dtype = self.dtype
        self.device: torch.device = weights.device
        self.width: int = outline.embedding.weight.shape[1]
        self.score = read_score(config, weights, self.width)
        tied = outline.embedding if config.tie_word_embeddings else None
        self.lm_head = ParallelHead(outline.head, config.vocab_size, self.width, weights, tied)
        self._ends = outline.ends

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """What each layer's attention is on this rank."""
        heads = self._heads
        return tuple(
            AttentionLayer(
                heads.num_heads, heads.num_kv_heads, self.head_dim, self.attention_scale, window
            )
            for window in self._windows
        )

    @property
    def embedding(self) -> VocabParallelEmbedding:
        """The tokens' embedding."""
        raise NotImplementedError

    @property
    def split(self) -> SplitModel | None:
        """None: its steps are computed whole."""
        return None

    @property
    def decoder_layers(self) -> Sequence[nn.Module]:
        """Layers that return the stream; see `PagedModel`."""
        return ()

    @property
    def decoder(self) -> nn.Module:
        """From (embeds, position_ids, context) to what the head reads.

        embeds: [tokens, width]. position_ids: int64 [tokens]. context: a `PagedContext`.
        """
        raise NotImplementedError

    def embedded(self, input_ids: Tensor, context: PagedContext) -> Tensor:
        """Int64 [tokens] to [tokens, width], with the step's adapters."""
        return embed_adapted(self.embedding, input_ids, context.adapter_data)

    def adapt_vocabulary(self, whole_ends: bool = False) -> None:
        """Let adapters change the embedding and the head too; see `PagedModel`."""
        ends = vocabulary_projections(self._ends, self.embedding, self.lm_head, whole_ends)
        self.projections = (*self.projections, *ends)

    def token_projections(self) -> tuple[Projection, ...]:
        """What adapters change of single tokens; see `PagedModel`."""
        return token_projections(vocabulary_projections(self._ends, self.embedding, self.lm_head))

    def norms(self) -> Sequence[NormModule]:
        """The norms, each by its own path; see `PagedModel`."""
        found = ((path, each) for path, each in self.named_modules() if is_norm(each))
        return [NormModule(path, each, each) for path, each in found]

    def base_tensors(self) -> Mapping[str, BaseRows]:
        """Embedding and head, each under all of its names; see `PagedModel`."""
        ends = vocabulary_projections(self._ends, self.embedding, self.lm_head)
        return {f"{path}.weight": end.base_rows for end in ends for path in end.modules(0)}

    def head(self, hidden: Tensor, adapter_data: AdapterData | None) -> Tensor:
        """[n, width] to logits [n, vocab_size]; see `PagedModel`."""
        return logits_adapted(self.lm_head, hidden, adapter_data)

    def paged(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        context: PagedContext,
        lm_head_indices: Tensor | None = None,
        skip_lm_head: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(logits [n, vocab_size] or what the head reads, None); see `PagedModel`."""
        embeds = self.embedded(input_ids, context)
        hidden: Tensor = self.decoder(embeds, position_ids, context)
        if lm_head_indices is not None:
            hidden = hidden[lm_head_indices]
        return (hidden if skip_lm_head else self.head(hidden, context.adapter_data)), None


class FlashBase(PagedBase):
    """A family that also has the `forward` of LoRAX's flash models."""

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
        """`paged` with the fields of `PagedContext` one by one, under LoRAX's names.

        max_s: the longest row's keys, which `seqlen` knows too. ValueError for
        cross_attention_states, which no model here reads.
        """
        if cross_attention_states is not None:
            raise ValueError("cross_attention_states: this model has no cross-attention layers")
        group = GroupStep(cu_seqlen_prefill, block_tables, slots, seqlen)
        context = PagedContext(kv_cache, (group,), adapter_data, prefill_cache_indices)
        return self.paged(input_ids, position_ids, context, lm_head_indices, skip_lm_head)


class PagedAndPaddedBase(PagedBase):
    """A family that also has transformers' padded `forward`; a `PaddedModel` but for `positions`.

    use_cache: whether a padded call that does not say gets a cache back.
    """

    use_cache: bool

    def embed(self, input_ids: Tensor) -> Tensor:
        """Int64 [tokens] to [tokens, embedding width], without adapters."""
        return embed_adapted(self.embedding, input_ids, None)

    def decode(
        self,
        embeds: Tensor,
        position_ids: Tensor,
        context: StepContext,
        trace: list[Tensor] | None,
    ) -> Tensor:
        """[tokens, embedding width] to the same shape; trace: gets what enters each layer."""
        out: Tensor = self.decoder(embeds, position_ids, context, trace)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """[tokens, embedding width] to [tokens, vocab_size], without adapters."""
        return self.head(hidden, None)

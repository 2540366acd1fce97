"""Flash Llama: the Llama family over a paged cache, tensor-parallel, with adapters.

The class names, constructors and the outer `forward` are LoRAX's. What differs between members
of the family is data in `Architecture`; no code here depends on a model's name.
"""

from collections.abc import Callable, Sequence
from typing import cast

from torch import Tensor, nn

from configs.architectures.llama import Architecture
from modeling.adapters.linear import AdapterColumnLinear, AdapterRowLinear
from modeling.adapters.product import AdapterData
from modeling.adapters.vocabulary import EndNames
from modeling.layers.angles import Angles
from modeling.layers.attention import norm_heads, split_heads
from modeling.layers.mlp import GatedMLP
from modeling.layers.norm import RMSNorm, head_norms
from modeling.layers.rotary import Rotary
from modeling.layers.summed_norms import serve_summed_norms
from modeling.models.context import PagedContext
from modeling.models.llama_projections import (
    attention_projections,
    column_parts,
    llama_heads,
    llama_projections,
    mlp_projections,
)
from modeling.models.paged_base import FlashBase, ModelOutline
from sharding.embedding import VocabParallelEmbedding
from sharding.group import Summand, summed
from sharding.linear import ColumnParallelLinear, RowParallelLinear
from sharding.loader import Weights

LlamaConfig = Architecture


class LlamaRMSNorm(RMSNorm):
    """The family's norm; forward(x, residual) returns (normed, x + residual)."""


class FlashLlamaAttention(nn.Module):
    """Self-attention of one layer: fused q, k, v, rotation, paged attention, output."""

    def __init__(self, prefix: str, config: LlamaConfig, weights: Weights, layer_id: int) -> None:
        """prefix: e.g. "model.layers.0.self_attn"."""
        super().__init__()
        self.heads = llama_heads(config, weights.group)
        self._layer = layer_id
        *columns, out = attention_projections(prefix, config, weights.group)
        parts = column_parts(tuple(columns))
        self.qkv_proj = AdapterColumnLinear(
            ColumnParallelLinear(config.hidden_size, parts, config.qkv_bias, weights),
            layer_id,
            tuple(range(len(columns))),
        )
        shape = (config.hidden_size, out.in_features)
        self.o_proj = AdapterRowLinear(
            RowParallelLinear(out.module, shape, out.inputs, config.output_bias, weights),
            layer_id,
            len(columns),
        )
        self.q_norm, self.k_norm = (
            LlamaRMSNorm(f"{prefix}.{name}", config.head_dim, config.rms_norm_eps, weights)
            if config.qk_norm
            else None
            for name in ("q_norm", "k_norm")
        )
        self._window = config.windows[layer_id]

    def forward(self, hidden_states: Tensor, angles: Angles, context: PagedContext) -> Tensor:
        """[tokens, hidden] to the same shape; the step's k and v go to the cache."""
        attended = self.attend(hidden_states, angles, context)
        out: Tensor = self.o_proj(attended, context.adapter_data)
        return out

    def attend(self, hidden_states: Tensor, angles: Angles, context: PagedContext) -> Tensor:
        """[tokens, hidden] to the attention of this rank's heads, [tokens, heads * head_dim]."""
        qkv: Tensor = self.qkv_proj(hidden_states, context.adapter_data)
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = head_norms(self.q_norm, self.k_norm)
            if norms is None:
                qkv = norm_heads(qkv, self.heads, self.q_norm, self.k_norm)
        parts = split_heads(qkv, self.heads)
        q = context.store(self._layer, parts, angles, norms, overwrites=True)
        return context.query(self._layer, q, self._window).flatten(1)


class LlamaMLP(GatedMLP):
    """The family's gated feed-forward."""

    def __init__(self, prefix: str, config: LlamaConfig, weights: Weights, layer_id: int) -> None:
        """prefix: e.g. "model.layers.0.mlp"."""
        *columns, down = mlp_projections(prefix, config, weights.group)
        first = len(attention_projections(prefix, config, weights.group))
        parts, bias = column_parts(tuple(columns)), config.mlp_bias
        shape = (config.hidden_size, down.in_features)
        super().__init__(
            AdapterColumnLinear(
                ColumnParallelLinear(config.hidden_size, parts, bias, weights),
                layer_id,
                tuple(range(first, first + len(columns))),
            ),
            AdapterRowLinear(
                RowParallelLinear(down.module, shape, down.inputs, bias, weights),
                layer_id,
                first + len(columns),
            ),
            config.hidden_act,
        )


class FlashLlamaLayer(nn.Module):
    """One decoder layer; the residual stream travels beside the hidden states."""

    def __init__(self, layer_id: int, prefix: str, config: LlamaConfig, weights: Weights) -> None:
        """prefix: the decoder's, e.g. "model"."""
        super().__init__()
        prefix = f"{prefix}.layers.{layer_id}"
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = FlashLlamaAttention(f"{prefix}.self_attn", config, weights, layer_id)
        self.mlp = LlamaMLP(f"{prefix}.mlp", config, weights, layer_id)
        self.input_layernorm = LlamaRMSNorm(f"{prefix}.input_layernorm", size, eps, weights)
        self.post_attention_layernorm = LlamaRMSNorm(
            f"{prefix}.post_attention_layernorm", size, eps, weights
        )
        self.input_layernorm.feed(self.self_attn.qkv_proj.base.stored)
        self.post_attention_layernorm.feed(self.mlp.gate_up_proj.base.stored)
        self._multiplier = config.residual_multiplier

    def forward(
        self,
        hidden_states: Tensor | Summand,
        residual: Tensor | None,
        angles: Angles,
        context: PagedContext,
    ) -> tuple[Tensor | Summand, Tensor]:
        """(what the layer adds last, the residual stream before it), both [tokens, hidden]."""
        attended, residual = self.attend(hidden_states, residual, angles, context)
        return self.finish(attended, residual, context.adapter_data)

    def attend(
        self,
        hidden_states: Tensor | Summand,
        residual: Tensor | None,
        angles: Angles,
        context: PagedContext,
    ) -> tuple[Tensor, Tensor]:
        """(attention [tokens, heads * head_dim], the residual stream before it)."""
        normed, residual = self.input_layernorm(hidden_states, residual)
        return self.self_attn.attend(normed, angles, context), residual

    def finish(
        self, attended: Tensor, residual: Tensor, adapter_data: AdapterData | None
    ) -> tuple[Tensor | Summand, Tensor]:
        """From what `attend` returns, of some of its tokens, to what the layer returns of these.

        Norms sum what is added over ranks, unless a factor comes between.
        """
        out = self.self_attn.o_proj
        if self._multiplier == 1.0:
            added = out.unsummed(attended, adapter_data)
            normed, stream = self.post_attention_layernorm(added, residual)
            return self.mlp.unsummed(normed, adapter_data), stream
        added = out(attended, adapter_data) * self._multiplier
        normed, stream = self.post_attention_layernorm(added, residual)
        return self.mlp(normed, adapter_data) * self._multiplier, stream


CreateLayer = Callable[[int, str, LlamaConfig, Weights], nn.Module]
"""(layer_id, prefix, config, weights) to a layer with FlashLlamaLayer's methods."""


class FlashLlamaModel(nn.Module):
    """The decoder: embedding, layers, last norm."""

    def __init__(
        self,
        prefix: str,
        config: LlamaConfig,
        weights: Weights,
        create_layer_fn: CreateLayer | None = None,
    ) -> None:
        """prefix: e.g. "model". create_layer_fn: makes another kind of layer."""
        super().__init__()
        create = create_layer_fn or FlashLlamaLayer
        self.embed_tokens = VocabParallelEmbedding(
            f"{prefix}.embed_tokens", config.vocab_size, config.hidden_size, weights
        )
        self.layers = nn.ModuleList(
            create(layer_id, prefix, config, weights) for layer_id in range(config.num_layers)
        )
        self.norm = LlamaRMSNorm(f"{prefix}.norm", config.hidden_size, config.rms_norm_eps, weights)
        self._rotary = Rotary(config.rope, config.head_dim, weights.dtype, weights.device)
        self._multiplier = config.embedding_multiplier
        self._blends = config.blends
        self._sources = {blend.source for blend in config.blends}

    def forward(self, embeds: Tensor, position_ids: Tensor, context: PagedContext) -> Tensor:
        """Embedded tokens to normed hidden states, both [tokens, hidden], equal on every rank."""
        angles = self._rotary.angles(position_ids)
        entering = self._entering(len(self.layers), embeds, angles, context)
        normed: Tensor = self.norm(*entering)[0]
        return normed

    def trunk(
        self, embeds: Tensor, position_ids: Tensor, context: PagedContext
    ) -> tuple[Tensor, Tensor]:
        """As `forward`, to the last layer's attention and the stream beside it."""
        angles = self._rotary.angles(position_ids)
        entering = self._entering(len(self.layers) - 1, embeds, angles, context)
        return self._last.attend(*entering, angles, context)

    def tail(self, attended: Tensor, stream: Tensor, adapter_data: AdapterData | None) -> Tensor:
        """From what `trunk` returns, of some of its tokens, to their normed hidden states."""
        normed: Tensor = self.norm(*self._last.finish(attended, stream, adapter_data))[0]
        return normed

    @property
    def _last(self) -> FlashLlamaLayer:
        return cast(FlashLlamaLayer, self.layers[-1])

    def _entering(
        self, end: int, embeds: Tensor, angles: Angles, context: PagedContext
    ) -> tuple[Tensor | Summand, Tensor | None]:
        """What enters the layer `end`, or the norm behind all, and the stream beside it."""
        hidden: Tensor | Summand = embeds
        if self._multiplier != 1.0:
            hidden = embeds * self._multiplier
        residual: Tensor | None = None
        kept: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if self._blends:
                hidden, residual = self._blended(index, hidden, residual, kept)
            if index == end:
                break
            hidden, residual = layer(hidden, residual, angles, context)
        return hidden, residual

    def _blended(
        self,
        index: int,
        hidden: Tensor | Summand,
        residual: Tensor | None,
        kept: dict[int, Tensor],
    ) -> tuple[Tensor | Summand, Tensor | None]:
        """What enters a layer, and the stream beside it: skip connections end and begin here."""
        blends = [blend for blend in self._blends if blend.layer == index]
        if not blends and index not in self._sources:
            return hidden, residual
        stream = summed(hidden) if residual is None else summed(hidden) + residual
        kept[index] = stream
        for blend in blends:
            stream = kept[blend.source] * blend.weight + stream * (1 - blend.weight)
        return stream, None


class FlashLlamaForCausalLM(FlashBase):
    """The decoder and its head; a `PagedModel`."""

    tail_attends = False

    def __init__(
        self,
        prefix: str,
        config: LlamaConfig,
        weights: Weights,
        create_layer_fn: CreateLayer | None = None,
    ) -> None:
        """prefix: "" for a checkpoint of this model alone."""
        inner, head = (f"{prefix}.model", f"{prefix}.lm_head") if prefix else ("model", "lm_head")
        if config.tie_word_embeddings:
            weights.stand_in(f"{inner}.embed_tokens.weight", f"{head}.weight")
        model = FlashLlamaModel(inner, config, weights, create_layer_fn)
        outline = ModelOutline(
            projections=llama_projections(inner, config, weights.group),
            heads=llama_heads(config, weights.group),
            head_dim=config.head_dim,
            attention_scale=config.attention_scale,
            embedding=model.embed_tokens,
            head=head,
            ends=EndNames(f"{inner}.embed_tokens", head),
            windows=config.windows,
        )
        super().__init__(config, weights, outline)
        self.config = config
        self.model = model
        self.unread: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)
        serve_summed_norms(weights.group, config.hidden_size, weights.dtype, weights.device)

    @classmethod
    def build(cls, config: LlamaConfig, weights: Weights) -> "FlashLlamaForCausalLM":
        """The model of a checkpoint that holds nothing else."""
        return cls("", config, weights)

    @property
    def embedding(self) -> VocabParallelEmbedding:
        """The tokens' embedding."""
        return self.model.embed_tokens

    @property
    def decoder_layers(self) -> Sequence[nn.Module]:
        """The decoder's layers; see `PagedModel`."""
        return tuple(self.model.layers)

    @property
    def decoder(self) -> nn.Module:
        """The decoder without the head."""
        return self.model

    @property
    def split(self) -> "FlashLlamaForCausalLM":
        """The model: behind the last attention it computes the tokens that are read."""
        return self

    def trunk(
        self, input_ids: Tensor, position_ids: Tensor, context: PagedContext
    ) -> tuple[Tensor, Tensor]:
        """The last layer's attention, and the stream beside it; see `SplitModel`."""
        return self.model.trunk(self.embedded(input_ids, context), position_ids, context)

    def tail(
        self,
        left: Sequence[Tensor],
        input_ids: Tensor,
        position_ids: Tensor,
        context: PagedContext,
    ) -> Tensor:
        """From those of some tokens to what the head reads; see `SplitModel`."""
        attended, stream = left
        return self.model.tail(attended, stream, context.adapter_data)

    def head(self, hidden: Tensor, adapter_data: AdapterData | None) -> Tensor:
        """[n, hidden] to logits [n, vocab_size]; see `PagedModel`."""
        logits = super().head(hidden, adapter_data)
        divisor = self.config.logits_divisor
        return logits if divisor == 1.0 else logits / divisor

"""GPT-NeoX: one set of layers with two interfaces, the paged engine's and transformers' padded one.

The class names are LoRAX's. `paged` is the engine's interface, with adapters and packed
rows; `forward` is the padded one, as in transformers.
"""

from enum import IntEnum

import torch
from torch import Tensor, nn

from configs.architectures.gpt_neox import GPTNeoXArchitecture
from configs.architectures.rope import POSITIONS_PER_SET, RopeType
from modeling.adapters.linear import AdapterColumnLinear, AdapterRowLinear
from modeling.adapters.projection import Projection
from modeling.adapters.vocabulary import EndNames
from modeling.layers.angles import Angles
from modeling.layers.mlp import PlainMLP
from modeling.layers.norm import LayerNorm
from modeling.layers.rotary import Rotary
from modeling.models.context import StepContext
from modeling.models.padded.interface import PaddedAnswer, PaddedCall, Past, padded_forward
from modeling.models.paged_base import ModelOutline, PagedAndPaddedBase
from sharding.embedding import VocabParallelEmbedding
from sharding.group import TensorParallel
from sharding.linear import ColumnParallelLinear, ColumnPart, RowParallelLinear
from sharding.loader import Weights
from sharding.slicing import HeadCut, Segments, cut_heads, cut_width, fused_heads, whole

PEFT_PREFIX = "gpt_neox"
"""Where PEFT finds the decoder, however the checkpoint's own names begin."""


class GPTNeoXProjection(IntEnum):
    """The model's adaptable linear maps, in the order of `projections`."""

    QUERY_KEY_VALUE = 0
    DENSE = 1
    H_TO_4H = 2
    FOUR_H_TO_H = 3


def _heads(config: GPTNeoXArchitecture, group: TensorParallel) -> HeadCut:
    """This rank's attention heads."""
    return cut_heads(config.num_heads, config.num_heads, config.head_dim, group.rank, group.size)


def _inner(config: GPTNeoXArchitecture, group: TensorParallel) -> Segments:
    """This rank's part of the feed-forward's width."""
    return cut_width(config.intermediate_size, group.rank, group.size, "intermediate_size")


def fused_qkv(heads: Segments, head_dim: int) -> Segments:
    """The rows of query_key_value that belong to `heads`, in the order q, k, v of the layers.

    The matrix lies head by head, each head's q, k and v together. heads: one run of columns of q
    alone.
    """
    return fused_heads(heads, heads, head_dim)


def gpt_neox_projections(
    config: GPTNeoXArchitecture, group: TensorParallel
) -> tuple[Projection, ...]:
    """The adaptable linear maps with this rank's cuts."""
    heads, inner = _heads(config, group).queries, _inner(config, group)
    hidden, size = config.hidden_size, config.intermediate_size
    layer, count = f"{PEFT_PREFIX}.layers.{{layer}}", config.num_layers
    fused, every = fused_qkv(heads, config.head_dim), whole(hidden)
    attention, mlp = f"{layer}.attention", f"{layer}.mlp"
    up, down = "dense_h_to_4h", "dense_4h_to_h"
    return (
        Projection(
            "query_key_value",
            f"{attention}.query_key_value",
            hidden,
            3 * hidden,
            every,
            fused,
            count,
        ),
        Projection("dense", f"{attention}.dense", hidden, hidden, heads, every, count),
        Projection(up, f"{mlp}.{up}", hidden, size, every, inner, count),
        Projection(down, f"{mlp}.{down}", size, hidden, inner, every, count),
    )


class RotaryEmbedding(Rotary):
    """Angles of the rotated part of a head, computed for each position: no length is fixed."""

    def __init__(self, config: GPTNeoXArchitecture, weights: Weights) -> None:
        """Nothing is read: the frequencies that old checkpoints hold are computed."""
        super().__init__(config.rope, config.head_dim, weights.dtype, weights.device)


class GPTNeoXAttention(nn.Module):
    """Self-attention of one layer, without the sum over ranks."""

    def __init__(
        self, prefix: str, config: GPTNeoXArchitecture, weights: Weights, layer_id: int
    ) -> None:
        """prefix: e.g. "gpt_neox.layers.0.attention"."""
        super().__init__()
        self.heads = _heads(config, weights.group)
        self._layer = layer_id
        hidden, bias = config.hidden_size, config.attention_bias
        part = ColumnPart(
            f"{prefix}.query_key_value",
            3 * hidden,
            fused_qkv(self.heads.queries, config.head_dim),
        )
        self.query_key_value = AdapterColumnLinear(
            ColumnParallelLinear(hidden, (part,), bias, weights),
            layer_id,
            (GPTNeoXProjection.QUERY_KEY_VALUE,),
        )
        shape = (hidden, hidden)
        dense = RowParallelLinear(f"{prefix}.dense", shape, self.heads.queries, bias, weights)
        self.dense = AdapterRowLinear(dense, layer_id, GPTNeoXProjection.DENSE)

    def forward(self, hidden_states: Tensor, angles: Angles, context: StepContext) -> Tensor:
        """[tokens, hidden] to this rank's summand of the same shape."""
        qkv: Tensor = self.query_key_value(hidden_states, context.adapter_data)
        attended = context.attend(self._layer, qkv, self.heads, angles)
        return self.dense.partial(attended.flatten(1), context.adapter_data)


class GPTNeoXMLP(PlainMLP):
    """The family's feed-forward."""

    def __init__(
        self, prefix: str, config: GPTNeoXArchitecture, weights: Weights, layer_id: int
    ) -> None:
        """prefix: e.g. "gpt_neox.layers.0.mlp"."""
        size, hidden = config.intermediate_size, config.hidden_size
        cut = _inner(config, weights.group)
        part = ColumnPart(f"{prefix}.dense_h_to_4h", size, cut)
        up = ColumnParallelLinear(hidden, (part,), True, weights)
        down = RowParallelLinear(f"{prefix}.dense_4h_to_h", (hidden, size), cut, True, weights)
        super().__init__(
            AdapterColumnLinear(up, layer_id, (GPTNeoXProjection.H_TO_4H,)),
            AdapterRowLinear(down, layer_id, GPTNeoXProjection.FOUR_H_TO_H),
            config.hidden_act,
        )


class GPTNeoXLayer(nn.Module):
    """One decoder layer; with a parallel residual both branches share one sum over ranks."""

    def __init__(
        self, layer_id: int, prefix: str, config: GPTNeoXArchitecture, weights: Weights
    ) -> None:
        """prefix: the layer's, e.g. "gpt_neox.layers.0"."""
        super().__init__()
        size, eps = config.hidden_size, config.layer_norm_eps
        self._parallel = config.parallel_residual
        self._group = weights.group
        self.input_layernorm = LayerNorm(f"{prefix}.input_layernorm", size, eps, weights)
        self.post_attention_layernorm = LayerNorm(
            f"{prefix}.post_attention_layernorm", size, eps, weights
        )
        self.attention = GPTNeoXAttention(f"{prefix}.attention", config, weights, layer_id)
        self.mlp = GPTNeoXMLP(f"{prefix}.mlp", config, weights, layer_id)

    def forward(self, hidden_states: Tensor, angles: Angles, context: StepContext) -> Tensor:
        """The residual stream [tokens, hidden] to the same shape, equal on every rank."""
        x = hidden_states
        attended = self.attention(self.input_layernorm(x), angles, context)
        if self._parallel:
            fed = self.mlp.partial(self.post_attention_layernorm(x), context.adapter_data)
            return x + self._group.all_reduce(attended + fed)
        x = x + self._group.all_reduce(attended)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x), context.adapter_data)
        return out


class GPTNeoXModel(nn.Module):
    """The decoder: embedding, layers, last norm."""

    def __init__(self, config: GPTNeoXArchitecture, weights: Weights) -> None:
        """Read everything but the head."""
        super().__init__()
        dot = f"{PEFT_PREFIX}."
        size = config.hidden_size
        self.embed_in = VocabParallelEmbedding(f"{dot}embed_in", config.vocab_size, size, weights)
        self.layers = nn.ModuleList(
            GPTNeoXLayer(layer_id, f"{dot}layers.{layer_id}", config, weights)
            for layer_id in range(config.num_layers)
        )
        self.final_layer_norm = LayerNorm(
            f"{dot}final_layer_norm", size, config.layer_norm_eps, weights
        )
        self.rotary_emb = RotaryEmbedding(config, weights)

    def forward(
        self,
        embeds: Tensor,
        position_ids: Tensor,
        context: StepContext,
        trace: list[Tensor] | None = None,
    ) -> Tensor:
        """[tokens, hidden] to the same shape, equal on every rank.

        trace: gets what enters each layer.
        """
        hidden = embeds
        angles = self.rotary_emb.angles(position_ids)
        for layer in self.layers:
            if trace is not None:
                trace.append(hidden)
            hidden = layer(hidden, angles, context)
        normed: Tensor = self.final_layer_norm(hidden)
        return normed


class GPTNeoXForCausalLM(PagedAndPaddedBase):
    """The decoder and its head; a `PagedModel` and a `PaddedModel`."""

    def __init__(self, config: GPTNeoXArchitecture, weights: Weights) -> None:
        """Read this rank's share."""
        # transformers calls the head lm_head in memory and embed_out on disk; PEFT sees it
        # in memory, where older transformers called it embed_out too.
        head = "embed_out" if weights.has("embed_out.weight") else "lm_head"
        if config.tie_word_embeddings:
            weights.stand_in(f"{PEFT_PREFIX}.embed_in.weight", f"{head}.weight")
        gpt_neox = GPTNeoXModel(config, weights)
        outline = ModelOutline(
            projections=gpt_neox_projections(config, weights.group),
            heads=_heads(config, weights.group),
            head_dim=config.head_dim,
            attention_scale=config.head_dim**-0.5,
            embedding=gpt_neox.embed_in,
            head=head,
            ends=EndNames(f"{PEFT_PREFIX}.embed_in", "lm_head", head_alias="embed_out"),
        )
        super().__init__(config, weights, outline)
        self.config = config
        self.use_cache = config.use_cache
        # Old checkpoints hold the causal mask and the frequencies beside the weights.
        self.unread: tuple[str, ...] = (
            r".*\.attention\.(bias|masked_bias)",
            r".*\.rotary_emb\.inv_freq",
        )
        self.gpt_neox = gpt_neox

    @classmethod
    def build(cls, config: GPTNeoXArchitecture, weights: Weights) -> "GPTNeoXForCausalLM":
        """The model of a checkpoint that holds nothing else."""
        return cls(config, weights)

    @property
    def embedding(self) -> VocabParallelEmbedding:
        """The tokens' embedding."""
        return self.gpt_neox.embed_in

    @property
    def decoder(self) -> nn.Module:
        """The decoder without the head."""
        return self.gpt_neox

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        head_mask: Tensor | None = None,
        past_key_values: Past | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> PaddedAnswer:
        """The padded interface; arguments as in `PaddedCall`, positions count padding in."""
        return padded_forward(
            self,
            PaddedCall(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                head_mask=head_mask,
                past_key_values=past_key_values,
                inputs_embeds=inputs_embeds,
                labels=labels,
                use_cache=use_cache,
                output_attentions=output_attentions,
                output_hidden_states=output_hidden_states,
                return_dict=return_dict,
            ),
        )

    def decode(
        self,
        embeds: Tensor,
        position_ids: Tensor,
        context: StepContext,
        trace: list[Tensor] | None,
    ) -> Tensor:
        """As `PagedAndPaddedBase`; as in transformers, the farthest position counts for all rows.

        ValueError for a position where dynamic rope would begin to change.
        """
        sets, longest = self.config.rope_sets, self.config.max_total_tokens
        if sets is not None:
            is_long = position_ids.max() >= sets.border
            position_ids = position_ids + is_long * POSITIONS_PER_SET
        if self.config.rope.type is RopeType.DYNAMIC and position_ids.max() >= longest:
            raise ValueError(f"position_ids must be below {longest}, where dynamic rope changes")
        return super().decode(embeds, position_ids, context, trace)

    def positions(self, mask: Tensor, past_length: int) -> Tensor:
        """Positions, padding counted in, as in transformers: [1, n]."""
        return torch.arange(past_length, mask.shape[1], device=mask.device)[None]

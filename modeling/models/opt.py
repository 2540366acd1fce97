"""OPT: one set of layers with two interfaces, the paged engine's and transformers' padded one.

The class names are LoRAX's. `paged` is the engine's interface, with adapters and packed
rows; `forward` is the padded one, as in transformers.
"""

from enum import IntEnum

from torch import Tensor, nn
from torch.nn import functional as F

from configs.architectures.opt import OPTArchitecture
from modeling.adapters.linear import AdapterColumnLinear, AdapterRowLinear
from modeling.adapters.projection import Projection
from modeling.adapters.vocabulary import EndNames
from modeling.layers.mlp import PlainMLP
from modeling.layers.norm import LayerNorm
from modeling.models.context import StepContext
from modeling.models.padded.interface import PaddedAnswer, PaddedCall, Past, padded_forward
from modeling.models.paged_base import ModelOutline, PagedAndPaddedBase
from sharding.embedding import VocabParallelEmbedding
from sharding.group import TensorParallel
from sharding.linear import ColumnParallelLinear, ColumnPart, RowParallelLinear
from sharding.loader import Weights
from sharding.slicing import HeadCut, Segments, cut_heads, cut_width, whole

PEFT_PREFIX = "model.decoder"
"""Where PEFT finds the decoder, however the checkpoint's own names begin."""

LAYER_NORM_EPS = 1e-5
"""The family's configs do not say it; it is torch's default."""

POSITION_OFFSET = 2
"""The first rows of the position table are for padding (fairseq's padding_idx + 1)."""


class OPTProjection(IntEnum):
    """The model's adaptable linear maps, in the order of `projections`."""

    Q = 0
    K = 1
    V = 2
    OUT = 3
    FC1 = 4
    FC2 = 5
    PROJECT_IN = 6
    PROJECT_OUT = 7


def _heads(config: OPTArchitecture, group: TensorParallel) -> HeadCut:
    """This rank's attention heads."""
    return cut_heads(config.num_heads, config.num_heads, config.head_dim, group.rank, group.size)


def _inner(config: OPTArchitecture, group: TensorParallel) -> Segments:
    """This rank's part of the feed-forward's width."""
    return cut_width(config.intermediate_size, group.rank, group.size, "ffn_dim")


def opt_projections(config: OPTArchitecture, group: TensorParallel) -> tuple[Projection, ...]:
    """The adaptable linear maps with this rank's cuts."""
    heads, inner = _heads(config, group).queries, _inner(config, group)
    hidden, size = config.hidden_size, config.intermediate_size
    layer, count = f"{PEFT_PREFIX}.layers.{{layer}}", config.num_layers
    every, width = whole(hidden), config.embedding_size
    attention = f"{layer}.self_attn"
    return (
        *(
            Projection(name, f"{attention}.{name}", hidden, hidden, every, heads, count)
            for name in ("q_proj", "k_proj", "v_proj")
        ),
        Projection("out_proj", f"{attention}.out_proj", hidden, hidden, heads, every, count),
        Projection("fc1", f"{layer}.fc1", hidden, size, every, inner, count),
        Projection("fc2", f"{layer}.fc2", size, hidden, inner, every, count),
        *(
            Projection(name, f"{PEFT_PREFIX}.{name}", *sizes, whole(sizes[0]), whole(sizes[1]), 1)
            for name, sizes in (("project_in", (width, hidden)), ("project_out", (hidden, width)))
            if width != hidden
        ),
    )


class OPTLearnedPositionalEmbedding(nn.Module):
    """A table of positions, whole on every rank; position p is row p + 2."""

    def __init__(self, prefix: str, config: OPTArchitecture, weights: Weights) -> None:
        """prefix: e.g. "model.decoder.embed_positions"."""
        super().__init__()
        shape = (config.max_position_embeddings + POSITION_OFFSET, config.hidden_size)
        self.weight = weights.parameter(f"{prefix}.weight", shape)

    def forward(self, position_ids: Tensor) -> Tensor:
        """Int64 [tokens], -1 for padding, to [tokens, hidden]."""
        return F.embedding(position_ids + POSITION_OFFSET, self.weight)


class OPTAttention(nn.Module):
    """Self-attention of one layer: q, k and v as one product."""

    def __init__(
        self, prefix: str, config: OPTArchitecture, weights: Weights, layer_id: int
    ) -> None:
        """prefix: e.g. "model.decoder.layers.0.self_attn"."""
        super().__init__()
        self.heads = _heads(config, weights.group)
        self._layer = layer_id
        hidden, cut = config.hidden_size, self.heads.queries
        names = (f"{prefix}.{name}" for name in ("q_proj", "k_proj", "v_proj"))
        parts = tuple(ColumnPart(name, hidden, cut) for name in names)
        self.qkv_proj = AdapterColumnLinear(
            ColumnParallelLinear(hidden, parts, config.bias, weights),
            layer_id,
            (OPTProjection.Q, OPTProjection.K, OPTProjection.V),
        )
        out = RowParallelLinear(f"{prefix}.out_proj", (hidden, hidden), cut, config.bias, weights)
        self.out_proj = AdapterRowLinear(out, layer_id, OPTProjection.OUT)

    def forward(self, hidden_states: Tensor, context: StepContext) -> Tensor:
        """[tokens, hidden] to the same shape, equal on every rank."""
        qkv: Tensor = self.qkv_proj(hidden_states, context.adapter_data)
        attended = context.attend(self._layer, qkv, self.heads)
        out: Tensor = self.out_proj(attended.flatten(1), context.adapter_data)
        return out


def _feed_forward(
    prefix: str, config: OPTArchitecture, weights: Weights, layer_id: int
) -> PlainMLP:
    """fc1 and fc2 of one layer; prefix: the layer's."""
    size, hidden = config.intermediate_size, config.hidden_size
    cut = _inner(config, weights.group)
    part = ColumnPart(f"{prefix}.fc1", size, cut)
    up = ColumnParallelLinear(hidden, (part,), config.bias, weights)
    down = RowParallelLinear(f"{prefix}.fc2", (hidden, size), cut, config.bias, weights)
    return PlainMLP(
        AdapterColumnLinear(up, layer_id, (OPTProjection.FC1,)),
        AdapterRowLinear(down, layer_id, OPTProjection.FC2),
        config.activation,
    )


def _norm(prefix: str, config: OPTArchitecture, weights: Weights) -> LayerNorm:
    """A norm of the family's."""
    return LayerNorm(prefix, config.hidden_size, LAYER_NORM_EPS, weights, config.affine_norms)


class OPTDecoderLayer(nn.Module):
    """One decoder layer; 350m norms behind its sublayers, the others before."""

    def __init__(
        self, layer_id: int, prefix: str, config: OPTArchitecture, weights: Weights
    ) -> None:
        """prefix: the layer's, e.g. "model.decoder.layers.0"."""
        super().__init__()
        self._norm_first = config.norm_first
        self.self_attn = OPTAttention(f"{prefix}.self_attn", config, weights, layer_id)
        self.self_attn_layer_norm = _norm(f"{prefix}.self_attn_layer_norm", config, weights)
        self.mlp = _feed_forward(prefix, config, weights, layer_id)
        self.final_layer_norm = _norm(f"{prefix}.final_layer_norm", config, weights)

    def forward(self, hidden_states: Tensor, context: StepContext) -> Tensor:
        """The residual stream [tokens, hidden] to the same shape."""
        x = hidden_states
        if self._norm_first:
            x = x + self.self_attn(self.self_attn_layer_norm(x), context)
            out: Tensor = x + self.mlp(self.final_layer_norm(x), context.adapter_data)
            return out
        attended = self.self_attn_layer_norm(x + self.self_attn(x, context))
        out = self.final_layer_norm(attended + self.mlp(attended, context.adapter_data))
        return out


class OPTDecoder(nn.Module):
    """Positions, layers, last norm, and the projections from and to the embeddings' width."""

    def __init__(self, config: OPTArchitecture, weights: Weights) -> None:
        """Read everything but the head."""
        super().__init__()
        prefix = PEFT_PREFIX
        width, hidden = config.embedding_size, config.hidden_size
        self.embed_tokens = VocabParallelEmbedding(
            f"{prefix}.embed_tokens", config.vocab_size, width, weights
        )
        self.embed_positions = OPTLearnedPositionalEmbedding(
            f"{prefix}.embed_positions", config, weights
        )
        projected = width != hidden
        # Small, and needed whole on every rank: cutting them would cost an exchange each.
        self.project_in = self.project_out = None
        if projected:
            name, sizes = f"{prefix}.project_in", (width, hidden)
            self.project_in = _projection(name, sizes, weights, OPTProjection.PROJECT_IN)
            name, sizes = f"{prefix}.project_out", (hidden, width)
            self.project_out = _projection(name, sizes, weights, OPTProjection.PROJECT_OUT)
        self.layers = nn.ModuleList(
            OPTDecoderLayer(layer_id, f"{prefix}.layers.{layer_id}", config, weights)
            for layer_id in range(config.num_layers)
        )
        self.final_layer_norm = (
            _norm(f"{prefix}.final_layer_norm", config, weights) if config.last_norm else None
        )

    def forward(
        self,
        embeds: Tensor,
        position_ids: Tensor,
        context: StepContext,
        trace: list[Tensor] | None = None,
    ) -> Tensor:
        """[tokens, embedding_size] to the same shape, equal on every rank.

        trace: gets what enters each layer.
        """
        if self.project_in is not None:
            embeds = self.project_in(embeds, context.adapter_data)
        hidden = embeds + self.embed_positions(position_ids)
        for layer in self.layers:
            if trace is not None:
                trace.append(hidden)
            hidden = layer(hidden, context)
        if self.final_layer_norm is not None:
            hidden = self.final_layer_norm(hidden)
        if self.project_out is not None:
            hidden = self.project_out(hidden, context.adapter_data)
        out: Tensor = hidden
        return out


def _projection(
    name: str, sizes: tuple[int, int], weights: Weights, projection: int
) -> AdapterColumnLinear:
    """Between the widths of embeddings and layers, whole on every rank; sizes: (in, out)."""
    part = ColumnPart(name, sizes[1], whole(sizes[1]))
    base = ColumnParallelLinear(sizes[0], (part,), False, weights)
    return AdapterColumnLinear(base, 0, (projection,))


class OPTModel(nn.Module):
    """The decoder under its name in checkpoints."""

    def __init__(self, config: OPTArchitecture, weights: Weights) -> None:
        """Read everything but the head."""
        super().__init__()
        self.decoder = OPTDecoder(config, weights)

    def forward(
        self,
        embeds: Tensor,
        position_ids: Tensor,
        context: StepContext,
        trace: list[Tensor] | None = None,
    ) -> Tensor:
        """As `OPTDecoder.forward`."""
        out: Tensor = self.decoder(embeds, position_ids, context, trace)
        return out


class OPTForCausalLM(PagedAndPaddedBase):
    """The decoder and its head; a `PagedModel` and a `PaddedModel`."""

    def __init__(self, config: OPTArchitecture, weights: Weights) -> None:
        """Read this rank's share."""
        if config.tie_word_embeddings:
            weights.stand_in(f"{PEFT_PREFIX}.embed_tokens.weight", "lm_head.weight")
        model = OPTModel(config, weights)
        outline = ModelOutline(
            projections=opt_projections(config, weights.group),
            heads=_heads(config, weights.group),
            head_dim=config.head_dim,
            attention_scale=config.head_dim**-0.5,
            embedding=model.decoder.embed_tokens,
            head="lm_head",
            ends=EndNames(f"{PEFT_PREFIX}.embed_tokens", "lm_head"),
        )
        super().__init__(config, weights, outline)
        self.config = config
        self.use_cache = config.use_cache
        self.unread: tuple[str, ...] = ()
        self.model = model

    @classmethod
    def build(cls, config: OPTArchitecture, weights: Weights) -> "OPTForCausalLM":
        """The model of a checkpoint that holds nothing else."""
        return cls(config, weights)

    @property
    def embedding(self) -> VocabParallelEmbedding:
        """The tokens' embedding."""
        return self.model.decoder.embed_tokens

    @property
    def decoder(self) -> nn.Module:
        """The decoder without the head."""
        return self.model

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        head_mask: Tensor | None = None,
        past_key_values: Past | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> PaddedAnswer:
        """The padded interface; arguments as in `PaddedCall`, positions counted by the mask."""
        return padded_forward(
            self,
            PaddedCall(
                input_ids=input_ids,
                attention_mask=attention_mask,
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

    def positions(self, mask: Tensor, past_length: int) -> Tensor:
        """Each token's number among its row's unmasked ones; -1 for padding."""
        return (mask.cumsum(dim=1) * mask - 1)[:, past_length:]

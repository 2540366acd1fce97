"""Flash GPT-2: over a paged cache, tensor-parallel, with adapters.

The class names, constructors and the outer `forward` are LoRAX's. Weights are Conv1D's,
[in, out]; the fused c_attn is cut for each of q, k and v by heads, and so is its adapters' B.
"""

from dataclasses import replace
from enum import IntEnum

from torch import Tensor, nn
from torch.nn import functional as F

from configs.architectures.gpt2 import GPT2Architecture
from modeling.adapters.linear import AdapterColumnLinear, AdapterRowLinear
from modeling.adapters.projection import Projection
from modeling.adapters.vocabulary import EndNames
from modeling.layers.attention import split_heads
from modeling.layers.mlp import PlainMLP
from modeling.layers.norm import LayerNorm
from modeling.models.context import PagedContext
from modeling.models.paged_base import FlashBase, ModelOutline
from sharding.embedding import VocabParallelEmbedding
from sharding.group import TensorParallel
from sharding.linear import ColumnParallelLinear, ColumnPart, RowParallelLinear
from sharding.loader import Weights
from sharding.slicing import HeadCut, Segments, cut_heads, cut_width, whole

PEFT_PREFIX = "transformer"
"""Where PEFT finds the decoder, however the checkpoint's own names begin."""


class GPT2Projection(IntEnum):
    """The model's adaptable linear maps, in the order of `projections`."""

    C_ATTN = 0
    ATTN_C_PROJ = 1
    C_FC = 2
    MLP_C_PROJ = 3


def _heads(config: GPT2Architecture, group: TensorParallel) -> HeadCut:
    """This rank's attention heads."""
    return cut_heads(config.num_heads, config.num_heads, config.head_dim, group.rank, group.size)


def _inner(config: GPT2Architecture, group: TensorParallel) -> Segments:
    """This rank's part of the feed-forward's width."""
    return cut_width(config.intermediate_size, group.rank, group.size, "n_inner")


def fused_qkv(heads: Segments, size: int) -> Segments:
    """The outputs of a [q | k | v] matrix, `size` each, that belong to `heads` of one of them."""
    return tuple(
        (part * size + start, part * size + stop) for part in range(3) for start, stop in heads
    )


def gpt2_projections(config: GPT2Architecture, group: TensorParallel) -> tuple[Projection, ...]:
    """The adaptable linear maps with this rank's cuts."""
    heads, inner = _heads(config, group).queries, _inner(config, group)
    hidden, size = config.hidden_size, config.intermediate_size
    layer, count = f"{PEFT_PREFIX}.h.{{layer}}", config.num_layers
    fused = fused_qkv(heads, hidden)
    every = whole(hidden)
    found = (
        Projection("c_attn", f"{layer}.attn.c_attn", hidden, 3 * hidden, every, fused, count),
        Projection("attn.c_proj", f"{layer}.attn.c_proj", hidden, hidden, heads, every, count),
        Projection("c_fc", f"{layer}.mlp.c_fc", hidden, size, every, inner, count),
        Projection("mlp.c_proj", f"{layer}.mlp.c_proj", size, hidden, inner, every, count),
    )
    return tuple(replace(each, stored_transposed=True) for each in found)


class FlashGPT2Attention(nn.Module):
    """Self-attention of one layer."""

    def __init__(
        self, prefix: str, config: GPT2Architecture, weights: Weights, layer_id: int
    ) -> None:
        """prefix: e.g. "transformer.h.0.attn"."""
        super().__init__()
        self.heads = _heads(config, weights.group)
        self._layer = layer_id
        hidden = config.hidden_size
        part = ColumnPart(f"{prefix}.c_attn", 3 * hidden, fused_qkv(self.heads.queries, hidden))
        self.c_attn = AdapterColumnLinear(
            ColumnParallelLinear(hidden, (part,), True, weights, stored_transposed=True),
            layer_id,
            (GPT2Projection.C_ATTN,),
        )
        self.c_proj = AdapterRowLinear(
            RowParallelLinear(
                f"{prefix}.c_proj",
                (hidden, hidden),
                self.heads.queries,
                True,
                weights,
                stored_transposed=True,
            ),
            layer_id,
            GPT2Projection.ATTN_C_PROJ,
        )
        # A backend has one scale for all layers (flashinfer plans with it), so a layer's own
        # factor goes into the queries.
        self.query_scale = 1 / (layer_id + 1) if config.scale_attn_by_inverse_layer_idx else 1.0

    def forward(self, hidden_states: Tensor, context: PagedContext) -> Tensor:
        """[tokens, hidden] to the same shape; the step's k and v go to the cache."""
        qkv: Tensor = self.c_attn(hidden_states, context.adapter_data)
        parts = split_heads(qkv, self.heads)
        q = context.store(self._layer, parts, angles=None, overwrites=True)
        if self.query_scale != 1.0:
            q = q * self.query_scale
        attended = context.query(self._layer, q)
        out: Tensor = self.c_proj(attended.flatten(1), context.adapter_data)
        return out


class GPT2MLP(PlainMLP):
    """The family's feed-forward."""

    def __init__(
        self, prefix: str, config: GPT2Architecture, weights: Weights, layer_id: int
    ) -> None:
        """prefix: e.g. "transformer.h.0.mlp"."""
        size, hidden = config.intermediate_size, config.hidden_size
        cut = _inner(config, weights.group)
        part = ColumnPart(f"{prefix}.c_fc", size, cut)
        up = ColumnParallelLinear(hidden, (part,), True, weights, stored_transposed=True)
        down = RowParallelLinear(
            f"{prefix}.c_proj", (hidden, size), cut, True, weights, stored_transposed=True
        )
        super().__init__(
            AdapterColumnLinear(up, layer_id, (GPT2Projection.C_FC,)),
            AdapterRowLinear(down, layer_id, GPT2Projection.MLP_C_PROJ),
            config.activation,
        )


class GPT2Block(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(
        self, layer_id: int, prefix: str, config: GPT2Architecture, weights: Weights
    ) -> None:
        """prefix: the layer's, e.g. "transformer.h.0"."""
        super().__init__()
        size, eps = config.hidden_size, config.layer_norm_eps
        self.ln_1 = LayerNorm(f"{prefix}.ln_1", size, eps, weights)
        self.attn = FlashGPT2Attention(f"{prefix}.attn", config, weights, layer_id)
        self.ln_2 = LayerNorm(f"{prefix}.ln_2", size, eps, weights)
        self.mlp = GPT2MLP(f"{prefix}.mlp", config, weights, layer_id)

    def forward(self, hidden_states: Tensor, context: PagedContext) -> Tensor:
        """The residual stream [tokens, hidden] to the same shape."""
        x = hidden_states + self.attn(self.ln_1(hidden_states), context)
        out: Tensor = x + self.mlp(self.ln_2(x), context.adapter_data)
        return out


class FlashGPT2Model(nn.Module):
    """The decoder: token and position embeddings, blocks, last norm."""

    def __init__(self, prefix: str, config: GPT2Architecture, weights: Weights) -> None:
        """prefix: e.g. "transformer"; "" for a checkpoint of the decoder alone."""
        super().__init__()
        dot = f"{prefix}." if prefix else ""
        size = config.hidden_size
        self.wte = VocabParallelEmbedding(f"{dot}wte", config.vocab_size, size, weights)
        shape = (config.max_position_embeddings, size)
        self.wpe = weights.parameter(f"{dot}wpe.weight", shape)
        self.h = nn.ModuleList(
            GPT2Block(layer_id, f"{dot}h.{layer_id}", config, weights)
            for layer_id in range(config.num_layers)
        )
        self.ln_f = LayerNorm(f"{dot}ln_f", size, config.layer_norm_eps, weights)

    def forward(self, embeds: Tensor, position_ids: Tensor, context: PagedContext) -> Tensor:
        """Embedded tokens to normed hidden states, both [tokens, hidden], equal on every rank."""
        hidden = embeds + F.embedding(position_ids, self.wpe)
        for block in self.h:
            hidden = block(hidden, context)
        normed: Tensor = self.ln_f(hidden)
        return normed


class FlashGPT2ForCausalLM(FlashBase):
    """The decoder and its head; a `PagedModel`."""

    def __init__(self, prefix: str, config: GPT2Architecture, weights: Weights) -> None:
        """prefix: "" for a checkpoint of this model alone."""
        dot = f"{prefix}." if prefix else ""
        inner, head = f"{dot}transformer", f"{dot}lm_head"
        if config.tie_word_embeddings:
            weights.stand_in(f"{inner}.wte.weight", f"{head}.weight")
        transformer = FlashGPT2Model(inner, config, weights)
        outline = ModelOutline(
            projections=gpt2_projections(config, weights.group),
            heads=_heads(config, weights.group),
            head_dim=config.head_dim,
            attention_scale=config.head_dim**-0.5 if config.scale_attn_weights else 1.0,
            embedding=transformer.wte,
            head=head,
            ends=EndNames(f"{PEFT_PREFIX}.wte", "lm_head"),
        )
        super().__init__(config, weights, outline)
        self.config = config
        self.transformer = transformer
        # Old checkpoints hold the causal mask beside the weights.
        self.unread: tuple[str, ...] = (r".*\.attn\.(bias|masked_bias)",)

    @classmethod
    def build(cls, config: GPT2Architecture, weights: Weights) -> "FlashGPT2ForCausalLM":
        """The model of a checkpoint that holds nothing else."""
        return cls("", config, weights)

    @property
    def embedding(self) -> VocabParallelEmbedding:
        """The tokens' embedding."""
        return self.transformer.wte

    @property
    def decoder(self) -> nn.Module:
        """The decoder without the head."""
        return self.transformer

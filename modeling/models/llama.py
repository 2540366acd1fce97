"""Flash Llama: the Llama family over a paged cache, tensor-parallel, with adapters.

The class names and signatures are LoRAX's. `Architecture` says which member of the family it
is; nothing here asks for a name.
"""

from collections.abc import Callable
from enum import IntEnum

import torch
from torch import Tensor, nn

from configs.architectures.llama import Architecture
from modeling.adapters.kernels.base import AdapterData
from modeling.adapters.linear import AdapterColumnLinear, AdapterRowLinear
from modeling.adapters.projection import Projection
from modeling.attention.base import AttentionStep
from modeling.attention.kv_cache import LayerCache
from modeling.layers.attention import rotate_and_store
from modeling.layers.mlp import GatedMLP
from modeling.layers.norm import RMSNorm
from modeling.layers.rotary import Rotary
from sharding.embedding import ParallelHead, VocabParallelEmbedding
from sharding.group import TensorParallel
from sharding.linear import ColumnParallelLinear, ColumnPart, RowParallelLinear
from sharding.loader import Weights
from sharding.slicing import HeadCut, cut_heads, even_cut, whole

LlamaConfig = Architecture


class Adaptable(IntEnum):
    """The model's adaptable linear maps, in the order of `projections`."""

    Q = 0
    K = 1
    V = 2
    O = 3  # noqa: E741
    GATE = 4
    UP = 5
    DOWN = 6


def _heads(config: LlamaConfig, group: TensorParallel) -> HeadCut:
    """This rank's attention heads."""
    return cut_heads(config.num_heads, config.num_kv_heads, config.head_dim, group.rank, group.size)


def llama_projections(
    prefix: str, config: LlamaConfig, group: TensorParallel
) -> tuple[Projection, ...]:
    """The adaptable linear maps with this rank's cuts; prefix: the decoder's, e.g. "model"."""
    heads = _heads(config, group)
    inner = even_cut(config.intermediate_size, group.rank, group.size, "intermediate_size")
    hidden = config.hidden_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention, mlp = f"{prefix}.layers.{{layer}}.self_attn", f"{prefix}.layers.{{layer}}.mlp"

    def column(parent: str, name: str, out: int, cut: tuple[tuple[int, int], ...]) -> Projection:
        return Projection(
            name, f"{parent}.{name}", hidden, out, whole(hidden), cut, config.num_layers
        )

    def row(parent: str, name: str, size: int, cut: tuple[tuple[int, int], ...]) -> Projection:
        return Projection(
            name, f"{parent}.{name}", size, hidden, cut, whole(hidden), config.num_layers
        )

    return (
        column(attention, "q_proj", queries, heads.queries),
        column(attention, "k_proj", keys, heads.keys),
        column(attention, "v_proj", keys, heads.keys),
        row(attention, "o_proj", queries, heads.queries),
        column(mlp, "gate_proj", config.intermediate_size, inner),
        column(mlp, "up_proj", config.intermediate_size, inner),
        row(mlp, "down_proj", config.intermediate_size, inner),
    )


class LlamaRMSNorm(RMSNorm):
    """The family's norm; forward(x, residual) returns (normed, x + residual)."""


class FlashLlamaAttention(nn.Module):
    """Self-attention of one layer: fused q, k, v, rotation, paged attention, output."""

    def __init__(self, prefix: str, config: LlamaConfig, weights: Weights, layer_id: int) -> None:
        """prefix: e.g. "model.layers.0.self_attn"."""
        super().__init__()
        self.heads = _heads(config, weights.group)
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = (
            ColumnPart(f"{prefix}.q_proj", queries, self.heads.queries),
            ColumnPart(f"{prefix}.k_proj", keys, self.heads.keys),
            ColumnPart(f"{prefix}.v_proj", keys, self.heads.keys),
        )
        bias = config.attention_bias
        self.qkv_proj = AdapterColumnLinear(
            ColumnParallelLinear(config.hidden_size, parts, bias, weights),
            layer_id,
            (Adaptable.Q, Adaptable.K, Adaptable.V),
        )
        shape = (config.hidden_size, queries)
        self.o_proj = AdapterRowLinear(
            RowParallelLinear(f"{prefix}.o_proj", shape, self.heads.queries, bias, weights),
            layer_id,
            Adaptable.O,
        )

    def forward(
        self,
        hidden_states: Tensor,
        cos: Tensor,
        sin: Tensor,
        cu_seqlen_prefill: Tensor,
        kv_cache: LayerCache,
        block_tables: Tensor,
        slots: Tensor,
        seqlen: AttentionStep,
        max_s: int,
        adapter_data: AdapterData | None,
        prefill_cache_indices: Tensor | None = None,
    ) -> Tensor:
        """[tokens, hidden] to the same shape; k and v of the step go to `slots` on the way."""
        qkv: Tensor = self.qkv_proj(hidden_states, adapter_data)
        q = rotate_and_store(qkv, self.heads, (cos, sin), kv_cache, slots, prefill_cache_indices)
        attended = seqlen.backend.forward(q, kv_cache, cu_seqlen_prefill, block_tables, seqlen)
        out: Tensor = self.o_proj(attended.flatten(1), adapter_data)
        return out


class LlamaMLP(GatedMLP):
    """The family's gated feed-forward."""

    def __init__(self, prefix: str, config: LlamaConfig, weights: Weights, layer_id: int) -> None:
        """prefix: e.g. "model.layers.0.mlp"."""
        size, hidden = config.intermediate_size, config.hidden_size
        cut = even_cut(size, weights.group.rank, weights.group.size, "intermediate_size")
        parts = (
            ColumnPart(f"{prefix}.gate_proj", size, cut),
            ColumnPart(f"{prefix}.up_proj", size, cut),
        )
        gate_up = ColumnParallelLinear(hidden, parts, config.mlp_bias, weights)
        down = RowParallelLinear(
            f"{prefix}.down_proj", (hidden, size), cut, config.mlp_bias, weights
        )
        super().__init__(
            AdapterColumnLinear(gate_up, layer_id, (Adaptable.GATE, Adaptable.UP)),
            AdapterRowLinear(down, layer_id, Adaptable.DOWN),
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

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        cu_seqlen_prefill: Tensor,
        kv_cache: LayerCache,
        block_tables: Tensor,
        slots: Tensor,
        seqlen: AttentionStep,
        max_s: int,
        adapter_data: AdapterData | None,
        prefill_cache_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(what the layer adds last, the residual stream before it), both [tokens, hidden]."""
        normed, residual = self.input_layernorm(hidden_states, residual)
        attended = self.self_attn(
            normed,
            cos,
            sin,
            cu_seqlen_prefill,
            kv_cache,
            block_tables,
            slots,
            seqlen,
            max_s,
            adapter_data,
            prefill_cache_indices,
        )
        normed, stream = self.post_attention_layernorm(attended, residual)
        return self.mlp(normed, adapter_data), stream


CreateLayer = Callable[[int, str, LlamaConfig, Weights], nn.Module]
"""(layer_id, prefix, config, weights) to a layer with FlashLlamaLayer's forward."""


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
    ) -> Tensor:
        """[tokens] ids to normed hidden states [tokens, hidden], equal on every rank."""
        hidden: Tensor = self.embed_tokens(input_ids)
        residual: Tensor | None = None
        cos, sin = self._rotary.angles(position_ids)
        for layer, cache in zip(self.layers, kv_cache, strict=True):
            hidden, residual = layer(
                hidden,
                residual,
                cos,
                sin,
                cu_seqlen_prefill,
                cache,
                block_tables,
                slots,
                seqlen,
                max_s,
                adapter_data,
                prefill_cache_indices,
            )
        normed: Tensor = self.norm(hidden, residual)[0]
        return normed


class FlashLlamaForCausalLM(nn.Module):
    """The decoder and its head; a `PagedModel`."""

    def __init__(
        self,
        prefix: str,
        config: LlamaConfig,
        weights: Weights,
        create_layer_fn: CreateLayer | None = None,
    ) -> None:
        """prefix: "" for a checkpoint of this model alone."""
        super().__init__()
        inner, head = (f"{prefix}.model", f"{prefix}.lm_head") if prefix else ("model", "lm_head")
        heads = _heads(config, weights.group)
        self.config = config
        self.projections = llama_projections(inner, config, weights.group)
        self.vocab_size = config.vocab_size
        self.num_layers = config.num_layers
        self.num_heads, self.num_kv_heads = heads.num_heads, heads.num_kv_heads
        self.head_dim = config.head_dim
        self.attention_scale = config.head_dim**-0.5
        self.dtype: torch.dtype = weights.dtype
        self.device: torch.device = weights.device
        self.model = FlashLlamaModel(inner, config, weights, create_layer_fn)
        self.unread = (
            r".*\.rotary_emb\.inv_freq",
            *([head + r"\.weight"] if config.tie_word_embeddings else []),
        )
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelHead(head, config.vocab_size, config.hidden_size, weights, tied)

    @classmethod
    def build(cls, config: LlamaConfig, weights: Weights) -> "FlashLlamaForCausalLM":
        """The model of a checkpoint that holds nothing else."""
        return cls("", config, weights)

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
        if cross_attention_states is not None:
            raise ValueError("cross_attention_states: this model has no cross-attention layers")
        hidden: Tensor = self.model(
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
        if lm_head_indices is not None:
            hidden = hidden[lm_head_indices]
        if skip_lm_head:
            return hidden, None
        return self.lm_head(hidden), None

    paged = forward
    """The engine's way in; this family has no other."""

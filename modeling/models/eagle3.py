"""EAGLE-3 heads (arXiv:2503.01840): one decoder layer guesses on from the target's inner states.

    f_p = W [a_p; b_p; c_p]             a, b, c: the target's states behind three of its layers
    g_p = layer(embed(t_{p+1}), f_p)    attends to the entries of positions 0 .. p
    guess of t_{p+2} = d2t(head(norm(g_p)))

Entries of guessed tokens take g of the position before in place of f. The layer is a Llama's, and
its attention reads [norm(embedding); norm(f)]. Names in the files are those of the authors
(`midlayer.`) or of speculators (`layers.0.`).
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configs.architectures.eagle3 import Eagle3Architecture, load_eagle3
from configs.architectures.rope import POSITIONS_PER_SET
from modeling.attention.base import AttentionSpec
from modeling.layers.activation import ACTIVATIONS
from modeling.layers.angles import Angles
from modeling.layers.attention import rotate_and_store, split_heads
from modeling.layers.norm import RMSNorm
from modeling.layers.rotary import Rotary
from modeling.models.base import PagedModel
from modeling.models.draft_layer import DraftStep
from sharding.checkpoint import CheckpointError, open_checkpoint
from sharding.embedding import ParallelHead, VocabParallelEmbedding
from sharding.group import TensorParallel
from sharding.linear import ColumnParallelLinear, ColumnPart, RowParallelLinear
from sharding.loader import Weights
from sharding.slicing import cut_heads, cut_width

LAYERS = ("model.midlayer", "model.layers.0")
"""The layer's names; files may lack the first part."""


class Eagle3Layer(nn.Module):
    """The decoder layer, on one rank."""

    def __init__(self, prefix: str, config: Eagle3Architecture, weights: Weights) -> None:
        """prefix: e.g. "model.midlayer"."""
        super().__init__()
        group, size = weights.group, config.hidden_size
        self.heads = heads = cut_heads(
            config.num_heads, config.num_kv_heads, config.head_dim, group.rank, group.size
        )
        own = f"{prefix}.self_attn"
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = (
            ColumnPart(f"{own}.q_proj", queries, heads.queries),
            ColumnPart(f"{own}.k_proj", keys, heads.keys),
            ColumnPart(f"{own}.v_proj", keys, heads.keys),
        )
        has_bias = weights.has(f"{own}.q_proj.bias")
        self.qkv_proj = ColumnParallelLinear(2 * size, parts, has_bias, weights)
        has_bias = weights.has(f"{own}.o_proj.bias")
        self.o_proj = RowParallelLinear(
            f"{own}.o_proj", (size, queries), heads.queries, has_bias, weights
        )
        inner, mlp = config.intermediate_size, f"{prefix}.mlp"
        cut = cut_width(inner, group.rank, group.size, "intermediate_size")
        halves = tuple(ColumnPart(f"{mlp}.{name}_proj", inner, cut) for name in ("gate", "up"))
        self.gate_up_proj = ColumnParallelLinear(size, halves, False, weights)
        self.down_proj = RowParallelLinear(f"{mlp}.down_proj", (size, inner), cut, False, weights)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            RMSNorm(f"{prefix}.{name}", size, config.rms_norm_eps, weights)
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        )
        self._act = ACTIVATIONS[config.hidden_act]
        self._normed_first = config.norm_before_residual

    def forward(self, embeds: Tensor, states: Tensor, angles: Angles, step: DraftStep) -> Tensor:
        """[tokens, hidden] both, to g of the same shape; keys and values go to the cache."""
        normed = self.hidden_norm(states)[0]
        stream = normed if self._normed_first else states
        read = torch.cat((self.input_layernorm(embeds)[0], normed), dim=-1)
        parts = split_heads(self.qkv_proj(read), self.heads)
        q = rotate_and_store(parts, angles, step.cache, step.slots, None, overwrites=True)
        attended = step.attention.backend.forward(
            q, step.cache, step.cu_seqlens, step.tables, step.attention
        )
        normed, stream = self.post_attention_layernorm(self.o_proj(attended.flatten(1)), stream)
        gate, up = self.gate_up_proj(normed).chunk(2, dim=-1)
        out: Tensor = stream + self.down_proj(self._act(gate) * up)
        return out


class Eagle3Heads(nn.Module):
    """The heads of a target model on one rank; a `DraftLayer`.

    layers: of the target, read behind each.
    """

    def __init__(self, config: Eagle3Architecture, model: PagedModel, weights: Weights) -> None:
        """model: the target."""
        super().__init__()
        self.config = config
        self.layers = config.layers_of(model.num_layers)
        size, vocab_size = config.hidden_size, model.vocab_size
        prefix = next(
            (each for each in LAYERS if weights.has(f"{each}.hidden_norm.weight")), LAYERS[0]
        )
        self.layer = Eagle3Layer(prefix, config, weights)
        self.norm = RMSNorm("model.norm", size, config.rms_norm_eps, weights)
        self.fc = weights.parameter("model.fc.weight", (size, len(self.layers) * model.width))
        name = "model.embed_tokens"
        own = weights.has(f"{name}.weight")
        embedding = VocabParallelEmbedding(name, vocab_size, size, weights) if own else None
        # In a tuple what is the target's is no module of this one.
        self._embedding = (embedding or model.embedding,)
        self.vocab_size = vocab_size
        self.width, self.states_width = size, self.fc.shape[1]
        self.dtype, self.device = weights.dtype, weights.device
        count = config.draft_vocab_size or vocab_size
        self._model = (model,)
        self.lm_head: ParallelHead | None = None
        if count != vocab_size or weights.has("lm_head.weight"):
            self.lm_head = ParallelHead("lm_head", count, size, weights)
        self._targets: Tensor | None = None
        if weights.has("d2t"):
            offsets = weights.read_stored("d2t", (count,)).to(torch.int64)
            self._targets = torch.arange(count, device=offsets.device) + offsets
        elif count != vocab_size:
            raise CheckpointError("no tensor 'd2t', and fewer tokens are guessed than there are")
        weights.leave("t2d")
        self._rotary = Rotary(config.rope, config.head_dim, weights.dtype, weights.device)

    @property
    def sources(self) -> Sequence[nn.Module]:
        """The target's layers; see `DraftLayer`."""
        return [self._model[0].decoder_layers[index] for index in self.layers]

    def attention_spec(self, page_size: int) -> AttentionSpec:
        """What a backend must serve; page_size: tokens of a page."""
        return AttentionSpec(
            num_heads=self.layer.heads.num_heads,
            num_kv_heads=self.layer.heads.num_kv_heads,
            head_dim=self.config.head_dim,
            scale=self.config.head_dim**-0.5,
            page_size=page_size,
            dtype=self.dtype,
            device=self.device,
        )

    def from_target(self, inner: Tensor) -> Tensor:
        """The target's states behind `layers`, [tokens, layers * width], to f [tokens, hidden]."""
        return F.linear(inner, self.fc)

    def forward(
        self, input_ids: Tensor, positions: Tensor, states: Tensor, step: DraftStep
    ) -> Tensor:
        """Embed tokens int64 [tokens] beside f or g [tokens, hidden]; returns g.

        positions: int64 [tokens], of the states; rope sets are the target's own, and left out.
        """
        angles = self._rotary.angles(positions % POSITIONS_PER_SET)
        embeds: Tensor = self._embedding[0](input_ids)
        out: Tensor = self.layer(embeds, states, angles, step)
        return out

    def logits(self, g: Tensor) -> Tensor:
        """[n, hidden] to [n, the target's vocab_size]; -inf for tokens that are never guessed."""
        normed = self.norm(g)[0]
        if self.lm_head is None:
            return self._model[0].head(normed, None)
        logits: Tensor = self.lm_head(normed)
        if self._targets is None:
            return logits
        whole = logits.new_full((len(logits), self.vocab_size), float("-inf"))
        whole[:, self._targets] = logits
        return whole


def load_eagle3_heads(
    folder: Path, model: PagedModel, group: TensorParallel, allow_pickle: bool
) -> Eagle3Heads:
    """Read this rank's part of the heads in a folder; ValueError says what is wrong with it."""
    config = load_eagle3(folder)
    source = open_checkpoint(folder, allow_pickle)
    weights = Weights(source, group, model.dtype, model.device)
    try:
        heads = Eagle3Heads(config, model, weights)
        weights.finish((r".*\.rotary_emb\.inv_freq",))
    except CheckpointError as error:
        raise CheckpointError(
            f"{folder}: {error}. The model is {model.width} wide with {model.vocab_size} tokens: "
            "are these heads for another model?"
        ) from error
    return heads

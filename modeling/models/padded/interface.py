"""The padded interface: transformers' own forward over the layers that the engine runs.

No adapters come in here, and rows are padded instead of packed; logits, loss, cache, hidden
states and attention weights are those of the model in transformers.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from modeling.attention.padded import (
    GrowingCache,
    KeyValueCache,
    PaddedAttention,
    Pairs,
    local_head_mask,
)
from modeling.layers.angles import Angles
from modeling.layers.attention import rotate_heads, split_heads
from modeling.models.context import StepContext
from sharding.group import TensorParallel
from sharding.slicing import HeadCut

if TYPE_CHECKING:
    from transformers.modeling_outputs import CausalLMOutputWithPast

Past: TypeAlias = KeyValueCache | Pairs
"""past_key_values: a transformers `Cache`, or (keys, values) pairs with this rank's heads."""

PaddedAnswer: TypeAlias = "CausalLMOutputWithPast | tuple[Any, ...]"

IGNORED_LABEL = -100
"""transformers' label of a token that the loss leaves out."""


@dataclass(frozen=True)
class PaddedCall:
    """The arguments of one forward, named as in transformers; None is its default.

    input_ids: int64 [batch, n], or inputs_embeds [batch, n, width] instead.
    attention_mask: [batch, cached + n positions]. position_ids, labels: int64 [batch, n].
    head_mask: [heads] or [layers, heads], of all ranks.
    """

    input_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    head_mask: Tensor | None = None
    past_key_values: Past | None = None
    inputs_embeds: Tensor | None = None
    labels: Tensor | None = None
    use_cache: bool | None = None
    output_attentions: bool | None = None
    output_hidden_states: bool | None = None
    return_dict: bool | None = None


@dataclass(frozen=True)
class PaddedContext:
    """A padded forward as layers see it: a `StepContext` of rows of one length, no adapters."""

    attention: PaddedAttention
    adapter_data: None = None

    def attend(
        self, layer: int, qkv: Tensor, heads: HeadCut, angles: Angles | None = None
    ) -> Tensor:
        """Append k and v to the growing cache and attend over all of it; see `StepContext`."""
        return self.attention.attend(layer, *rotate_heads(split_heads(qkv, heads), angles))


class PaddedModel(Protocol):
    """What a padded forward needs of a model, beyond its sizes.

    use_cache: whether a call that does not say gets a cache back.
    """

    group: TensorParallel
    num_layers: int
    num_heads: int
    attention_scale: float
    use_cache: bool

    def embed(self, input_ids: Tensor) -> Tensor:
        """Int64 [tokens] to what inputs_embeds are, [tokens, width]."""
        ...

    def positions(self, mask: Tensor, past_length: int) -> Tensor:
        """int64 [batch or 1, n], where the call names none; mask: [batch, past_length + n]."""
        ...

    def decode(
        self,
        embeds: Tensor,
        position_ids: Tensor,
        context: StepContext,
        trace: list[Tensor] | None,
    ) -> Tensor:
        """[tokens, width] to what the head reads; `trace` gets what enters each layer."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[tokens, ...] to [tokens, vocab_size]."""
        ...


def padded_forward(model: PaddedModel, call: PaddedCall) -> PaddedAnswer:
    """Run one padded forward; ValueError names an argument that does not fit."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    embeds = _embeds(model, call)
    batch, num_queries = embeds.shape[:2]
    cache = GrowingCache(call.past_key_values)
    mask = _mask(call.attention_mask, (batch, cache.length + num_queries), embeds.device)
    head_mask = local_head_mask(call.head_mask, model.num_layers, model.num_heads, model.group)
    attention = PaddedAttention(
        mask, cache, model.attention_scale, model.group, head_mask, bool(call.output_attentions)
    )
    positions = call.position_ids
    if positions is None:
        positions = model.positions(mask, cache.length)
    trace: list[Tensor] | None = [] if call.output_hidden_states else None
    flat = positions.expand(batch, num_queries).flatten()
    last = model.decode(embeds.flatten(0, 1), flat, PaddedContext(attention), trace)
    logits = _rows(model.logits(last), batch)
    keeps = model.use_cache if call.use_cache is None else call.use_cache
    # transformers types its fields for no kind of cache but its own, and not in all versions.
    kind: Any = CausalLMOutputWithPast
    output: CausalLMOutputWithPast = kind(
        loss=None if call.labels is None else _loss(logits, call.labels),
        logits=logits,
        past_key_values=cache.result if keeps else None,
        hidden_states=_unpacked(trace, last, batch),
        attentions=None if attention.weights is None else tuple(attention.weights),
    )
    return output if call.return_dict in (None, True) else output.to_tuple()


def _embeds(model: PaddedModel, call: PaddedCall) -> Tensor:
    """[batch, n, width] of the tokens, or as given."""
    if call.inputs_embeds is not None and call.input_ids is None:
        return call.inputs_embeds
    if call.input_ids is None or call.inputs_embeds is not None:
        raise ValueError("exactly one of input_ids and inputs_embeds must be given")
    return _rows(model.embed(call.input_ids.flatten()), len(call.input_ids))


def _mask(given: Tensor | None, shape: tuple[int, int], device: torch.device) -> Tensor:
    """int64 [batch, positions]: 1 for a token, 0 for padding."""
    if given is None:
        return torch.ones(shape, dtype=torch.int64, device=device)
    if tuple(given.shape) != shape:
        raise ValueError(
            f"attention_mask has shape {tuple(given.shape)}, it must be {shape}: [batch, cached "
            "and new positions]"
        )
    return given.to(torch.int64)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in float32 of each next token's label."""
    target = labels[:, 1:].flatten().to(logits.device)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), target, ignore_index=IGNORED_LABEL)


def _unpacked(trace: list[Tensor] | None, last: Tensor, batch: int) -> Any:
    """One [batch, n, width] for what enters each layer, and what the head reads."""
    if trace is None:
        return None
    return tuple(_rows(hidden, batch) for hidden in (*trace, last))


def _rows(packed: Tensor, batch: int) -> Tensor:
    """[batch * n, width] to [batch, n, width]."""
    return packed.view(batch, -1, packed.shape[-1])

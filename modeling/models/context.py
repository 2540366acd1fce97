"""What every layer of one forward reads beside its hidden states: attention and adapters."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from modeling.adapters.product import AdapterData
from modeling.attention.base import AttentionStep
from modeling.attention.kv_cache import LayerCache
from modeling.attention.sparse import SparseStep, TokenIndex
from modeling.layers.angles import Angles
from modeling.layers.attention import rotate_and_store, split_heads
from modeling.layers.head_norms import HeadNorms
from sharding.slicing import HeadCut


class StepContext(Protocol):
    """One forward as layers see it, over the paged cache or over a padded one."""

    @property
    def adapter_data(self) -> AdapterData | None:
        """The adapters of the step's tokens; None when all of them are the base model's."""
        ...

    def attend(
        self, layer: int, qkv: Tensor, heads: HeadCut, angles: Angles | None = None
    ) -> Tensor:
        """Attention of a layer, [tokens, heads, head_dim]; its new k and v go to the cache.

        qkv: the layer's fused product [tokens, (heads + 2 * kv_heads) * head_dim], q first.
        angles: (cos, sin) that rotate q and k; None for models without rotation.
        """
        ...


@dataclass(frozen=True)
class GroupStep:
    """What the layers of one KV group read in a step.

    cu_seqlens: int32 [rows + 1], where each row's tokens start.
    block_tables: int32 [rows, max_blocks].
    slots: int64 [tokens], page * page_size + offset where each token's k and v go.
    attention: the rows' lengths and plan, from the attention backend's `prepare`.
    """

    cu_seqlens: Tensor
    block_tables: Tensor
    slots: Tensor
    attention: AttentionStep


@dataclass(frozen=True)
class StateRows:
    """Rows of a step that recurrent layers compute together, as their states are.

    tokens: theirs among the step's. single: whether the rows are of one token each; else it is one
    row. begins: whether they begin at their first position, so that there is no state yet.
    slots: int64 [rows], their batch slots; None where no state is kept. adapter_data: of these
    tokens, None for the base model alone. kept: the number by which a copy of the state behind the
    row is kept; -1: none is.
    """

    tokens: slice
    single: bool
    begins: bool
    slots: Tensor | None
    adapter_data: AdapterData | None = None
    kept: int = -1


@dataclass(frozen=True)
class PagedContext:
    """One step of the engine: rows packed one after the other, keys and values in pages.

    Layers name themselves by index alone, so only the methods here know which of them share one
    set of tables and slots. Adapters are found by token and not by row.

    caches: one a layer; each knows its KV group.
    groups: the KV groups.
    adapter_data: the adapters of the step's tokens, None for the base model alone.
    stored: int64 [n], the tokens that store their k and v (None: all); the others' are in the
        cache already.
    state_rows: the step's rows as recurrent layers compute them; () for models without.
    """

    caches: list[LayerCache]
    groups: tuple[GroupStep, ...]
    adapter_data: AdapterData | None = None
    stored: Tensor | None = None
    state_rows: tuple[StateRows, ...] = ()

    def store(
        self,
        layer: int,
        parts: Sequence[Tensor],
        angles: Angles | None,
        norms: HeadNorms | None = None,
        overwrites: bool = False,
    ) -> Tensor:
        """Norm and rotate q and k, put k and v into the layer's pages, return q.

        parts: q, k, v [tokens, heads or kv_heads, head_dim]. norms: of heads, before the rotation.
        overwrites: whether q may be.
        """
        cache = self.caches[layer]
        slots = self.groups[cache.group].slots
        return rotate_and_store(parts, angles, cache, slots, self.stored, norms, overwrites)

    def query(
        self,
        layer: int,
        q: Tensor,
        window: int | None = None,
        sinks: Tensor | None = None,
        index: TokenIndex | None = None,
    ) -> Tensor:
        """Attention of q [tokens, heads, head_dim] over what the layer's pages hold.

        window: how many of the last tokens this layer sees; None: all. sinks: see
        `AttentionSpec`. index: of a layer that has one.
        """
        cache = self.caches[layer]
        group = self.groups[cache.group]
        step = group.attention
        if isinstance(step, SparseStep):
            step = replace(step, index=index)
        return step.backend.forward(
            q, cache, group.cu_seqlens, group.block_tables, step, window, sinks
        )

    def attend(
        self, layer: int, qkv: Tensor, heads: HeadCut, angles: Angles | None = None
    ) -> Tensor:
        """Store the step's k and v, then attend over them too; see `StepContext`."""
        parts = split_heads(qkv, heads)
        return self.query(layer, self.store(layer, parts, angles, overwrites=True))

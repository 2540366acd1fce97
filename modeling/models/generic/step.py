"""The step that transformers' modules compute: what their attention and our linear layers read.

transformers hands no argument of ours down to its layers, at least not in all families. So the
modules of one model share one `CurrentStep`, which is set around each forward.
"""

import logging
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from modeling.adapters.product import AdapterData, ExpertAdapters, ExpertDeltas, TokenGroup
from modeling.adapters.vocabulary import VocabularyAdapters
from modeling.attention.sparse import TokenIndex
from modeling.layers.angles import Angles
from modeling.layers.head_norms import HeadNorms
from modeling.models.base import AttentionLayer
from modeling.models.context import StateRows
from modeling.models.generic.norms import FusedRMSNorm
from modeling.models.generic.rotations import (
    Function,
    RotationForm,
    rotation_form,
    split_arguments,
)
from modeling.models.generic.windows import MARKED, marked_window

logger = logging.getLogger("loray.modeling")

Kept = TypeVar("Kept")

ATTENTION = "loray"
"""The name under which transformers' modules find `attend`."""


@dataclass(frozen=True)
class Heads:
    """What a layer attends with, [tokens, heads or kv_heads, head_dim] each.

    sinks: float [heads], see `AttentionSpec`; None for a layer without. angles: by which q and k
    are still to be rotated; None: they are. norms: what the heads of q, k and v are still to be
    normed by, before that; None: they are. index: by which tokens choose the positions that they
    see, the last head has its keys; None: they see all.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    angles: tuple[Angles | None, Angles | None] = (None, None)
    norms: Sequence[FusedRMSNorm | None] = (None, None, None)
    index: TokenIndex | None = None

    @property
    def head_norms(self) -> HeadNorms | None:
        """The norms of q and k, and of v if it has one; None where q or k has none."""
        found = [norm for norm in self.norms if norm is not None]
        if len(found) < 2 or None in self.norms[:2]:
            return None
        return HeadNorms(tuple(e.weight for e in found), tuple(e.eps for e in found))

    def normed(self) -> "Heads":
        """The same with the norms computed."""
        parts = zip((self.q, self.k, self.v), self.norms, strict=True)
        q, k, v = (part if norm is None else norm.computed(part) for part, norm in parts)
        return replace(self, q=q, k=k, v=v, norms=(None, None, None))


class LayerAttention(Protocol):
    """Attention of the layers of one forward."""

    def attend(self, layer: int, heads: Heads, form: AttentionLayer) -> Tensor:
        """Return [tokens, heads, head_dim]."""
        ...


class LatentAttention(Protocol):
    """Attention of a layer over cached latents (`latents.py`)."""

    def attend(self, step: "CurrentStep", layer: int, heads: Heads, form: AttentionLayer) -> Tensor:
        """Return [tokens, heads, values]."""
        ...


class RotationLostError(ValueError):
    """A layer changes q or k behind their norm or rotation, which was left to its attention."""


class CurrentStep:
    """What is computed now.

    adapter_data: None for the base model. state_rows: the rows as recurrent layers compute them.
    part_tokens: how many tokens a recurrent layer computes now; 0 outside of any.
    rotates_at_once: heads are rotated when layers call for it, which do more with them then.
    """

    rotates_at_once = False
    adapter_data: AdapterData | None = None
    state_rows: tuple[StateRows, ...] = ()
    part_tokens = 0

    def __init__(self) -> None:
        self._attention: LayerAttention | None = None
        self._rotations: list[tuple[Tensor, Angles]] = []
        self._norms: list[tuple[Tensor, FusedRMSNorm]] = []
        self._value_norms: list[tuple[Tensor, FusedRMSNorm]] = []
        self._angles: dict[tuple[int, RotationForm], tuple[Tensor, Angles]] = {}
        self._results: dict[Hashable, tuple[Sequence[Any], Any]] = {}
        self._rotation_forms: dict[Any, RotationForm | None] = {}

    @property
    def routed(self) -> Sequence[TokenGroup]:
        """The tokens of each adapter that changes experts or routers."""
        data = self.adapter_data
        return data.routed if isinstance(data, VocabularyAdapters) else ()

    @property
    def expert_deltas(self) -> ExpertDeltas | None:
        """The step's adapters of experts, where kernels multiply them."""
        data = self.adapter_data
        return data.expert_deltas if isinstance(data, ExpertAdapters) else None

    @contextmanager
    def using(
        self,
        attention: LayerAttention | None,
        adapter_data: AdapterData | None,
        state_rows: tuple[StateRows, ...] = (),
    ) -> Iterator[None]:
        """Compute with these meanwhile; attention: None where no layer is called."""
        self._attention, self.adapter_data = attention, adapter_data
        self.state_rows = state_rows
        try:
            yield
        finally:
            self._attention = self.adapter_data = None
            self.state_rows = ()
            for kept in (self._rotations, self._norms, self._value_norms):
                kept.clear()
            self._angles.clear()
            self._results.clear()

    @contextmanager
    def adapted_by(self, adapter_data: AdapterData | None, tokens: int) -> Iterator[None]:
        """Compute so many of the step's tokens meanwhile, with adapters of their own."""
        before, self.adapter_data = self.adapter_data, adapter_data
        self.part_tokens = tokens
        try:
            yield
        finally:
            self.adapter_data = before
            self.part_tokens = 0

    def attend(
        self, layer: int, given: Sequence[Tensor], heads: Heads, form: AttentionLayer
    ) -> Tensor:
        """Attend; given: q, k and v as the layer gave them, to see what is left to do with them."""
        q, k, v = given
        angles = (_taken(self._rotations, q), _taken(self._rotations, k))
        norms = (_taken(self._norms, q), _taken(self._norms, k), _taken(self._value_norms, v))
        if self._rotations or self._norms or self._value_norms:
            raise RotationLostError(f"layer {layer} changes what it normed or rotated")
        return self.attend_whole(layer, replace(heads, angles=angles, norms=norms), form)

    def take_rotations(self) -> Angles | None:
        """Return the angles of what was rotated, for a layer that puts its q and k together."""
        found = {id(angles): angles for _, angles in self._rotations}
        if len(found) > 1 or self._norms or self._value_norms:
            raise RotationLostError("a layer norms, or rotates in several ways")
        self._rotations.clear()
        return next(iter(found.values()), None)

    def attend_whole(self, layer: int, heads: Heads, form: AttentionLayer) -> Tensor:
        """Attend with heads that say themselves what is left to do with them."""
        assert self._attention is not None, "a layer is called outside of any step"
        return self._attention.attend(layer, heads, form)

    def defer_norm(self, norm: FusedRMSNorm, x: Tensor) -> None:
        """Write down that x, of q, k or v, stands for its norm, for `attend`."""
        if norm.is_of_values:
            # Keys of the same memory may have been rotated: where they are the values, too.
            self._value_norms.append((x, norm))
            return
        if any(_is_same(x, part) for part, _ in self._rotations):
            raise RotationLostError("a layer norms what it rotated")
        self._norms.append((x, norm))

    def defer_rotation(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        """Replace `apply_rotary_pos_emb`, the function: return heads as they are, for `attend`.

        The function rotates them if what it computes is none of our forms.
        """
        heads, (cos, sin, *_) = split_arguments(args)
        key = (function, heads[0].shape[-1], cos.shape[-1])
        if key not in self._rotation_forms:
            # A forward of several tokens at the start has calls of every kind.
            found = self._rotation_forms[key] = rotation_form(function, *args, **kwargs)
            if found is None:
                logger.info("q and k are rotated by transformers' code: %s", function.__module__)
        form = self._rotation_forms[key]
        if form is None:
            return function(*args, **kwargs)
        angles = self._layer_angles(cos, sin, form)
        if self.rotates_at_once:
            heads = tuple(form.rotated(part, angles) for part in heads)
        else:
            self._rotations += [(part, angles) for part in heads]
        return heads if len(heads) > 1 else heads[0]

    def once(self, function: Function, *args: Any) -> Any:
        """What the function returns; it is called once in a step for the same arguments."""
        key = (function, *(id(each) if isinstance(each, Tensor) else each for each in args))
        if key not in self._results:
            # Tensors are kept, so that no other one gets its id meanwhile.
            self._results[key] = (args, function(*args))
        return self._results[key][1]

    def _layer_angles(self, cos: Tensor, sin: Tensor, form: RotationForm) -> Angles:
        """Of [1, tokens, width] each, as our rotation takes them; made once for all layers."""
        known = self._angles.get((id(cos), form))
        if known is None:
            # The tensor is kept, so that no other one gets its id meanwhile.
            known = (cos, form.angles(cos, sin))
            self._angles[id(cos), form] = known
        return known[1]


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether one is another view of the other, in any order of its dimensions."""
    return one.data_ptr() == other.data_ptr() and one.numel() == other.numel()


def _taken(deferred: list[tuple[Tensor, Kept]], part: Tensor) -> Kept | None:
    """Remove what was written down for the part, and return it."""
    for at, (known, kept) in enumerate(deferred):
        if _is_same(known, part):
            del deferred[at]
            return kept
    return None


MASKS = {"full_attention": None, "chunked_attention": None}
"""Replaces masks: attention reads none, and making them would need the sizes of a cache."""


class PositionsAsLength:
    """A cache for layers that count their tokens' positions on from its length.

    The length is a tensor that makes any token's index in the step its position.
    """

    def __init__(self, position_ids: Tensor) -> None:
        """position_ids: int64 [tokens]."""
        indices = torch.arange(len(position_ids), device=position_ids.device)
        self._lengths = position_ids - indices

    def get_seq_length(self, _layer: int = 0) -> Tensor:
        """int64 [tokens]."""
        return self._lengths

    def update(
        self, keys: Tensor, values: Tensor, _layer: int, **_options: Any
    ) -> tuple[Tensor, Tensor]:
        """Return what came in: attention stores it. Versions of transformers give options."""
        return keys, values


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: TokenIndex | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """transformers' interface: query, key, value [1, heads, tokens, head_dim].

    Returns [1, tokens, heads, value head_dim]. Rows, causality and windows are the backend's: of a
    mask no more is read than its window, where it is a mark. indices: what the layer's index made
    of its tokens (`indexed.py`).
    """
    owner: Any = module
    step: CurrentStep = owner.loray_step
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    width, value_width = q.shape[-1], v.shape[-1]
    latents: LatentAttention | None = getattr(owner, "loray_latents", None)
    if value_width < width and latents is None:
        # One layer's keys and values are of one width; zeros add nothing to the sums.
        v = F.pad(v, (0, width - value_width))
    if indices is not None:
        k, v = indices.with_head(k, v)
        q = F.pad(q, (0, 0, 0, 1))
        s_aux = None if s_aux is None else F.pad(s_aux, (0, 1))
    form = AttentionLayer(
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=width,
        scale=width**-0.5 if scaling is None else scaling,
        window=marked_window(attention_mask, sliding_window),
        softcap=softcap,
        sinks=s_aux is not None,
        index_topk=None if indices is None else indices.topk,
    )
    heads = Heads(q, k, v, s_aux, index=indices)
    if latents is not None:
        return latents.attend(step, owner.layer_idx, heads, form)[None], None
    out = step.attend(owner.layer_idx, (query, key, value), heads, form)
    return out[None, :, : query.shape[1], :value_width], None


AttentionInterface.register(ATTENTION, attend)
AttentionInterface.register(MARKED, attend)

"""The step that transformers' modules compute: what their attention and our linear layers read.

transformers hands no argument of ours down to its layers, at least not in all families. So the
modules of one model share one `CurrentStep`, which is set around each forward.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from modeling.adapters.product import AdapterData, ExpertAdapters, ExpertDeltas, TokenGroup
from modeling.adapters.vocabulary import VocabularyAdapters
from modeling.layers.attention import Angles
from modeling.layers.head_norms import HeadNorms
from modeling.layers.rotary import rotate
from modeling.models.base import AttentionLayer
from modeling.models.context import PagedContext, StateRows
from modeling.models.generic.norms import FusedRMSNorm
from modeling.models.generic.windows import MARKED, marked_window

ATTENTION = "loray"
"""The name under which transformers' modules find `attend`."""


@dataclass(frozen=True)
class Heads:
    """What a layer attends with, [tokens, heads or kv_heads, head_dim] each.

    angles: (cos, sin) by which q and k are still to be rotated; None: they are. sinks: float
    [heads], see `AttentionSpec`; None for a layer without. norms: what q's heads and k's are still
    to be normed by, before; None: they are.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    angles: Angles | None
    sinks: Tensor | None
    norms: tuple[FusedRMSNorm | None, FusedRMSNorm | None] = (None, None)

    @property
    def head_norms(self) -> HeadNorms | None:
        """Both norms; None where q and k have none."""
        q, k = self.norms
        if q is None or k is None:
            return None
        return HeadNorms((q.weight, k.weight), (q.eps, k.eps))

    def normed(self) -> "Heads":
        """The same with the norms computed."""
        q, k = (
            part if norm is None else norm.computed(part)
            for part, norm in zip((self.q, self.k), self.norms, strict=True)
        )
        return replace(self, q=q, k=k, norms=(None, None))


class LayerAttention(Protocol):
    """Attention of the layers of one forward."""

    def attend(self, layer: int, heads: Heads, form: AttentionLayer) -> Tensor:
        """Return [tokens, heads, head_dim]."""
        ...


class LayerForms:
    """Learns what each layer's attention is, from one forward over any tokens."""

    def __init__(self, chunks: Mapping[int, int]) -> None:
        """chunks: of layers that attend in chunks, which transformers says in the mask alone."""
        self._chunks = chunks
        self._forms: dict[int, AttentionLayer] = {}
        self._keys: list[Tensor] = []
        self._owners: dict[int, int] = {}

    def attend(self, layer: int, heads: Heads, form: AttentionLayer) -> Tensor:
        """Keep the form; the result is of the right shape and means nothing."""
        if layer in self._forms:
            raise ValueError(f"layer {layer} attends twice")
        # Keys are kept, so that no other layer's get their address.
        self._keys.append(heads.k)
        owner = self._owners.setdefault(heads.k.data_ptr(), layer)
        source = None if owner == layer else owner
        chunk = self._chunks.get(layer)
        window = form.window if chunk is None else None
        self._forms[layer] = replace(form, window=window, chunk=chunk, source=source)
        return torch.zeros_like(heads.q)

    def layers(self, num_layers: int, all_attend: bool) -> dict[int, AttentionLayer]:
        """Return the forms of the layers that attend, in order, by their numbers in the model.

        all_attend: whether all must. ValueError if some layer attended in another way.
        """
        found = sorted(self._forms)
        if all_attend and found != list(range(num_layers)):
            raise ValueError(f"of {num_layers} layers these attend: {found}")
        return {layer: self._forms[layer] for layer in found}


class PagedLayers:
    """Attention of the engine's step over the paged cache."""

    def __init__(
        self, context: PagedContext, forms: Mapping[int, tuple[int, AttentionLayer]]
    ) -> None:
        """forms: by a layer's number in the model, its number among those that attend, and form."""
        self._context = context
        self._forms = forms

    def attend(self, layer: int, heads: Heads, form: AttentionLayer) -> Tensor:
        """Store k and v, then attend over the rows' whole cache."""
        # The form of a layer's attention is fixed: a probe at the start saw it. A window may be in
        # its mask alone, and masks are made for the probe only.
        at, known = self._forms[layer]
        given = replace(known, window=form.window, chunk=None, source=None)
        assert form == given, (layer, form, known)
        if known.source is None:
            q = self._store(at, heads)
        else:
            # Its keys and values are those that another layer has stored.
            q = heads.normed().q
            q = q if heads.angles is None else rotate(q, *heads.angles)
            q = q.to(heads.q.dtype).contiguous()
        return self._context.query(at, q, known.window, heads.sinks)

    def _store(self, layer: int, heads: Heads) -> Tensor:
        """Norm and rotate what is not yet, put k and v into the cache, return q."""
        context, angles, norms = self._context, heads.angles, heads.head_norms
        if norms is None:
            heads = heads.normed()
        if angles is not None:
            parts = (heads.q, heads.k, heads.v)
            # Angles may be in float32 (OLMo's: its own code casts back): the kernel takes them so.
            if (q := context.store_at_once(layer, parts, angles, norms)) is not None:
                return q
        heads = heads.normed()
        q, k = heads.q, heads.k
        if angles is not None:
            q, k = (rotate(part, *angles).to(part.dtype) for part in (q, k))
        context.store_heads(layer, k, heads.v)
        return q.contiguous()


@dataclass(frozen=True)
class _Rotation:
    """A rotation that attention is to do: of these very tensors, by these angles."""

    query: Tensor
    key: Tensor
    angles: Angles


class RotationLostError(ValueError):
    """A layer changes q or k behind their norm or rotation, which was left to its attention."""


class CurrentStep:
    """What is computed now.

    adapter_data: None for the base model. state_rows: the rows as recurrent layers compute them.
    """

    adapter_data: AdapterData | None = None
    state_rows: tuple[StateRows, ...] = ()

    def __init__(self) -> None:
        self._attention: LayerAttention | None = None
        self._rotation: _Rotation | None = None
        self._norms: list[tuple[Tensor, FusedRMSNorm]] = []
        self._angles: dict[int, tuple[Tensor, Angles]] = {}

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
            self._attention = self.adapter_data = self._rotation = None
            self.state_rows = ()
            self._norms.clear()
            self._angles.clear()

    @contextmanager
    def adapted_by(self, adapter_data: AdapterData | None) -> Iterator[None]:
        """Compute some of the step's tokens meanwhile, with adapters of their own."""
        before, self.adapter_data = self.adapter_data, adapter_data
        try:
            yield
        finally:
            self.adapter_data = before

    def attend(
        self, layer: int, query: Tensor, key: Tensor, heads: Heads, form: AttentionLayer
    ) -> Tensor:
        """Attend; query, key: as the layer gave them, to see that they are those to rotate."""
        assert self._attention is not None, "a layer is called outside of any step"
        rotation, self._rotation = self._rotation, None
        if rotation is not None:
            if rotation.query is not query or rotation.key is not key:
                raise RotationLostError(f"layer {layer} changes what it rotated")
            heads = replace(heads, angles=rotation.angles)
        norms = (self._taken_norm(query), self._taken_norm(key))
        if self._norms:
            self._norms.clear()
            raise RotationLostError(f"layer {layer} changes what it normed")
        return self._attention.attend(layer, replace(heads, norms=norms), form)

    def defer_norm(self, norm: FusedRMSNorm, x: Tensor) -> None:
        """Write down that x, of q or k, stands for its norm, for `attend`."""
        if self._rotation is not None:
            raise RotationLostError("a layer norms what it rotated")
        self._norms.append((x, norm))

    def _taken_norm(self, part: Tensor) -> FusedRMSNorm | None:
        """The norm of which this is another view of the input, in any order of its dimensions."""
        for at, (x, norm) in enumerate(self._norms):
            if x.data_ptr() == part.data_ptr() and x.numel() == part.numel():
                del self._norms[at]
                return norm
        return None

    def defer_rotation(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_options: Any, **_more: Any
    ) -> tuple[Tensor, Tensor]:
        """Replace `apply_rotary_pos_emb`: return q and k as they are, for `attend`."""
        if self._rotation is not None:
            raise RotationLostError("a layer rotates twice before it attends")
        self._rotation = _Rotation(q, k, self._layer_angles(cos, sin))
        return q, k

    def _layer_angles(self, cos: Tensor, sin: Tensor) -> Angles:
        """[1, tokens, width] each, as our rotation takes them; made once for all layers."""
        known = self._angles.get(id(cos))
        if known is None:
            # The tensor is kept, so that no other one gets its id meanwhile.
            known = (cos, (cos[0].unsqueeze(1).contiguous(), signed(sin[0]).unsqueeze(1)))
            self._angles[id(cos)] = known
        return known[1]


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


def signed(sin: Tensor) -> Tensor:
    """Sines with the signs of the rotation by halves: the first half negated."""
    low, high = sin.chunk(2, dim=-1)
    return torch.cat((-low, high), dim=-1)


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
    **_options: Any,
) -> tuple[Tensor, None]:
    """transformers' interface: query, key, value [1, heads, tokens, head_dim].

    Returns [1, tokens, heads, value head_dim]. Rows, causality and windows are the backend's: of a
    mask no more is read than its window, where it is a mark.
    """
    owner: Any = module
    step: CurrentStep = owner.loray_step
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    width, value_width = q.shape[-1], v.shape[-1]
    if value_width < width:
        # One layer's keys and values are of one width; zeros add nothing to the sums.
        v = F.pad(v, (0, width - value_width))
    form = AttentionLayer(
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=width,
        scale=width**-0.5 if scaling is None else scaling,
        window=marked_window(attention_mask, sliding_window),
        softcap=softcap,
        sinks=s_aux is not None,
    )
    heads = Heads(q, k, v, None, s_aux)
    out = step.attend(owner.layer_idx, query, key, heads, form)
    return out[None, ..., :value_width], None


AttentionInterface.register(ATTENTION, attend)
AttentionInterface.register(MARKED, attend)

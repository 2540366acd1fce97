"""Attention of each call of a layer in a forward: each has keys and values of its own.

Most layers attend once in a forward. Those of a decoder that runs them in a loop (Dory, HRM-Text)
attend in each round, and a call stores what later tokens read in the same call alone.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from modeling.layers.attention import rotate_queries
from modeling.layers.head_norms import HeadNorms
from modeling.models.base import AttentionLayer
from modeling.models.context import PagedContext
from modeling.models.generic.step import Heads, RotationLostError

Call = tuple[int, int]
"""A layer's number in the model, and how many calls of its attention a forward had before."""


class LayerCall(NamedTuple):
    """What a call of a layer's attention is.

    number: among all calls of a forward. form: what it attends by. is_kept: its result is read
    behind the next call, by which captured pieces have written that one's to the same memory.
    """

    number: int
    form: AttentionLayer
    is_kept: bool = False


class LayerForms:
    """Learns what the attention of each call is, from one forward over any tokens."""

    def __init__(self, chunks: Mapping[int, int]) -> None:
        """chunks: of layers that attend in chunks, which transformers says in the mask alone."""
        self._chunks = chunks
        self._calls = _Calls()
        self._forms: dict[Call, AttentionLayer] = {}
        self._sources: dict[Call, Call | None] = {}
        self._stored: list[tuple[Tensor, Tensor]] = []
        self._owners: dict[tuple[int, int], Call] = {}
        self._unrotated: set[int] = set()
        self._keys: dict[int, int] = {}
        self._kept: set[Call] = set()

    def attend(self, layer: int, heads: Heads, form: AttentionLayer) -> Tensor:
        """Keep the form; the result is of the right shape and means nothing."""
        call, keys = self._calls.next(layer), heads.k.data_ptr()
        # Keys and values are kept, so that no other call's get their address.
        self._stored.append((heads.k, heads.v))
        owner = self._owners.setdefault((keys, heads.v.data_ptr()), call)
        source = None if owner == call else owner
        if source is None and heads.angles[0] is not heads.angles[1]:
            raise RotationLostError(f"layer {layer} rotates q and k in ways of their own")
        if source is None and keys in self._unrotated:
            raise RotationLostError(f"layer {layer} stores the same keys with other values")
        if self._keys.get(layer) == keys:
            # What it made of the same keys before is read together with this.
            self._kept.add((layer, call[1] - 1))
        self._keys[layer] = keys
        if heads.angles[1] is not None or heads.norms[1] is not None:
            self._unrotated.add(keys)
        chunk = self._chunks.get(layer)
        window = form.window if chunk is None else None
        self._sources[call] = source
        self._forms[call] = replace(form, window=window, chunk=chunk)
        return torch.zeros_like(heads.q)

    def layers(self, num_layers: int, all_attend: bool) -> dict[Call, LayerCall]:
        """Return what each call is, in the order of layers.

        all_attend: whether all layers must. ValueError if some attended in another way.
        """
        calls = sorted(self._forms)
        found = sorted({layer for layer, _ in calls})
        is_whole = found == list(range(len(found))) and len(calls) >= num_layers
        if all_attend and not is_whole:
            raise ValueError(f"of {num_layers} layers these attend: {found}")
        index: dict[Call | None, int | None] = {None: None}
        index |= {call: at for at, call in enumerate(calls)}
        forms = {
            call: replace(form, source=index[self._sources[call]])
            for call, form in self._forms.items()
        }
        return {
            call: LayerCall(at, forms[call], call in self._kept) for at, call in enumerate(calls)
        }


class PagedLayers:
    """Attention of the engine's step over the paged cache."""

    def __init__(self, context: PagedContext, forms: Mapping[Call, LayerCall]) -> None:
        """forms: what `LayerForms.layers` returns; a `PagedLayers` is of one forward."""
        self._context = context
        self._forms = forms
        self._calls = _Calls()

    def attend(self, layer: int, heads: Heads, form: AttentionLayer) -> Tensor:
        """Store k and v, then attend over the rows' whole cache."""
        # The form of a call's attention is fixed: a probe at the start saw it. A window may be in
        # its mask alone, and masks are made for the probe only.
        at, known, is_kept = self._forms[self._calls.next(layer)]
        given = replace(known, window=form.window, chunk=None, source=None)
        assert form == given, (layer, form, known)
        if known.source is None:
            q = self._store(at, heads)
        else:
            # Its keys and values are those that another layer has stored.
            norm = heads.norms[0]
            norms = None if norm is None else HeadNorms((norm.weight,), (norm.eps,))
            q = rotate_queries(heads.q, heads.angles[0], norms)
        found = self._context.query(at, q, known.window, heads.sinks, heads.index)
        return found.clone() if is_kept else found

    def _store(self, layer: int, heads: Heads) -> Tensor:
        """Norm and rotate what is not yet, put k and v into the cache, return q."""
        norms = heads.head_norms
        if norms is None:
            heads = heads.normed()
        # Angles may be in float32 (OLMo's: its own code casts back): the kernel takes them so.
        parts = (heads.q, heads.k, heads.v)
        return self._context.store(layer, parts, heads.angles[0], norms)


class _Calls:
    """Counts the calls of each layer in one forward."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def next(self, layer: int) -> Call:
        """Return the call that comes now."""
        call = (layer, self._counts[layer])
        self._counts[layer] += 1
        return call

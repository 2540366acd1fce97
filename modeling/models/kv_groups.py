"""Which layers of a model are one KV group, and how many tokens a block of each group has.

A block has the same bytes in every group, so that any group may take any block. How well that
fits follows from the tokens of a block: groups of few or narrow layers have more of them.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from configs.kv_groups import KvGroup
from modeling.attention.base import AttentionSpec
from modeling.attention.kv_cache import CacheSpec
from modeling.attention.kv_layout import CachedGroup, KvLayout
from modeling.models.base import AttentionLayer, PagedModel

MOST_TIMES = 16
"""How many times the tokens of the smallest block the largest may have."""


_NOTHING = AttentionLayer(num_heads=1, num_kv_heads=1, head_dim=64, scale=1.0)
"""What no layer attends as: the form of the one group of a model of recurrent layers alone.

Its blocks count positions and name prefixes as others do, and nothing lies in them.
"""


class _Group(NamedTuple):
    """Layers of one form; its window is None where it is as long as any sequence."""

    form: AttentionLayer
    layers: list[int]

    @property
    def width(self) -> int:
        """Numbers of a token's keys in one layer."""
        return self.form.num_kv_heads * self.form.head_dim


class _Fit(NamedTuple):
    """Tokens of each group's blocks, as multiples, and the pages of a group in a block."""

    times: list[int]
    strides: list[int]
    wasted: float


def kv_layout(
    model: PagedModel,
    page_size: int,
    longest: int | None = None,
    dtype: torch.dtype | None = None,
) -> KvLayout:
    """The KV groups of a model.

    page_size: tokens of the smallest block; fewer where the model's chunks are not made of whole
    blocks. longest: sequence in tokens; None: no block is freed
    behind a window. dtype: of the cache; None: the model's own.
    """
    layers = model.attention_layers
    groups = _groups(layers, longest)
    page_size = math.gcd(page_size, *(group.form.chunk or 0 for group in groups))
    fit = _fit(groups, page_size)
    made = []
    for group, times, stride in zip(groups, fit.times, fit.strides, strict=True):
        form, size = group.form, page_size * times
        spec = CacheSpec(
            len(group.layers),
            size,
            form.num_kv_heads,
            form.head_dim,
            dtype or model.dtype,
            keys_only=form.value_dim is not None,
        )
        kv = KvGroup(size, form.window, form.chunk)
        made.append(CachedGroup(kv, spec, tuple(group.layers), stride))
    sources = [index if each.source is None else each.source for index, each in enumerate(layers)]
    return KvLayout(tuple(made), tuple(sources))


def attention_specs(model: PagedModel, layout: KvLayout) -> tuple[AttentionSpec, ...]:
    """What an attention backend must serve for each group of this model."""
    found = []
    for group in layout.groups:
        layers = [model.attention_layers[layer] for layer in group.layers] or [_NOTHING]
        form = layers[0]
        spec = AttentionSpec(
            num_heads=form.num_heads,
            num_kv_heads=form.num_kv_heads,
            head_dim=form.head_dim,
            scale=form.scale,
            page_size=group.spec.page_size,
            dtype=model.dtype,
            device=model.device,
            windows=tuple(dict.fromkeys(layer.window for layer in layers)),
            cache_dtype=group.spec.dtype,
            softcap=form.softcap,
            sinks=form.sinks,
            index_topk=form.index_topk,
            alibi=form.slopes,
            value_dim=form.value_dim,
        )
        found.append(spec)
    return tuple(found)


def _groups(layers: Sequence[AttentionLayer], longest: int | None) -> list[_Group]:
    """Groups that forget nothing come first: they end a prefix soonest."""
    if not layers:
        return [_Group(_NOTHING, [])]
    found: dict[AttentionLayer, list[int]] = {}
    for index, layer in enumerate(layers):
        form = _lasting(layer, longest)
        if layer.source is None:
            found.setdefault(form, []).append(index)
        else:
            assert form == _lasting(layers[layer.source], longest), (index, layer)
    groups = [_Group(form, members) for form, members in found.items()]
    return sorted(groups, key=lambda group: (group.form.window or group.form.chunk) is not None)


def _lasting(layer: AttentionLayer, longest: int | None) -> AttentionLayer:
    """The layer's form with how long it needs its keys and values."""
    window, chunk = layer.window, layer.chunk
    if window is not None and (longest is None or window >= longest):
        window = None
    if chunk is not None and longest is not None and chunk >= longest:
        chunk = None
    return replace(layer, window=window, chunk=chunk, source=None)


def _fit(groups: Sequence[_Group], page_size: int) -> _Fit:
    """The sizes of blocks that leave the least of them unused."""
    widest = max(groups, key=lambda group: len(group.layers) * group.width)
    count = len(widest.layers)
    options = [
        fit
        for pages in (range(count, 2 * count + 64) if len(groups) > 1 else (1,))
        for most in range(1, MOST_TIMES + 1)
        if (fit := _try(groups, pages * widest.width, most, page_size))
    ]
    return min(options, key=lambda fit: (fit.wasted, max(fit.times)))


def _try(groups: Sequence[_Group], width: int, most: int, page_size: int) -> _Fit | None:
    """Blocks of `width` numbers for each token of the smallest; None where that does not go.

    most: tokens of the largest block, as a multiple; those of all others divide it.
    """
    times, strides, wasted = [], [], 0.0
    single = len(groups) == 1
    for group in groups:
        used, chunk = len(group.layers) * group.width, group.form.chunk
        own = [
            n
            for n in range(1, most + 1)
            if most % n == 0
            and (chunk is None or chunk % (page_size * n) == 0)
            and (single or (n * used <= width and width % (n * group.width) == 0))
        ]
        if not own:
            return None
        times.append(own[0] if single else own[-1])
        strides.append(1 if single else width // (own[-1] * group.width))
        wasted += 0.0 if single else 1 - own[-1] * used / width
    # The smallest block is of `page_size` tokens, and all others divide the largest.
    fits = min(times) == 1 and all(max(times) % each == 0 for each in times)
    return _Fit(times, strides, wasted) if fits else None

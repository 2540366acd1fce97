"""Latent attention (DeepSeek's MLA): the cache has what keys and values are made of.

A layer's `kv_b_proj` makes keys and values of all heads from one latent of a token, 512 numbers or
so; beside it a key has a rotated part, which all heads share. Cached are the latent and that part,
as one head's key of which the first numbers are its value. What would be multiplied for each cached
token is multiplied for each query instead (adapters/latents.py), so that a decode step reads a
tenth or so of what heads' own keys and values are, and a cache has room for ten times the tokens.

transformers' modules compute all else. To them `kv_b_proj` gives one head, of which nothing is
read; `attend` finds the latents here.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from modeling.adapters.latents import LatentMap
from modeling.adapters.linear import AdapterColumnLinear
from modeling.adapters.projection import Projection
from modeling.models.base import AttentionLayer
from modeling.models.generic.modules import GenericLinear
from modeling.models.generic.step import CurrentStep, Heads, RotationLostError
from modeling.quantisation.base import QuantisedWeight
from sharding.linear_weight import DenseWeight

logger = logging.getLogger("loray.modeling")

_NAME = "kv_b_proj"
_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")


class LatentProjection(nn.Module):
    """A layer's `kv_b_proj`: hands latents on to the layer's attention, which multiplies them."""

    def __init__(self, linear: AdapterColumnLinear, keys: int, values: int) -> None:
        """keys, values: numbers of a head's key, without its rotated part, and of its value."""
        super().__init__()
        self.linear = linear
        self.keys, self.values = keys, values
        self._latents: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[1, ..., tokens, latent] to [..., keys + values]: one head, which means nothing."""
        self._latents = x.view(-1, x.shape[-1])
        return x.new_empty(*x.shape[:-1], self.keys + self.values)

    def attend(self, step: CurrentStep, layer: int, heads: Heads, form: AttentionLayer) -> Tensor:
        """Attention of a layer, [tokens, heads, values].

        heads: q of this rank's heads; of the one key that transformers made its rotated part is
        read, which is behind `keys` numbers. form: of these.
        """
        latents, self._latents = self._latents, None
        assert latents is not None, f"layer {layer} attends before it makes its keys"
        own, adapters = self.map, step.adapter_data
        (tokens, num_heads, _), width = heads.q.shape, latents.shape[1]
        x, rotated = heads.q[..., : self.keys], heads.q[..., self.keys :]
        q = x.new_empty(tokens, num_heads, width + rotated.shape[2])
        queries = own.queries(x, q[..., :width])
        if adapters is not None:
            adapters.latent_queries(queries, x, own)
        q[..., width:] = rotated
        k = torch.cat((latents, heads.k[:, 0, self.keys :]), dim=1).unsqueeze(1)
        form = replace(form, head_dim=q.shape[2], value_dim=width)
        angles = step.take_rotations()
        if angles is not None and angles.cos.shape[-1] != rotated.shape[2]:
            raise RotationLostError(f"layer {layer} rotates a part of what all heads share")
        whole = replace(heads, q=q, k=k, v=k, angles=(angles, angles))
        sums = step.attend_whole(layer, whole, form)[..., :width]
        found = own.values(sums)
        if adapters is not None:
            adapters.latent_values(found, sums, own)
        return found

    @property
    def map(self) -> LatentMap:
        """The linear map."""
        matrix = self.linear.base.matrix
        assert matrix is not None
        weight = matrix.view(-1, self.keys + self.values, matrix.shape[1])
        return LatentMap(self.linear.position, weight, self.keys)


def keep_latents(causal: nn.Module, projections: Sequence[Projection]) -> tuple[Projection, ...]:
    """Let the layers that make keys and values of latents cache these; returns the projections.

    All layers or none: blocks of one cache are alike.
    """
    layers = [each for each in causal.modules() if all(hasattr(each, name) for name in _SIZES)]
    found = [(layer, getattr(layer, _NAME, None)) for layer in layers]
    lack = next((lack for layer, own in found if (lack := _lack(layer, own)) is not None), None)
    if lack is not None:
        logger.info("keys and values are cached for each head, not latents: %s", lack)
    made = set() if lack else {_keep(layer, own.linear) for layer, own in found if own is not None}
    marked = enumerate(projections)
    return tuple(replace(each, of_latents=index in made) for index, each in marked)


def _keep(layer: Any, linear: AdapterColumnLinear) -> int:
    """Replace a layer's linear map; returns its projection."""
    if linear.base.matrix is None:
        linear.base.stored = DenseWeight(linear.base.stored[:].contiguous())
    layer.loray_latents = LatentProjection(linear, layer.qk_nope_head_dim, layer.v_head_dim)
    setattr(layer, _NAME, layer.loray_latents)
    return linear.position.projection


def _lack(layer: nn.Module, own: Any) -> str | None:
    """Why a layer's latents cannot be cached, or None."""
    if hasattr(layer, "indexer"):
        return "an index chooses what tokens see"
    if not (isinstance(own, GenericLinear) and isinstance(own.linear, AdapterColumnLinear)):
        return f"{type(layer).__name__} has no {_NAME}"
    base = own.linear.base
    if base.bias is not None:
        return f"{_NAME} has a bias"
    if isinstance(base.stored, QuantisedWeight):
        x = torch.ones(1, base.stored.shape[1], dtype=base.stored.dtype, device=base.stored.device)
        if base.stored.inputs(x) is not x:
            return f"{_NAME} rounds what it reads, which adapters of it do not"
    return None

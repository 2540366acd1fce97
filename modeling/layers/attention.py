"""Steps of self-attention between its two projections, the same for all models."""

from collections.abc import Sequence

import torch
from torch import Tensor

from modeling.attention.kv_cache import LayerCache
from modeling.layers.fused import casts_to_fp8, fused_ops
from modeling.layers.head_norms import HeadNorms
from modeling.layers.norm import RMSNorm
from modeling.layers.rotary import rotate
from sharding.slicing import HeadCut

Angles = tuple[Tensor, Tensor]
"""Cosines and sines of a step's positions, [tokens, 1, rotated width] each."""


def norm_heads(qkv: Tensor, heads: HeadCut, q_norm: RMSNorm, k_norm: RMSNorm) -> Tensor:
    """Norm each head of q and each of k in a fused product [tokens, all heads * head_dim]."""
    counts = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
    q, k, v = torch.split(qkv.view(qkv.shape[0], sum(counts), -1), counts, dim=1)
    return torch.cat((q_norm(q)[0], k_norm(k)[0], v), dim=1).flatten(1)


def split_heads(
    qkv: Tensor, heads: HeadCut, angles: Angles | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) of a fused product, q and k rotated: [tokens, heads or kv_heads, head_dim] each.

    qkv: [tokens, (heads + 2 * kv_heads) * head_dim], q first. angles: (cos, sin) or None for
    models without rotation.
    """
    num_rotated = heads.num_heads + heads.num_kv_heads
    split = qkv.view(qkv.shape[0], num_rotated + heads.num_kv_heads, -1)
    rotated, values = split[:, :num_rotated], split[:, num_rotated:]
    if angles is not None:
        rotated = rotate(rotated, *angles)
    return rotated[:, : heads.num_heads], rotated[:, heads.num_heads :], values


def rotate_and_store(
    qkv: Tensor,
    heads: HeadCut,
    angles: Angles | None,
    cache: LayerCache,
    slots: Tensor,
    stored: Tensor | None,
) -> Tensor:
    """Rotate q and k of a fused product, store k and v in the cache, return q.

    qkv: [tokens, (heads + 2 * kv_heads) * head_dim], q first. angles: (cos, sin) or None for
    models without rotation. slots: int64 [tokens]. stored: int64 [n], the tokens to store (None:
    all); k and v of the others are in the cache already.
    Returns [tokens, heads, head_dim].
    """
    if angles is not None and stored is None:
        # One launch instead of several; it rotates whole heads and stores every token.
        split = qkv.view(qkv.shape[0], heads.num_heads + 2 * heads.num_kv_heads, -1)
        counts = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
        parts = torch.split(split, counts, dim=1)
        found = rotate_and_store_at_once(parts, angles, cache, slots, None, overwrites=True)
        if found is not None:
            return found
    queries, keys, values = split_heads(qkv, heads, angles)
    if stored is None:
        cache.store(keys, values, slots)
    else:
        cache.store(keys[stored], values[stored], slots[stored])
    return queries


def rotate_and_store_at_once(
    parts: Sequence[Tensor],
    angles: Angles,
    cache: LayerCache,
    slots: Tensor,
    norms: HeadNorms | None,
    overwrites: bool,
) -> Tensor | None:
    """See `FusedOps.rotate_and_store`; None where the device has no kernel for it.

    Whole heads are rotated by it.
    """
    q = parts[0]
    fused, head_dim = fused_ops(q.device), q.shape[2]
    are_whole = angles[0].shape[-1] == head_dim and all(angle.is_contiguous() for angle in angles)
    lie_together = all(each.stride()[1:] == (head_dim, 1) for each in parts)
    if fused is None or not (are_whole and lie_together and _writable(cache)):
        return None
    return fused.rotate_and_store(parts, angles, cache, slots, norms, overwrites)


def _writable(cache: LayerCache) -> bool:
    """Whether kernels of the cache's device, if it has any, can write to its pages."""
    return not cache.quantised or casts_to_fp8(cache.keys.device)

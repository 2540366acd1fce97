"""Steps of self-attention between its two projections, the same for all models."""

from collections.abc import Sequence

import torch
from torch import Tensor

from modeling.attention.kv_cache import LayerCache
from modeling.layers.angles import Angles
from modeling.layers.fused import FusedOps, casts_to_fp8, fused_ops
from modeling.layers.head_norms import HeadNorms
from modeling.layers.norm import RMSNorm
from modeling.layers.rotary import rotate
from sharding.slicing import HeadCut


def norm_heads(qkv: Tensor, heads: HeadCut, q_norm: RMSNorm, k_norm: RMSNorm) -> Tensor:
    """Norm each head of q and each of k in a fused product [tokens, all heads * head_dim]."""
    q, k, v = split_heads(qkv, heads)
    return torch.cat((q_norm(q)[0], k_norm(k)[0], v), dim=1).flatten(1)


def split_heads(qkv: Tensor, heads: HeadCut) -> Sequence[Tensor]:
    """(q, k, v) of a fused product: [tokens, heads or kv_heads, head_dim] each.

    qkv: [tokens, (heads + 2 * kv_heads) * head_dim], q first.
    """
    counts = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
    return torch.split(qkv.view(qkv.shape[0], sum(counts), -1), counts, dim=1)


def rotate_heads(parts: Sequence[Tensor], angles: Angles | None) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) with q and k rotated; angles: None for models without rotation."""
    q, k, v = parts
    return (q, k, v) if angles is None else (rotate(q, *angles), rotate(k, *angles), v)


def rotate_and_store(
    parts: Sequence[Tensor],
    angles: Angles | None,
    cache: LayerCache,
    slots: Tensor,
    stored: Tensor | None,
    norms: HeadNorms | None = None,
    overwrites: bool = False,
) -> Tensor:
    """Norm and rotate q and k, store k and v in the cache, return q.

    parts: q, k, v [tokens, heads or kv_heads, head_dim]. angles: None for layers without rotation.
    slots: int64 [tokens]. stored: int64 [n], the tokens to store (None: all); k and v of the others
    are in the cache already. norms: of heads, before the rotation. overwrites: whether q may be.
    """
    if cache.keys_only:
        return _store_latents(parts, angles, cache, slots, stored)
    if stored is None and _writable(cache) and (fused := _fused(parts, angles)) is not None:
        found: Tensor = fused.rotate_and_store(parts, angles, cache, slots, norms, overwrites)
        return found
    q, k, v = parts if norms is None else norms.of(parts)
    if angles is not None:
        q, k = (rotate(part, *angles).to(part.dtype) for part in (q, k))
    if stored is None:
        cache.store(k, v, slots)
    else:
        cache.store(k[stored], v[stored], slots[stored])
    return q.contiguous()


def _store_latents(
    parts: Sequence[Tensor],
    angles: Angles | None,
    cache: LayerCache,
    slots: Tensor,
    stored: Tensor | None,
) -> Tensor:
    """Rotate the last numbers of q and k, which may be changed; store k, return q."""
    q, k, _ = parts
    assert q.is_contiguous(), "latents and queries are put together for this"
    if angles is not None:
        fused = fused_ops(q.device) if stored is None and not cache.quantised else None
        if fused is not None and all(each.is_contiguous() for each in angles[:2]):
            fused.store_latents(q, k, angles, cache, slots)
            return q
        for part in (q, k):
            tail = part[..., part.shape[-1] - angles.cos.shape[-1] :]
            tail.copy_(rotate(tail, *angles))
    own = (k, slots) if stored is None else (k[stored], slots[stored])
    cache.store(own[0], own[0], own[1])
    return q


def rotate_queries(q: Tensor, angles: Angles | None, norms: HeadNorms | None) -> Tensor:
    """Norm and rotate q alone, [tokens, heads, head_dim]."""
    if (fused := _fused((q,), angles)) is not None:
        found: Tensor = fused.rotate_and_store((q,), angles, None, None, norms)
        return found
    (normed,) = (q,) if norms is None else norms.of((q,))
    turned = normed if angles is None else rotate(normed, *angles).to(q.dtype)
    return turned.contiguous()


def _fused(parts: Sequence[Tensor], angles: Angles | None) -> FusedOps | None:
    """The device's kernels, if they can read these; whole heads must lie behind each other."""
    q = parts[0]
    head_dim = q.shape[2]
    lie_together = all(each.stride()[1:] == (head_dim, 1) for each in parts)
    are_whole = angles is None or all(each.is_contiguous() for each in angles[:2])
    return fused_ops(q.device) if lie_together and are_whole and head_dim % 2 == 0 else None


def _writable(cache: LayerCache) -> bool:
    """Whether kernels of the cache's device, if it has any, can write to its pages."""
    return not cache.quantised or casts_to_fp8(cache.keys.device)

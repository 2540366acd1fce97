"""A step's latents put into the cache, and what is rotated of queries and keys, in one launch."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from modeling.attention.kv_cache import LayerCache
from modeling.kernels.launch import Launcher, aligned
from modeling.layers.angles import Angles

# Arguments are grouped by what they describe.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def _turn(
    x: "Any", to: "Any", mask: "Any", cos: "Any", sin: "Any",
    ROWS: tl.constexpr, BLOCK_P: tl.constexpr, NEIGHBOURS: tl.constexpr,
) -> None:
    """Rotate ROWS rows at x of 2 * BLOCK_P numbers, and store them at `to`.

    mask, x, to: [ROWS, 2 * BLOCK_P], read and written whole. cos, sin: [1, BLOCK_P].
    """
    both = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    if NEIGHBOURS:
        one, other = tl.split(tl.reshape(both, [ROWS, BLOCK_P, 2]))
    else:
        one, other = tl.split(tl.permute(tl.reshape(both, [ROWS, 2, BLOCK_P]), [0, 2, 1]))
    turned = tl.join(one * cos - other * sin, other * cos + one * sin)
    if not NEIGHBOURS:
        turned = tl.permute(turned, [0, 2, 1])
    found = tl.reshape(turned, [ROWS, 2 * BLOCK_P])
    tl.store(to, found.to(to.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _store_latents(
    q: "Any", k: "Any", cos: "Any", sin: "Any", slots: "Any", keys: "Any",
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
    ROTATED: tl.constexpr, BLOCK_P: tl.constexpr, NEIGHBOURS: tl.constexpr,
) -> None:
    """One token: q [tokens, HEADS, WIDTH] is changed, k [tokens, 1, WIDTH] stored.

    The last ROTATED numbers of each are rotated.
    """
    PAIRS: tl.constexpr = ROTATED // 2
    FIRST: tl.constexpr = WIDTH - ROTATED
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK_P)
    inside = pair < PAIRS
    angle = token * ROTATED + pair
    c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    # Of the first half of sines the signs are turned.
    s = tl.load(sin + angle + PAIRS, mask=inside, other=0.0).to(tl.float32)[None, :]
    i = tl.arange(0, 2 * BLOCK_P)
    if NEIGHBOURS:
        at, known = i, i < ROTATED
    else:
        at = i % BLOCK_P + i // BLOCK_P * PAIRS
        known = i % BLOCK_P < PAIRS
    at = (FIRST + at)[None, :]
    row = k + token * WIDTH
    to = keys + tl.load(slots + token) * WIDTH
    d = tl.arange(0, BLOCK_D)
    tl.store(to + d, tl.load(row + d, mask=d < FIRST), mask=d < FIRST)
    _turn(row + at, to + at, known[None, :], c, s, 1, BLOCK_P, NEIGHBOURS)
    head = tl.arange(0, BLOCK_H)[:, None]
    heads = q + token * (HEADS * WIDTH) + head * WIDTH + at
    _turn(heads, heads, (head < HEADS) & known[None, :], c, s, BLOCK_H, BLOCK_P, NEIGHBOURS)


# fmt: on
_LAUNCH = Launcher(_store_latents)


def store_latents(q: Tensor, k: Tensor, angles: Angles, cache: LayerCache, slots: Tensor) -> None:
    """Rotate the last numbers of q and k by the angles, and store k, as LayerCache.store does.

    q: [tokens, heads, width], which is changed. k: [tokens, 1, width]. Both are contiguous.
    """
    tokens, heads, width = q.shape
    rotated = angles.cos.shape[-1]
    form = {
        "HEADS": heads,
        "BLOCK_H": triton.next_power_of_2(heads),
        "WIDTH": width,
        "BLOCK_D": triton.next_power_of_2(width - rotated),
        "ROTATED": rotated,
        "BLOCK_P": triton.next_power_of_2(rotated // 2),
        "NEIGHBOURS": angles.neighbours,
    }
    tensors = [q, k, angles.cos, angles.sin, slots, cache.keys]
    types = (q.dtype, angles.cos.dtype, cache.keys.dtype)
    key = (q.device, *types, aligned(*tensors), *form.values())
    _LAUNCH(key, (tokens,), tensors, form, {"num_warps": 4})

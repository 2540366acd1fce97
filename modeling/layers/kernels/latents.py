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
def _turned(x: "Any", low: "Any", high: "Any", mask: "Any", cos: "Any", sin: "Any") -> "Any":
    """Both numbers of pairs at x, rotated, in float32."""
    one = tl.load(x + low, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(x + high, mask=mask, other=0.0).to(tl.float32)
    return one * cos - other * sin, other * cos + one * sin


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
    c = tl.load(cos + token * ROTATED + pair, mask=inside, other=0.0).to(tl.float32)
    # Of the first half of sines the signs are turned.
    s = tl.load(sin + token * ROTATED + PAIRS + pair, mask=inside, other=0.0).to(tl.float32)
    low = FIRST + (2 * pair if NEIGHBOURS else pair)
    high = low + (1 if NEIGHBOURS else PAIRS)
    row = k + token * WIDTH
    to = keys + tl.load(slots + token) * WIDTH
    d = tl.arange(0, BLOCK_D)
    tl.store(to + d, tl.load(row + d, mask=d < FIRST), mask=d < FIRST)
    one, other = _turned(row, low, high, inside, c, s)
    tl.store(to + low, one.to(keys.dtype.element_ty), mask=inside)
    tl.store(to + high, other.to(keys.dtype.element_ty), mask=inside)
    head = tl.arange(0, BLOCK_H)
    heads = q + (token * HEADS + head)[:, None] * WIDTH
    mask = (head < HEADS)[:, None] & inside[None, :]
    one, other = _turned(heads, low[None, :], high[None, :], mask, c[None, :], s[None, :])
    tl.store(heads + low[None, :], one.to(q.dtype.element_ty), mask=mask)
    tl.store(heads + high[None, :], other.to(q.dtype.element_ty), mask=mask)


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

"""What flash-attn 2.8 documents of the two functions that are used, in plain torch.

It refuses what the package refuses (its checks of shapes, types and strides are those of
flash_attn_interface.py and of csrc/flash_attn/flash_api.cpp), reads pages only as far as a row's
keys go, and computes in float32. Numbers of keys are looked up on the device, as there.
"""

from types import ModuleType

import torch
from torch import Tensor

PAGE_MULTIPLE = 256
MAX_HEAD_DIM = 256


class Refused(RuntimeError):
    """A check of the package that failed."""


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """q [tokens, heads, head_dim] to the same shape, over paged k and v."""
    assert block_table is not None, "only paged keys are used"
    check((dropout_p, alibi_slopes, return_attn_probs) == (0.0, None, False), "used")
    for starts in (cu_seqlens_q, cu_seqlens_k):
        check(starts.dtype == torch.int32, "cu_seqlens must have dtype int32")
        check(starts.is_contiguous(), "cu_seqlens must be contiguous")
        check(starts.shape == (len(block_table) + 1,), "one start a row, and the end")
    check(q.dim() == 3 and q.stride(-1) == 1, "q must have contiguous last dimension")
    check_pages(q, k, v, block_table)
    queries, keys = lengths(cu_seqlens_q), lengths(cu_seqlens_k)
    check(sum(queries) == len(q), "every query is some row's")
    check(max(queries) <= max_seqlen_q and max(keys) <= max_seqlen_k, "the kernel stops there")
    window = window_size if not causal else (window_size[0], 0)
    rows = torch.split(q, queries)
    return torch.cat(
        [
            attend(row, *gathered(k, v, block_table[i], keys[i]), softmax_scale, window, softcap)
            for i, row in enumerate(rows)
        ]
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    """q [rows, queries, heads, head_dim] to the same shape, over cached keys alone."""
    assert block_table is not None, "only paged keys are used"
    assert isinstance(cache_seqlens, Tensor), "only lengths on the device are used"
    unused = (k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, alibi_slopes)
    check(all(each is None for each in unused), "used")
    check(cache_seqlens.dtype == torch.int32, "seqlens_k must have dtype int32")
    check(cache_seqlens.is_contiguous(), "seqlens_k must be contiguous")
    check(cache_seqlens.shape == (len(q),), "one length a row")
    check(q.dim() == 4 and q.stride(-1) == 1, "q must have contiguous last dimension")
    check(len(block_table) == len(q), "one table a row")
    check_pages(q[:, 0], k_cache, v_cache, block_table)
    window = window_size if not causal else (window_size[0], 0)
    keys = cache_seqlens.tolist()
    rows = [
        attend(
            row,
            *gathered(k_cache, v_cache, block_table[i], keys[i]),
            softmax_scale,
            window,
            softcap,
        )
        for i, row in enumerate(q)
    ]
    return torch.stack(rows)


def check(good: bool, message: str) -> None:
    if not good:
        raise Refused(message)


def check_pages(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> None:
    """What both functions check of q [tokens, heads, head_dim], of the pages and their tables."""
    heads, head_dim = q.shape[1:]
    check(q.dtype == k.dtype == v.dtype, "query, key and value must have the same dtype")
    check(k.dim() == 4 and k.shape == v.shape, "pages are [pages, page size, kv heads, head_dim]")
    check(k.stride(-1) == 1 and v.stride(-1) == 1, "pages must have contiguous last dimension")
    check(k.shape[3] == head_dim, "one head_dim")
    check(k.shape[1] % PAGE_MULTIPLE == 0, "Paged KV cache block size must be divisible by 256")
    check(head_dim % 8 == 0 and head_dim <= MAX_HEAD_DIM, "head_dim")
    check(heads % k.shape[2] == 0, "heads in key/value must divide heads in query")
    check(table.dtype == torch.int32, "block_table must have dtype torch.int32")
    check(table.dim() == 2 and table.stride(-1) == 1, "block_table: contiguous last dimension")
    check(len(table) > 0, "batch size must be positive")


def lengths(starts: Tensor) -> list[int]:
    found: list[int] = starts.diff().tolist()
    check(int(starts[0]) == 0 and min(found) > 0, "rows follow each other")
    return found


def gathered(k: Tensor, v: Tensor, table: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """A row's keys and values [count, kv heads, head_dim]; nothing behind them is read."""
    page_size = k.shape[1]
    pages = -(-count // page_size)
    check(pages <= len(table), "the table ends before the keys")
    numbers = table[:pages].long()
    check(bool(((numbers >= 0) & (numbers < len(k))).all()), "a page that is not there")
    return k[numbers].flatten(0, 1)[:count], v[numbers].flatten(0, 1)[:count]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    window: tuple[int, int],
    softcap: float,
) -> Tensor:
    """One row; query i sees keys [i + n - m - left, i + n - m + right] of n, for m queries."""
    group = q.shape[1] // k.shape[1]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    keys, values = (each.float().repeat_interleave(group, dim=1) for each in (k, v))
    scores = torch.einsum("mhd,nhd->hmn", q.float(), keys) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(len(q))[:, None] + len(k) - len(q)
    key = torch.arange(len(k))[None]
    left, right = window
    hidden = (key > at + right) if right >= 0 else torch.zeros_like(key > at)
    if left >= 0:
        hidden = hidden | (key < at - left)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hmn,nhd->mhd", weights, values).to(q.dtype)


def module() -> ModuleType:
    """The package as far as it is used."""
    made = ModuleType("flash_attn")
    for each in (flash_attn_varlen_func, flash_attn_with_kvcache):
        setattr(made, each.__name__, each)
    return made

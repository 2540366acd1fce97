"""Paged attention by flash-attn 2.x; its pages hold a multiple of 256 tokens.

Leading rows of one token go to `flash_attn_with_kvcache`, which splits long rows over the
device, all others to `flash_attn_varlen_func`; both align causality to the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from torch import Tensor

from modeling.attention.base import (
    AttentionBackend,
    AttentionSpec,
    AttentionStep,
    GraphAttention,
    Words,
)
from modeling.attention.kv_cache import FP8, LayerCache
from modeling.attention.pages import leading_decodes, starts
from modeling.transfer import to_device

PAGE_MULTIPLE = 256
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class LongRows:
    """The rows for the prefill kernel: where queries and keys start, int32 [n + 1], and the most.

    tables: int32 [n, blocks].
    """

    query_starts: Tensor
    key_starts: Tensor
    tables: Tensor
    most_queries: int
    most_keys: int


@dataclass(frozen=True)
class FlashAttnStep(AttentionStep):
    """The first num_decode rows are decode rows, of lengths int32 [num_decode] and tables."""

    num_decode: int
    decode_lengths: Tensor
    decode_tables: Tensor
    long_rows: LongRows | None


class FlashAttention(AttentionBackend):
    """The flash-attn package."""

    name = "flash_attn"

    @classmethod
    def lacks(cls, spec: AttentionSpec) -> str | None:
        """Half precision, pages of 256 tokens, heads of up to 256, no sinks, only CUDA."""
        if spec.device.type != "cuda":
            return "needs a CUDA device"
        if spec.dtype not in (torch.float16, torch.bfloat16):
            return f"has no kernels for {spec.dtype}, only float16 and bfloat16"
        if spec.cache_dtype == FP8:
            return "has no kernels for an fp8 cache: take flashinfer, or set cache.dtype to auto"
        if spec.cache_dtype not in (None, spec.dtype):
            return f"has no kernels for a cache of {spec.cache_dtype} with {spec.dtype}"
        if spec.head_dim % 8 or spec.head_dim > MAX_HEAD_DIM:
            return f"head_dim {spec.head_dim} is not a multiple of 8 up to {MAX_HEAD_DIM}"
        if spec.page_size % PAGE_MULTIPLE:
            return f"cache.block_size {spec.page_size} is not a multiple of {PAGE_MULTIPLE}"
        if spec.value_dim is not None:
            return "is not given latents"
        return "has no sinks" if spec.sinks else "is not given ALiBi" if spec.alibi else None

    def prepare(
        self, query_lengths: Sequence[int], key_lengths: Sequence[int], block_tables: Tensor
    ) -> FlashAttnStep:
        """Ship the lengths."""
        queries, keys = tuple(query_lengths), tuple(key_lengths)
        split = leading_decodes(queries)
        lengths = to_device(np.array(keys[:split], dtype=np.int32), block_tables.device)
        long_rows = None
        if split < len(queries):
            long_rows = LongRows(
                to_device(starts(queries[split:]), block_tables.device),
                to_device(starts(keys[split:]), block_tables.device),
                block_tables[split : len(queries)],
                max(queries[split:]),
                max(keys[split:]),
            )
        return FlashAttnStep(self, queries, keys, split, lengths, block_tables[:split], long_rows)

    def forward(
        self,
        q: Tensor,
        cache: LayerCache,
        cu_seqlen: Tensor,
        block_tables: Tensor,
        step: AttentionStep,
        window: int | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Decode rows first, then the others."""
        assert isinstance(step, FlashAttnStep), type(step)
        split, rows = step.num_decode, step.long_rows
        parts = []
        if split:
            parts.append(self._decode(q[:split], cache, step, window))
        if rows is not None:
            parts.append(self._prefill(q[split:], cache, rows, window))
        return parts[0] if len(parts) == 1 and out is None else torch.cat(parts, out=out)

    def graph_words(self, rows: int, max_blocks: int, queries: int = 1) -> int | None:
        """Lengths and whole tables."""
        return rows * (1 + max_blocks) if queries == 1 else None

    def graph_form(self, rows: int, words: Tensor, queries: int = 1) -> "GraphFlashAttn":
        """Decode over static lengths and tables."""
        return GraphFlashAttn(self, rows, words)

    def _decode(
        self, q: Tensor, cache: LayerCache, step: FlashAttnStep, window: int | None
    ) -> Tensor:
        out: Tensor = flash_attn_with_kvcache(
            q.unsqueeze(1),
            cache.keys,
            cache.values,
            cache_seqlens=step.decode_lengths,
            block_table=step.decode_tables,
            softmax_scale=self.spec.scale,
            causal=True,
            window_size=_window_size(window),
            softcap=self.spec.softcap or 0.0,
        )
        return out.squeeze(1)

    def _prefill(self, q: Tensor, cache: LayerCache, rows: LongRows, window: int | None) -> Tensor:
        out: Tensor = flash_attn_varlen_func(
            q,
            cache.keys,
            cache.values,
            rows.query_starts,
            rows.key_starts,
            rows.most_queries,
            rows.most_keys,
            softmax_scale=self.spec.scale,
            causal=True,
            window_size=_window_size(window),
            softcap=self.spec.softcap or 0.0,
            block_table=rows.tables,
        )
        return out


class GraphFlashAttn(GraphAttention):
    """Decode of a fixed number of rows; nothing is planned on the host."""

    def __init__(self, backend: FlashAttention, rows: int, words: Tensor) -> None:
        """words: int32: the rows' lengths, then their tables."""
        self._rows = rows
        self._blocks = len(words) // rows - 1
        ones = (1,) * rows
        tables = words[rows:].view(rows, self._blocks)
        self.step = FlashAttnStep(backend, ones, ones, rows, words[:rows], tables, None)

    def write(
        self, words: Words, key_lengths: Words, tables: Words, query_lengths: Words | None = None
    ) -> int:
        """Lengths, then tables; what lies beyond a row's keys is never read."""
        words[: self._rows] = key_lengths
        words[self._rows :].reshape(self._rows, self._blocks)[:, : tables.shape[1]] = tables
        return len(words)

    def plan(self, buffer: int) -> None:
        """Nothing is left to do."""


def _window_size(window: int | None) -> tuple[int, int]:
    """Keys to the left and to the right of a query; -1: all."""
    return (-1, -1) if window is None else (window - 1, 0)

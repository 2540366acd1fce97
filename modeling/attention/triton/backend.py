"""Paged attention in Triton: any head size, any page size, caps, sinks and slopes.

Rows of one token go to the decode kernel, wherever they are in a step, all others to the prefill
kernel; in captured steps those of a few tokens go to the decode kernel too. Nothing is planned
beyond that: a row's result follows from its own lengths alone, so that captured and launched steps
agree bit by bit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from modeling.attention.base import (
    AttentionBackend,
    AttentionSpec,
    AttentionStep,
    GraphAttention,
    Words,
)
from modeling.attention.kv_cache import FP8, LayerCache
from modeling.attention.pages import RowPages, starts
from modeling.attention.triton.decode import decode_kernel
from modeling.attention.triton.forms import (
    GLUON_LINES,
    decode_form,
    fits_gluon,
    gluon_decode_form,
    padded_head,
    padded_rest,
    prefill_form,
    widened,
)
from modeling.attention.triton.latent_tiles import latent_row_kernel, latent_tile_kernel
from modeling.attention.triton.latents import latent_decode_kernel, latent_prefill_kernel
from modeling.attention.triton.prefill import TILE_WORDS, prefill_kernel
from modeling.kernels.launch import (
    Launcher,
    aligned,
    has_dependent_launch,
    has_warpgroups,
    launch_options,
)
from modeling.transfer import pack_to_device

MAX_HEAD_DIM = 512
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
HEADERS = 4
"""Numbers of a row of a captured step before its pages' numbers."""

NO_WINDOW = 2**30
"""More keys than any row has; the kernels add two of it in 32 bits."""


@dataclass(frozen=True)
class DecodeRows:
    """The rows of few tokens of a step.

    tokens, offsets, lengths: int32 [n], the index of each one's first token in q, where its pages'
    numbers start in the tables, its keys. longest: no row has more keys. room: tokens in q for each
    row. queries: int32 [n], how many of these count; not read where there is room for one. order:
    int32 [n], the rows as they are begun. arrived: int32 zeros [n * heads], in which programs of a
    tile count each other; zeros after each launch.
    """

    tokens: Tensor
    offsets: Tensor
    lengths: Tensor
    longest: int
    room: int
    queries: Tensor
    order: Tensor
    arrived: Tensor


@dataclass(frozen=True)
class TritonStep(AttentionStep):
    """A step's rows as the kernels take them.

    decode: None without rows of one token. tiles: int32 [tiles, TILE_WORDS], the others' tiles,
    or None. tables: int32, contiguous, the numbers of all rows' pages.
    """

    decode: DecodeRows | None
    tiles: Tensor | None
    tables: Tensor


@dataclass(frozen=True)
class Layer:
    """One layer's attention as the kernels take it.

    q, out: [tokens, heads, head_dim], `out` contiguous. parts: the cache's keys and values.
    tables: a step's. window: NO_WINDOW for none. sinks: not read unless has_sinks. factors: of the
    scores, of the cap, of the output.
    """

    q: Tensor
    out: Tensor
    parts: tuple[Tensor, Tensor]
    tables: Tensor
    window: int
    has_sinks: bool
    sinks: Tensor
    factors: tuple[float, float, float]


class TritonAttention(AttentionBackend):
    """Our own kernels, for what FlashInfer and flash-attn lack."""

    name = "triton"

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        shared, processors = device_sizes(spec.device)
        is_latent = spec.value_dim is not None
        self.decode_form = decode_form(spec, shared, processors)
        self.prefill_form = prefill_form(spec, shared)
        kernels = (decode_kernel, prefill_kernel)
        if is_latent:
            kernels = (latent_decode_kernel, latent_prefill_kernel)
        if fits_gluon(spec) and has_warpgroups(spec.device):
            self.decode_form = gluon_decode_form(spec, processors)
            kernels = (latent_row_kernel, latent_tile_kernel)
        self._launch_decode, self._launch_prefill = map(Launcher, kernels)
        self._dependent = has_dependent_launch(spec.device)
        self._value_dim = spec.head_dim if spec.value_dim is None else spec.value_dim
        slopes = spec.alibi or (0.0,) * spec.num_heads
        self._slopes = torch.tensor(slopes, dtype=torch.float32, device=spec.device)
        self._scores = {
            "HEAD_DIM": spec.head_dim,
            "BLOCK_D": padded_head(spec),
            "PDL": self._dependent,
        }
        if is_latent:
            self._scores |= {"VALUE_DIM": self._value_dim, "BLOCK_REST": padded_rest(spec)}
        self._cache = {
            "KV_HEADS": spec.num_kv_heads,
            "GROUP": spec.num_heads // spec.num_kv_heads,
            "PAGE": spec.page_size,
            "CAPPED": spec.softcap is not None,
            "ALIBI": spec.alibi is not None,
        }

    @classmethod
    def lacks(cls, spec: AttentionSpec) -> str | None:
        """CUDA, floats, heads of up to 512; an fp8 cache from compute capability 8.9 on."""
        if spec.device.type != "cuda":
            return "needs a CUDA device"
        if spec.dtype not in FLOATS:
            return f"has no kernels for {spec.dtype}"
        if spec.cache_dtype not in (None, *FLOATS, FP8):
            return f"has no kernels for a cache of {spec.cache_dtype}"
        if (spec.value_dim or spec.head_dim) > MAX_HEAD_DIM:
            return f"head_dim {spec.value_dim or spec.head_dim} is larger than {MAX_HEAD_DIM}"
        own = spec.sinks, spec.softcap, spec.alibi
        if spec.value_dim is not None and (spec.num_kv_heads > 1 or any(own)):
            return "has latents of one head, without sinks, cap or ALiBi, alone"
        if spec.cache_dtype == FP8 and torch.cuda.get_device_capability(spec.device) < (8, 9):
            return "this GPU has no fp8 numbers: set cache.dtype to auto"
        return None

    def prepare(
        self, query_lengths: Sequence[int], key_lengths: Sequence[int], block_tables: Tensor
    ) -> TritonStep:
        """Sort rows by kernel, cut the longer ones into tiles, and ship both in one piece."""
        queries = np.asarray(query_lengths, dtype=np.int32)
        keys = np.asarray(key_lengths, dtype=np.int32)
        at = starts(query_lengths)[:-1]
        tables = block_tables.contiguous()
        offsets = np.arange(len(queries), dtype=np.int32) * tables.shape[1]
        alone = queries == 1
        tiles = self._tiles(np.stack((offsets, at, queries, keys), axis=1)[~alone])
        arrived = np.zeros(alone.sum() * self.spec.num_heads, dtype=np.int32)
        columns = at[alone], offsets[alone], keys[alone], longest_first(keys[alone]), arrived
        tokens, starts_of, lengths, order, zeros, others = pack_to_device(
            (*columns, tiles), tables.device
        )
        decode = None
        if alone.any():
            longest = int(keys[alone].max())
            decode = DecodeRows(tokens, starts_of, lengths, longest, 1, lengths, order, zeros)
        return TritonStep(
            self,
            tuple(query_lengths),
            tuple(key_lengths),
            decode,
            others if len(tiles) else None,
            tables,
        )

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
        """Launch the kernels that the step has rows for."""
        assert isinstance(step, TritonStep), type(step)
        if q.stride()[1:] != (q.shape[2], 1):
            q = q.contiguous()
        layer = Layer(
            q=q,
            out=torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out,
            parts=(cache.keys, cache.values),
            tables=step.tables,
            window=NO_WINDOW if window is None else window,
            has_sinks=sinks is not None,
            sinks=self._slopes if sinks is None else sinks,
            factors=self._factors(cache),
        )
        if step.decode is not None:
            self._decode(layer, step.decode)
        if step.tiles is not None:
            self._prefill(layer, step.tiles)
        return layer.out

    def graph_words(self, rows: int, max_blocks: int, queries: int = 1) -> int | None:
        """What `GraphTriton.write` says; the pages' numbers may fill up."""
        return rows * (HEADERS + max_blocks)

    def graph_form(self, rows: int, words: Tensor, queries: int = 1) -> "GraphTriton":
        """Decode over static words."""
        return GraphTriton(self, rows, words, queries)

    def _tiles(self, rows: Words) -> Words:
        """[tiles, TILE_WORDS] of rows [n, TILE_WORDS - 1], the tiles with most keys first."""
        tokens = self.prefill_form.rows // self.prefill_form.packed
        queries, keys = rows[:, 2], rows[:, 3]
        counts = -(-queries // tokens)
        firsts = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        firsts = firsts.astype(np.int32) * tokens
        found = np.column_stack((np.repeat(rows, counts, axis=0), firsts))
        seen = np.repeat(keys - queries, counts) + firsts
        sorted_tiles: Words = found[np.argsort(-seen, kind="stable")]
        return sorted_tiles

    def _decode(self, layer: Layer, rows: DecodeRows) -> None:
        spec, form = self.spec, self.decode_form
        if rows.room > 1:
            form = widened(form, spec, rows.room)
        count, seen = len(rows.lengths), min(rows.longest, layer.window + rows.room - 1)
        max_count = min(form.max_splits, -(-seen // form.min_split))
        blocks = spec.num_kv_heads * -(-self._cache["GROUP"] // form.packed)
        programs, *shares = form.shares(blocks * count, max_count)
        # Rows that one program computes whole leave nothing in memory; by Gluon's kernel those of
        # one split.
        parts = max_count if form.least == GLUON_LINES else programs
        stored = 0 if parts == 1 else count
        splits = (stored * rows.room, spec.num_heads, max_count)
        device = layer.q.device
        partials = torch.empty(*splits, self._value_dim, dtype=torch.float32, device=device)
        sums = torch.empty(*splits, 2, dtype=torch.float32, device=device)
        pointers: tuple[Tensor, ...]
        pointers = (layer.q, *layer.parts, layer.out, partials, sums, layer.sinks, self._slopes)
        words = (rows.tokens, rows.offsets, rows.lengths, rows.queries, rows.order)
        memory = (rows.arrived, layer.tables)
        stride = layer.q.stride(0)
        self._launch_decode(
            (rows.room, stride, layer.has_sinks, layer.sinks.dtype, aligned(*pointers)),
            (blocks, count, programs),
            (*pointers, *words, *memory, layer.window, max_count, *shares, *layer.factors),
            {
                **self._cache,
                **self._scores,
                "Q_STRIDE": stride,
                "QUERIES": rows.room,
                "PACKED": form.packed,
                "BLOCK_M": max(form.least, form.rows),
                "LIVE_M": form.rows,
                "BLOCK_N": form.keys,
                "MIN_SPLIT": form.min_split,
                "MAX_SPLITS": form.max_splits,
                "CHUNK": form.ahead(self._scores["BLOCK_D"]),
                "SINKS": layer.has_sinks,
            },
            self._options(form.warps, form.stages, form.registers),
        )

    def _prefill(self, layer: Layer, tiles: Tensor) -> None:
        form, stride = self.prefill_form, layer.q.stride(0)
        pointers = (layer.q, *layer.parts, layer.out, layer.sinks, self._slopes)
        blocks = self.spec.num_kv_heads * -(-self._cache["GROUP"] // form.packed)
        sizes = {
            "Q_STRIDE": stride,
            "SINKS": layer.has_sinks,
            "PACKED": form.packed,
            "BLOCK_M": form.rows,
            "BLOCK_N": form.keys,
            "WORDS": TILE_WORDS,
        }
        self._launch_prefill(
            (stride, layer.has_sinks, layer.sinks.dtype, aligned(*pointers)),
            (blocks, len(tiles)),
            (*pointers, tiles, layer.tables, layer.window, *layer.factors),
            {**self._cache, **self._scores, **sizes},
            self._options(form.warps, form.stages),
        )

    def _factors(self, cache: LayerCache) -> tuple[float, float, float]:
        """What the kernels multiply: the scores, the cap (see attend_block), the output."""
        scale = self.spec.scale * cache.scales.keys
        cap = self.spec.softcap
        if cap is None:
            return scale * math.log2(math.e), 0.0, cache.scales.values
        return 2 * scale / cap, cap * math.log2(math.e), cache.scales.values

    def _options(self, warps: int, stages: int, registers: int | None = None) -> dict[str, Any]:
        sizes = {"num_warps": warps, "num_stages": stages, "maxnreg": registers}
        return {**sizes, **launch_options(self._dependent)}


class GraphTriton(GraphAttention):
    """A fixed number of rows, with room for as many tokens each; nothing is planned on the host."""

    def __init__(self, backend: TritonAttention, rows: int, words: Tensor, room: int) -> None:
        """words: int32, laid out as `write` says."""
        self._rows = rows
        self._page_size = backend.spec.page_size
        tokens = torch.arange(rows, dtype=torch.int32, device=words.device) * room
        longest = (len(words) // rows - HEADERS) * self._page_size
        lengths, offsets, queries, order = words[: HEADERS * rows].view(HEADERS, rows)
        arrived = torch.zeros(rows * backend.spec.num_heads, dtype=torch.int32, device=words.device)
        decode = DecodeRows(tokens, offsets, lengths, longest, room, queries, order, arrived)
        rooms = (room,) * rows
        self.step = TritonStep(backend, rooms, rooms, decode, None, words[HEADERS * rows :])
        self._lengths: Tensor = lengths

    @property
    def key_lengths(self) -> Tensor:
        """Kernels may write them that are no dependent launches, and not right before attention."""
        return self._lengths

    def write(
        self, words: Words, key_lengths: Words, tables: Words, query_lengths: Words | None = None
    ) -> int:
        """Lengths, where pages start, queries, the rows' order, then pages' numbers, row by row."""
        rows, pages = self._rows, RowPages.of(key_lengths, self._page_size)
        words[:rows] = key_lengths
        words[rows : 2 * rows] = pages.indptr[:-1]
        words[2 * rows : 3 * rows] = 1 if query_lengths is None else query_lengths
        words[3 * rows : 4 * rows] = longest_first(words[:rows])
        start = HEADERS * rows
        end = start + pages.total
        words[start:end] = tables[pages.within(tables.shape[1])]
        return end

    def plan(self, buffer: int) -> None:
        """Nothing is left to do."""


def longest_first(lengths: Words) -> Words:
    """The rows' indices, int32, those with most keys first."""
    order: Words = np.argsort(-lengths, kind="stable").astype(np.int32)
    return order


def device_sizes(device: torch.device) -> tuple[int, int]:
    """Bytes of shared memory that one program may take, and the number of multiprocessors."""
    index = torch.cuda.current_device() if device.index is None else device.index
    found = triton.runtime.driver.active.utils.get_device_properties(index)
    return found["max_shared_mem"], found["multiprocessor_count"]

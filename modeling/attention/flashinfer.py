"""Paged attention by FlashInfer: split-KV decode and causal prefill over the cache as it lies.

Leading rows of one token go to the decode kernel, all others to the prefill kernel, which takes
rows of any length. Over an fp8 cache both are FlashInfer's "fa2" kernels, which bring keys and
values to the type of q on their way; its faster prefill on a Hopper ("fa3") would want fp8
queries. A plan is computed on the host and copied from one pinned buffer, so every plan exists
twice, used alternately: a buffer is rewritten only after its copy was executed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import flashinfer
import numpy as np
import torch
from flashinfer.decode import fast_decode_plan
from torch import Tensor

from modeling.attention.base import (
    AttentionBackend,
    AttentionSpec,
    AttentionStep,
    GraphAttention,
    Words,
)
from modeling.attention.kv_cache import FP8, LayerCache
from modeling.attention.pages import RowPages, leading_decodes, starts
from modeling.kernels.cache import read_libraries
from modeling.transfer import to_device

HEAD_DIMS = (64, 128, 256)
MIN_WORKSPACE_BYTES = 128 * 2**20
"""What FlashInfer recommends for the partial results of split rows."""

PLAN_BYTES = 2**20
"""Of one captured step's plan: some 30 bytes a row and a tile."""

MAX_CAPTURED_ROWS = 256
MAX_TILE = 128
"""Queries that the kernels compute together at most."""

ALIGNED_WORDS = 32
"""128 bytes of int32, a line of a GPU's cache."""

Wrapper = Any


@dataclass(frozen=True)
class WindowPlan:
    """The planned wrappers for layers of one window; None where no row needs it."""

    decode: Wrapper | None
    prefill: Wrapper | None


@dataclass(frozen=True)
class FlashInferStep(AttentionStep):
    """A step's plan for each of the model's windows; the first num_decode rows are decode rows."""

    plans: dict[int | None, WindowPlan]
    num_decode: int


@dataclass(frozen=True)
class EagerPlan:
    """One of two sets of eager wrappers, and the event behind its last plan."""

    wrappers: dict[int | None, WindowPlan]
    planned: torch.cuda.Event


class FlashInferAttention(AttentionBackend):
    """FlashInfer's batch wrappers, tensor cores in both kernels, any page size."""

    name = "flashinfer"

    def __init__(self, spec: AttentionSpec) -> None:
        """Allocate the workspace that all plans share: kernels of one stream never overlap."""
        super().__init__(spec)
        read_libraries()
        processors = torch.cuda.get_device_properties(spec.device).multi_processor_count
        size = workspace_bytes(spec, processors)
        self._workspace = torch.zeros(size, dtype=torch.uint8, device=spec.device)
        self._plans: dict[int | None, Tensor] = {
            window: torch.zeros(PLAN_BYTES, dtype=torch.uint8, device=spec.device)
            for window in spec.windows
        }
        self._eager_plans = (self._new_plan(), self._new_plan())
        self._next = 0

    @classmethod
    def lacks(cls, spec: AttentionSpec) -> str | None:
        """Half precision over a cache of the same or of fp8, three head sizes, no sinks, CUDA."""
        if spec.device.type != "cuda":
            return "needs a CUDA device"
        if spec.dtype not in (torch.float16, torch.bfloat16):
            return f"has no kernels for {spec.dtype}, only float16 and bfloat16"
        if spec.cache_dtype not in (None, spec.dtype, FP8):
            return f"has no kernels for a cache of {spec.cache_dtype} with {spec.dtype}"
        if spec.head_dim not in HEAD_DIMS:
            return f"head_dim {spec.head_dim} is not one of {HEAD_DIMS}"
        if spec.value_dim is not None:
            return "is not given latents"
        return "has no sinks" if spec.sinks else "has no ALiBi" if spec.alibi else None

    def prepare(
        self, query_lengths: Sequence[int], key_lengths: Sequence[int], block_tables: Tensor
    ) -> FlashInferStep:
        """Plan the rows for each window; nothing waits for the device's earlier steps."""
        queries, keys = tuple(query_lengths), tuple(key_lengths)
        num_decode = leading_decodes(queries)
        eager = self._eager_plans[self._next]
        self._next ^= 1
        eager.planned.synchronize()
        decode = self._pages(keys[:num_decode], block_tables, 0)
        prefill = self._pages(keys[num_decode:], block_tables, num_decode)
        plans = {}
        for window, wrappers in eager.wrappers.items():
            if decode is not None:
                self._plan_decode(wrappers.decode, decode, window)
            if prefill is not None:
                self._plan_prefill(wrappers.prefill, queries[num_decode:], prefill, window)
            plans[window] = WindowPlan(
                wrappers.decode if decode else None, wrappers.prefill if prefill else None
            )
        eager.planned.record()
        return FlashInferStep(self, queries, keys, plans, num_decode)

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
        """Run the window's plan, decode rows first."""
        assert isinstance(step, FlashInferStep), type(step)
        plan, split = step.plans[window], step.num_decode
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        pages = (cache.keys, cache.values)
        # The scores take the keys' scale along with their own.
        options = {"k_scale": cache.scales.keys} if cache.quantised else {}
        if plan.decode is not None:
            plan.decode.run(q[:split], pages, out=out[:split], **options)
        if plan.prefill is not None:
            plan.prefill.run(q[split:], pages, out=out[split:], **options)
        return out if cache.scales.values == 1.0 else out.mul_(cache.scales.values)

    def graph_words(self, rows: int, max_blocks: int, queries: int = 1) -> int | None:
        """Row starts, last pages' lengths, and the ragged page list, which may fill up."""
        return _indices_at(rows) + rows * max_blocks if queries == 1 else None

    def graph_form(self, rows: int, words: Tensor, queries: int = 1) -> "GraphDecode":
        """Wrappers of a fixed number of rows, over `words`."""
        return GraphDecode(self, rows, words)

    def captured_wrapper(self, window: int | None, parts: tuple[Tensor, Tensor, Tensor]) -> Wrapper:
        """A decode wrapper over static buffers; those of one window share their plan's memory.

        parts: row starts, page list, last pages' lengths.
        """
        indptr, indices, last = parts
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last,
        )
        # Both wrappers plan into the device memory that the graph reads, from two host buffers.
        wrapper.reset_workspace_buffer(self._workspace, self._plans[window])
        return wrapper

    def plan_options(self, window: int | None) -> dict[str, Any]:
        """Arguments of every plan beside the rows."""
        return {
            "window_left": -1 if window is None else window - 1,
            "q_data_type": self.spec.dtype,
            "kv_data_type": self.spec.cache_dtype or self.spec.dtype,
            "sm_scale": self.spec.scale,
            "logits_soft_cap": self.spec.softcap,
        }

    def _new_plan(self) -> EagerPlan:
        decode = partial(flashinfer.BatchDecodeWithPagedKVCacheWrapper, use_tensor_cores=True)
        prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        wrappers = {
            window: WindowPlan(decode(self._workspace, "NHD"), prefill(self._workspace, "NHD"))
            for window in self.spec.windows
        }
        return EagerPlan(wrappers, torch.cuda.Event())  # type: ignore[no-untyped-call]

    def _pages(
        self, key_lengths: Sequence[int], tables: Tensor, first_row: int
    ) -> tuple[RowPages, Tensor] | None:
        """The rows' pages and their ragged list on the device; None for no rows."""
        if not key_lengths:
            return None
        pages = RowPages.of(key_lengths, self.spec.page_size)
        width = tables.shape[1]
        at = np.flatnonzero(pages.within(width)) + first_row * width
        return pages, tables.reshape(-1)[to_device(at, tables.device)]

    def _plan_decode(
        self, wrapper: Wrapper, rows: tuple[RowPages, Tensor], window: int | None
    ) -> None:
        pages, indices = rows
        spec = self.spec
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.page_size)
        options = self.plan_options(window)
        wrapper.plan(_pinned(pages.indptr), indices, _pinned(pages.last), *heads, **options)

    def _plan_prefill(
        self,
        wrapper: Wrapper,
        queries: Sequence[int],
        rows: tuple[RowPages, Tensor],
        window: int | None,
    ) -> None:
        pages, indices = rows
        spec = self.spec
        wrapper.plan(
            _pinned(starts(queries)),
            _pinned(pages.indptr),
            indices,
            _pinned(pages.last),
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.page_size,
            causal=True,
            **self.plan_options(window),
        )


class GraphDecode(GraphAttention):
    """Decode of a fixed number of rows, for graphs; rows beyond the step's are planned too."""

    def __init__(self, backend: FlashInferAttention, rows: int, words: Tensor) -> None:
        """words: int32, laid out as `write` says. The first plan here compiles the kernels."""
        assert rows <= MAX_CAPTURED_ROWS, rows
        self._backend = backend
        self._rows = rows
        last_at, indices_at = _last_at(rows), _indices_at(rows)
        self._indices = words[indices_at:]
        parts = (words[: rows + 1], self._indices, words[last_at : last_at + rows])
        windows = backend.spec.windows
        self._wrappers = tuple(
            {window: backend.captured_wrapper(window, parts) for window in windows}
            for _ in range(2)
        )
        self._pages = RowPages.of([1] * rows, backend.spec.page_size)
        spec = backend.spec
        self._heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.page_size)
        self._plan_first()
        plans = {window: WindowPlan(w, None) for window, w in self._wrappers[0].items()}
        ones = (1,) * rows
        self.step = FlashInferStep(backend, ones, ones, plans, rows)

    def write(
        self, words: Words, key_lengths: Words, tables: Words, query_lengths: Words | None = None
    ) -> int:
        """Row starts, last pages' lengths, page list, each at an aligned offset."""
        pages = RowPages.of(key_lengths, self._backend.spec.page_size)
        last_at, indices_at = _last_at(self._rows), _indices_at(self._rows)
        words[: self._rows + 1] = pages.indptr
        words[last_at : last_at + self._rows] = pages.last
        end = indices_at + pages.total
        words[indices_at:end] = tables[pages.within(tables.shape[1])]
        self._pages = pages
        return end

    def plan(self, buffer: int) -> None:
        """Spread the rows over the device's processors, for each window."""
        indptr = torch.from_numpy(self._pages.indptr)
        last = torch.from_numpy(self._pages.last)
        for window, wrapper in self._wrappers[buffer].items():
            fast_decode_plan(
                wrapper,
                indptr,
                self._indices,
                last,
                *self._heads,
                **self._backend.plan_options(window),
                global_override_indptr_cpu=indptr,
            )

    def _plan_first(self) -> None:
        """Let every wrapper load its kernels, over rows of one key in page 0."""
        indptr, last = _pinned(self._pages.indptr), _pinned(self._pages.last)
        indices = torch.zeros(self._rows, dtype=torch.int32, device=self._backend.spec.device)
        for wrappers in self._wrappers:
            for window, wrapper in wrappers.items():
                options = self._backend.plan_options(window)
                wrapper.plan(indptr, indices, last, *self._heads, **options)


def workspace_bytes(spec: AttentionSpec, num_processors: int) -> int:
    """Bytes of float32 partial outputs and their scales, for the widest plan of any step.

    num_processors: of the device; a split step has at most two tiles for each.
    """
    group = spec.num_heads // spec.num_kv_heads
    tile = _tile(group)
    tiles = -(-MAX_CAPTURED_ROWS * group // tile) + MAX_CAPTURED_ROWS
    split = 2 * num_processors // spec.num_kv_heads + 1
    rows = max(max(tiles, split) * tile, split * MAX_TILE)
    return max(MIN_WORKSPACE_BYTES, spec.num_heads * rows * (spec.head_dim + 1) * 4 + 2**20)


def _tile(group: int) -> int:
    """Rows of the decode kernel's tile: it grows when more query heads share a KV head."""
    return next((tile for tile in (16, 64) if group <= tile), MAX_TILE)


def _pinned(array: Words) -> Tensor:
    """A host tensor that can be copied without a stop."""
    return torch.from_numpy(array).pin_memory()


def _last_at(rows: int) -> int:
    return _aligned(rows + 1)


def _indices_at(rows: int) -> int:
    return _last_at(rows) + _aligned(rows)


def _aligned(words: int) -> int:
    return -(-words // ALIGNED_WORDS) * ALIGNED_WORDS

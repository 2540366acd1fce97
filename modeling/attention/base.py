"""The contract of paged attention.

    a[t, h, j] = cap( scale * q[t, h] . K[j, h // group] ) + slope[h] * (j - p)
    o[t, h] = sum_j exp(a[t, h, j]) V[j, h // group] / ( exp(sink[h]) + sum_j exp(a[t, h, j]) )

t: a token of a row with query length n and key length s, the i-th of its n tokens, at position
p = s - n + i; j runs over the row's positions 0 .. p (causal, aligned to the end), in a layer with
a window w only over the last w of them. K[j], V[j] lie where the row's block table says: page
table[j // page_size], offset j % page_size. group: query heads that share a KV head. A step
mixes rows of any lengths: prefill, chunk and decode differ in numbers.

Few models have a cap (cap(x) = softcap * tanh(x / softcap), else x), slopes (ALiBi, else 0) or
sinks (logits without a key, else -inf). Where values are the first numbers of the keys (latents),
they are stored once, and what o has behind these means nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from modeling.attention.kv_cache import LayerCache

Words = npt.NDArray[np.int32]


@dataclass(frozen=True)
class AttentionSpec:
    """What a backend is built for.

    num_heads, num_kv_heads: this rank's. dtype: of q and of the output. scale: of the scores,
    before the softmax. page_size: tokens in a page. windows: every window that some layer has,
    in tokens; None is a layer that sees all. cache_dtype: of the cached keys and values, None
    for `dtype`. softcap: the cap of the scores, None: none. sinks: whether some layer has sinks.
    alibi: the slope of each of this rank's heads, None: none. index_topk: how many positions, which
    an index chooses, a token sees at most (sparse.py); None: all. value_dim: values are the first
    so many numbers of the keys; None: they are stored beside them.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    page_size: int
    dtype: torch.dtype
    device: torch.device
    windows: tuple[int | None, ...] = (None,)
    cache_dtype: torch.dtype | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: tuple[float, ...] | None = None
    index_topk: int | None = None
    value_dim: int | None = None


@dataclass(frozen=True)
class AttentionStep:
    """One step's lengths and the backend that prepared it (the seeds' `seqlen`).

    query_lengths: tokens of each row in this step. key_lengths: of each row after this step,
    cached ones included. Backends extend it with their own plan.
    """

    backend: "AttentionBackend"
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]


class GraphAttention(ABC):
    """Attention of steps of one size inside a graph: same addresses, new contents.

    Every row has room for the same number of tokens. Before each replay `write` fills host memory,
    which the caller sends to the device words that this was made with, and `plan` does what is
    left, on the current stream.
    """

    step: AttentionStep

    @property
    def key_lengths(self) -> Tensor | None:
        """Where the graph reads key lengths, int32 [rows], if kernels of it may write them too."""
        return None

    @abstractmethod
    def write(
        self, words: Words, key_lengths: Words, tables: Words, query_lengths: Words | None = None
    ) -> int:
        """Put a step's numbers into `words`; returns how many of them must reach the device.

        words: int32, as many as `graph_words` said. key_lengths: int32 [rows]. tables: int32
        [rows, blocks used]. query_lengths: int32 [rows], None for one each; what is computed for
        the tokens behind them means nothing.
        """

    @abstractmethod
    def plan(self, buffer: int) -> None:
        """Plan what `write` saw last. buffer: 0 or 1; its last plan has been executed."""


class AttentionBackend(ABC):
    """One way to compute paged attention.

    scratch_bytes: what a step may take beyond what the steps that are tried at start do.
    """

    name: str
    scratch_bytes = 0

    def __init__(self, spec: AttentionSpec) -> None:
        """Build for one model on one device; ValueError says what this backend lacks for it."""
        reason = self.lacks(spec)
        if reason is not None:
            raise ValueError(f"attention backend {self.name!r}: {reason}")
        self.spec = spec

    @classmethod
    @abstractmethod
    def lacks(cls, spec: AttentionSpec) -> str | None:
        """Why this backend cannot serve `spec` (page size, head size, type, sinks), or None."""

    @abstractmethod
    def prepare(
        self, query_lengths: Sequence[int], key_lengths: Sequence[int], block_tables: Tensor
    ) -> AttentionStep:
        """Plan one step, once for all layers.

        block_tables: int32 [rows, max_blocks] on the device; entries beyond a row's keys are
        never read as keys. Every row has 1 <= query length <= key length.
        """

    @abstractmethod
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
        """q [tokens, heads, head_dim] to the same shape; this step's k and v are stored already.

        cu_seqlen: int32 [rows + 1], where each row's tokens start. step: from `prepare`.
        window: this layer's, one of the spec's. sinks: this layer's, [heads] of this rank in any
        float type; None for a layer without. out: contiguous memory for the result; it is returned.
        """

    def graph_words(self, rows: int, max_blocks: int, queries: int = 1) -> int | None:
        """How many int32 a captured step of `rows` rows reads; None: it has no such form.

        max_blocks: in the longest row's table. queries: tokens that each row has room for.
        """
        return None

    def graph_form(self, rows: int, words: Tensor, queries: int = 1) -> GraphAttention:
        """Attention of captured steps, over static device memory `words` (int32)."""
        raise NotImplementedError(f"attention backend {self.name!r} has no captured form")

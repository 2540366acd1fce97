"""How the Triton kernels cut their work: sizes that were timed with `benchmarks.attention`."""

from dataclasses import dataclass, replace

import torch

from modeling.attention.base import AttentionSpec

SMALL_SHARED = 2**17
"""Bytes of shared memory of one program; GPUs with less than this load fewer blocks ahead."""


@dataclass(frozen=True)
class DecodeForm:
    """How rows of few tokens are computed.

    rows: of a tile (tokens times packed heads), a power of two, at least 16. packed: query heads of
    a tile, of those that share a KV head. keys: of a block, a power of two. warps: of a program.
    stages: blocks that are loaded ahead, and the current one. min_split: keys that are worth a
    split. max_splits: of a row, a power of two. programs: about how many of a launch are enough;
    with more rows, each takes several splits.
    """

    rows: int
    packed: int
    keys: int
    warps: int
    stages: int
    min_split: int
    max_splits: int
    programs: int = 1024


@dataclass(frozen=True)
class PrefillForm:
    """How rows of several tokens are computed.

    rows: of a tile (tokens times packed heads), a power of two. packed: heads of a tile, of those
    that share a KV head. keys, warps, stages: as in DecodeForm.
    """

    rows: int
    packed: int
    keys: int
    warps: int
    stages: int


def padded_head(spec: AttentionSpec) -> int:
    """The power of two that holds a head."""
    return max(16, _power(spec.head_dim))


def decode_form(spec: AttentionSpec, shared: int) -> DecodeForm:
    """For rows of one token; shared: bytes of shared memory that one program may take."""
    width = padded_head(spec)
    group = spec.num_heads // spec.num_kv_heads
    packed = min(group, _most_rows(width))
    # Without tensor cores the products of a block are all in registers.
    numbers = 2048 if spec.dtype == torch.float32 else 8192
    keys = min(128, max(16, numbers // width))
    tiles = spec.num_kv_heads * -(-group // packed)
    return DecodeForm(
        rows=max(16, _power(packed)),
        packed=packed,
        keys=keys,
        warps=4,
        stages=3 if shared >= SMALL_SHARED else 2,
        min_split=192,
        max_splits=min(128, max(8, _power(256 // tiles))),
    )


def widened(form: DecodeForm, spec: AttentionSpec, queries: int) -> DecodeForm:
    """The form for rows of up to so many tokens, which are in one tile."""
    most = _most_rows(padded_head(spec))
    if spec.dtype == torch.float32:
        most = min(most, 32)
    packed = min(spec.num_heads // spec.num_kv_heads, max(1, most // queries))
    return replace(form, rows=max(16, _power(packed * queries)), packed=packed)


def prefill_form(spec: AttentionSpec, shared: int) -> PrefillForm:
    """shared: bytes of shared memory that one program may take."""
    width = padded_head(spec)
    packed = min(8, spec.num_heads // spec.num_kv_heads)
    large = shared >= SMALL_SHARED
    if spec.dtype == torch.float32:
        # Without tensor cores: for comparison with the reference, not for speed.
        return PrefillForm(16 if width > 128 else 32, packed, 16 if width > 128 else 32, 4, 1)
    if width <= 64:
        return PrefillForm(128, packed, 64, 4, 3)
    if width == 128:
        return PrefillForm(128, packed, 64, 8, 3 if large else 2)
    if width == 256:
        return PrefillForm(64, packed, 32, 4, 3 if large else 2)
    return PrefillForm(64, packed, 16, 8, 2 if large else 1)


def _most_rows(width: int) -> int:
    """Rows of a decode tile, at most, for heads of a padded width."""
    return max(16, min(64, 8192 // width))


def _power(count: int) -> int:
    """The next power of two."""
    return 1 << max(0, count - 1).bit_length()

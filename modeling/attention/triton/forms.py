"""How the Triton kernels cut their work: sizes that were timed with `benchmarks.attention`."""

from dataclasses import dataclass, replace

import torch

from modeling.attention.base import AttentionSpec

SMALL_SHARED = 2**17
"""Bytes of shared memory of one program; GPUs with less than this load fewer blocks ahead."""

LARGE_SHARED = 3 * 2**16
"""Bytes of shared memory that a program may take on an H100, an H200 or a B200, at least."""

LEAST_TILE = 16
"""Lines of a product's first factor, at least."""

LATENT_HEADS, LATENT_SPLITS = 32, 32
"""Heads of a tile at most that share latents, and splits of a row."""

GLUON_LINES = 64
"""Lines of a product of Gluon's kernels over latents."""

LOADED_NUMBERS = 4096
"""Numbers of splits' results that a program loads at once: 32 of a thread."""

LONG_KEYS, LEAST_KEYS = 1024, 512
"""Keys of a program of a long row, where as many programs run at once as there are tiles; more
where there are more tiles, fewer where there are fewer. It must not end long after all others."""


@dataclass(frozen=True)
class DecodeForm:
    """How rows of few tokens are computed.

    rows: of a tile (tokens times packed heads), a power of two. packed: query heads of a tile, of
    those that share a KV head. keys: of a block, a power of two. warps: of a program. stages:
    blocks that are loaded ahead, and the current one. min_split: keys that are worth a split.
    max_splits: of a row, a power of two. at_once: programs that the GPU runs at the same time.
    registers: of a thread at most, or None. programs: about how many of a launch are enough. least:
    lines that a product has, if a tile has fewer.
    """

    rows: int
    packed: int
    keys: int
    warps: int
    stages: int
    min_split: int
    max_splits: int
    at_once: int
    registers: int | None = None
    programs: int = 4096
    least: int = LEAST_TILE

    def shares(self, tiles: int, splits: int) -> tuple[int, int, int]:
        """Return programs of each tile at most, of a short row, and the keys of one in a long row.

        tiles: of a launch; those of short rows run at once, if they can. splits: of a row at most.
        """
        most = max(1, min(splits, self.programs // tiles))
        keys = max(LEAST_KEYS, LONG_KEYS * tiles // self.at_once)
        return most, max(1, self.at_once // tiles), keys

    def ahead(self, width: int) -> int:
        """Return how many splits' results are loaded at once; width: of a head, padded."""
        return max(1, min(8, LOADED_NUMBERS // (self.rows * width)))


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
    """The power of two that holds what of a key meets a value's width: all but of latents."""
    return max(16, _power(spec.value_dim or spec.head_dim))


def padded_rest(spec: AttentionSpec) -> int:
    """The power of two that holds the rest of a key that begins with its value, else 0."""
    return 0 if spec.value_dim is None else max(16, _power(spec.head_dim - spec.value_dim))


def decode_form(spec: AttentionSpec, shared: int, processors: int) -> DecodeForm:
    """For rows of one token.

    shared: bytes of shared memory that one program may take. processors: multiprocessors.
    """
    if spec.value_dim is not None:
        return _latent_decode_form(spec, shared, processors)
    width = padded_head(spec)
    group = spec.num_heads // spec.num_kv_heads
    packed = min(group, _most_rows(width))
    # Without tensor cores the products of a block are all in registers.
    numbers = 2048 if spec.dtype == torch.float32 else 8192
    keys = min(64, max(16, numbers // width))
    registers = None
    if spec.dtype != torch.float32 and width == 128:
        # Four programs of a multiprocessor at once, instead of two with blocks of 64 keys.
        keys, registers = 32, 128
    tiles = spec.num_kv_heads * -(-group // packed)
    stages = 3 if shared >= SMALL_SHARED else 2
    taken = 2 * stages * keys * width * (spec.cache_dtype or spec.dtype).itemsize
    return DecodeForm(
        rows=_power(packed),
        packed=packed,
        keys=keys,
        warps=4,
        stages=stages,
        min_split=96,
        max_splits=min(128, max(8, _power(256 // tiles))),
        # Registers of a multiprocessor are enough for some four.
        at_once=processors * max(1, min(4, shared // taken)),
        registers=registers,
    )


def _latent_decode_form(spec: AttentionSpec, shared: int, processors: int) -> DecodeForm:
    """For rows of one token over latents: one program of a multiprocessor at once."""
    packed, (keys, stages) = _latent_heads(spec), _latent_blocks(spec, shared)
    return DecodeForm(_power(packed), packed, keys, 8, stages, 128, LATENT_SPLITS, processors)


def gluon_decode_form(spec: AttentionSpec, processors: int) -> DecodeForm:
    """For rows of one token over latents by Gluon's kernels."""
    packed = _latent_heads(spec, GLUON_LINES)
    # What a split adds up is written and read again: more where there are more heads.
    split = 128 * -(-spec.num_heads // 32)
    sizes = (_power(packed), packed, 64, 8, 2, split, LATENT_SPLITS, processors)
    return DecodeForm(*sizes, least=GLUON_LINES)


def _latent_heads(spec: AttentionSpec, most: int = LATENT_HEADS) -> int:
    """Heads of a tile over latents, in tiles of about as many."""
    most = LEAST_TILE if spec.dtype == torch.float32 else most
    return -(-spec.num_heads // -(-spec.num_heads // most))


def _latent_blocks(spec: AttentionSpec, shared: int) -> tuple[int, int]:
    """Keys of a block of latents, and stages: warpgroups' instructions take 64 at a time."""
    if spec.dtype == torch.float32:
        return 16, 1
    return (64, 2) if shared >= LARGE_SHARED else (32 if shared >= SMALL_SHARED else 16, 2)


def widened(form: DecodeForm, spec: AttentionSpec, queries: int) -> DecodeForm:
    """The form for rows of up to so many tokens, which are in one tile."""
    most = _most_rows(padded_head(spec))
    if spec.value_dim is not None:
        most = max(LATENT_HEADS, form.least)
    if spec.dtype == torch.float32:
        most = min(most, 32)
    packed = min(spec.num_heads // spec.num_kv_heads, max(1, most // queries))
    rows = _power(packed * queries)
    # More lines take more registers; fewer lines than the least product has take as many as it.
    registers = form.registers if rows <= LEAST_TILE else None
    return replace(form, rows=rows, packed=packed, registers=registers)


def prefill_form(spec: AttentionSpec, shared: int) -> PrefillForm:
    """shared: bytes of shared memory that one program may take."""
    if spec.value_dim is not None:
        packed, (keys, stages) = _latent_heads(spec), _latent_blocks(spec, shared)
        rows = 64 if keys == 64 else max(LEAST_TILE, _power(packed))
        return PrefillForm(rows, packed, keys, 8, stages)
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
    if width == 256 and shared >= LARGE_SHARED:
        return PrefillForm(128, packed, 32, 8, 3)
    if width == 256:
        return PrefillForm(64, packed, 32, 4, 2)
    return PrefillForm(64, packed, 16, 8, 2 if large else 1)


def fits_gluon(spec: AttentionSpec) -> bool:
    """Whether latents are such as Gluon's kernels take: powers of two, in 16 bits."""
    if spec.value_dim is None or spec.dtype == torch.float32:
        return False
    sizes = padded_head(spec), padded_rest(spec)
    is_whole = sizes == (spec.value_dim, spec.head_dim - spec.value_dim)
    return is_whole and sizes[0] >= 64 and sizes[1] <= 64 and spec.cache_dtype in (None, spec.dtype)


def _most_rows(width: int) -> int:
    """Rows of a decode tile, at most, for heads of a padded width."""
    return max(16, min(64, 8192 // width))


def _power(count: int) -> int:
    """The next power of two."""
    return 1 << max(0, count - 1).bit_length()

"""What an fp8 cache's scales should be, where the checkpoint does not say: measured at start."""

import math

import torch

from configs.architectures.base import ModelArchitecture
from modeling.attention.kv_cache import FP8_MAX, CacheScales, LayerCache, allocate
from modeling.attention.sdpa import SdpaAttention
from modeling.models.base import PagedModel, attention_spec, cache_spec
from modeling.models.context import PagedContext
from sharding.group import TensorParallel

ROWS, LENGTH = 4, 256
"""Sequences that are computed, and the tokens of each."""

HEAD_ROOM = 16
"""How many times the largest measured value the largest stored one is at least.

Adapters and texts may go beyond what random tokens reach. The room costs next to nothing: e4m3
numbers are as exact at a 16,384th of the largest as there. On the tests' models answers are as
near to float32's from 1 to 1024, and worse at 1/4 and at 16,384.
"""

_PAGE_SIZE = 16


@torch.inference_mode()
def measured_scales(
    model: PagedModel, architecture: ModelArchitecture, longest: int, group: TensorParallel
) -> tuple[CacheScales, ...]:
    """Compute random tokens of the base model, and see how large keys and values get.

    longest: sequence in tokens. All ranks call it together and return the same. Scales are powers
    of two, so that what is stored keeps all its bits in any type. ValueError where the
    model's keys or values are not finite.
    """
    length = min(LENGTH, longest)
    cache = _computed(model, _tokens(architecture, length))
    largest = torch.stack([part.abs().amax() for c in cache for part in (c.keys, c.values)])
    largest = group.all_gather(largest.float()).view(group.size, -1).amax(0)
    if not largest.isfinite().all():
        raise ValueError(
            "cache.dtype: fp8: the model's keys or values are not finite on random tokens, so "
            "their scales cannot be measured: set cache.dtype to auto, or model.dtype to float32"
        )
    found = [_scale(value) for value in largest.tolist()]
    return tuple(CacheScales(*pair) for pair in zip(found[::2], found[1::2], strict=True))


def _tokens(architecture: ModelArchitecture, length: int) -> torch.Tensor:
    """Int64 [rows, length], every server's the same; each row begins as a text does."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(architecture.vocab_size, (ROWS, length), generator=generator)
    first = architecture.bos_token_id
    if first is not None and first < architecture.vocab_size:
        tokens[:, 0] = first
    return tokens


def _computed(model: PagedModel, tokens: torch.Tensor) -> list[LayerCache]:
    """The layers' caches, in the model's own type, after a prefill of the rows."""
    rows, length = tokens.shape
    pages = -(-length // _PAGE_SIZE)
    device = model.device
    cache = allocate(cache_spec(model, _PAGE_SIZE), rows * pages, device)
    tables = torch.arange(rows * pages, dtype=torch.int32, device=device).view(rows, pages)
    positions = torch.arange(length, device=device).repeat(rows, 1)
    first = torch.arange(rows, device=device).unsqueeze(1) * (pages * _PAGE_SIZE)
    backend = SdpaAttention(attention_spec(model, _PAGE_SIZE))
    step = backend.prepare([length] * rows, [length] * rows, tables)
    model.paged(
        tokens.flatten().to(device),
        positions.flatten(),
        PagedContext(
            cache,
            torch.arange(rows + 1, dtype=torch.int32, device=device) * length,
            tables,
            (first + positions).flatten(),
            step,
        ),
        skip_lm_head=True,
    )
    return cache


def _scale(largest: float) -> float:
    """The least power of two that leaves the head-room."""
    return 2.0 ** math.ceil(math.log2(largest * HEAD_ROOM / FP8_MAX)) if largest else 1.0

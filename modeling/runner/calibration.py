"""What an fp8 cache's scales should be, where the checkpoint does not say: measured at start."""

import math
from typing import NoReturn

import torch

from configs.architectures.base import ModelArchitecture
from configs.wire.plan import RequestJoin, StepRow
from configs.wire.sampling import Sampling
from modeling.attention.kv_cache import FP8_MAX, CacheScales, LayerCache, allocate
from modeling.attention.kv_layout import KvLayout
from modeling.attention.sdpa import SdpaAttention
from modeling.models.base import PagedModel
from modeling.models.kv_groups import attention_specs, kv_layout
from modeling.runner.block_tables import BatchSize
from modeling.runner.forward import PagedForward, prepare
from modeling.runner.input_batch import InputBatch
from modeling.runner.state_rows import state_rows
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
    layout = kv_layout(model, _PAGE_SIZE)
    size = BatchSize(rows, length, _PAGE_SIZE, tuple(group.kv for group in layout.groups))
    count = size.blocks(length)
    cache = _apart(layout, rows * count, model.device)
    batch = InputBatch(size, model.device)
    known = enumerate(tokens.tolist())
    batch.join([RequestJoin(row, own, length, -1, Sampling()) for row, own in known])
    blocks = [list(range(row * count, (row + 1) * count)) for row in range(rows)]
    step = [StepRow(row, 0, length, own, False) for row, own in enumerate(blocks)]
    inputs = batch.inputs(batch.layout(step))
    backends = [SdpaAttention(spec) for spec in attention_specs(model, layout)]
    states = () if model.states is None else state_rows(inputs.layout, None, _no_adapters)
    PagedForward(model, cache).hidden(inputs, prepare(backends, inputs), None, states)
    return cache


def _no_adapters(*_runs: object) -> NoReturn:
    raise AssertionError("all rows are the base model's")


def _apart(layout: KvLayout, num_blocks: int, device: torch.device) -> list[LayerCache]:
    """Memory of its own for each layer: in shared pages the largest would be any layer's."""
    made: dict[int, LayerCache] = {}
    for index, group in enumerate(layout.groups):
        for layer, cache in zip(
            group.layers, allocate(group.spec, num_blocks, device), strict=True
        ):
            cache.group = index
            made[layer] = cache
    return [made[source] for source in layout.sources]


def _scale(largest: float) -> float:
    """The least power of two that leaves the head-room."""
    return 2.0 ** math.ceil(math.log2(largest * HEAD_ROOM / FP8_MAX)) if largest else 1.0

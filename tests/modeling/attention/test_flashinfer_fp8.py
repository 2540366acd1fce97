"""FlashInfer over an fp8 cache against SDPA over the same one, on a GPU."""

import numpy as np
import pytest
import torch

from modeling.attention.base import AttentionSpec
from modeling.attention.kv_cache import FP8, CacheScales, CacheSpec, allocate
from modeling.attention.sdpa import SdpaAttention
from tests.modeling.attention.test_flashinfer import STEPS, Paged, check, make_backend, make_spec

pytestmark = pytest.mark.gpu

SCALES = CacheScales(2.0**-5, 2.0**-6)
ODD_SCALES = CacheScales(0.0213, 0.0171)


def fp8_spec(**fields: object) -> AttentionSpec:
    return make_spec(16, cache_dtype=FP8, **fields)


def fp8_paged(
    spec: AttentionSpec, lengths: list[tuple[int, int]], scales: CacheScales = SCALES
) -> Paged:
    """The same rows, stored anew in an fp8 cache, whose other slots are zero."""
    paged = Paged(spec, lengths)
    wide = paged.cache
    shape = (1, spec.page_size, spec.num_kv_heads, spec.head_dim)
    (paged.cache,) = allocate(CacheSpec(*shape, FP8, (scales,)), len(wide.keys), spec.device)
    slots = torch.arange(len(wide.flat_keys), device=spec.device)
    held = ~wide.flat_keys.isnan().any(-1).any(-1)
    paged.cache.store(wide.flat_keys[held], wide.flat_values[held], slots[held])
    assert not paged.cache.clamped.any()
    return paged


@pytest.mark.parametrize("scales", [SCALES, ODD_SCALES], ids=["powers of two", "any"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS)
def test_equals_sdpa(
    lengths: list[tuple[int, int]], dtype: torch.dtype, scales: CacheScales
) -> None:
    spec = fp8_spec(dtype=dtype)
    paged = fp8_paged(spec, lengths, scales)
    check(paged.run(make_backend(spec)), paged.run(SdpaAttention(spec)))


@pytest.mark.parametrize("heads", [(8, 8), (8, 1), (28, 4)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_head_shapes(heads: tuple[int, int], head_dim: int) -> None:
    spec = fp8_spec(num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim)
    for lengths in (STEPS["mixed"], STEPS["prefills"]):
        paged = fp8_paged(spec, lengths)
        check(paged.run(make_backend(spec)), paged.run(SdpaAttention(spec)))


def test_each_window_has_its_plan() -> None:
    spec = fp8_spec(windows=(None, 64))
    paged = fp8_paged(spec, STEPS["mixed"])
    flashinfer, sdpa = make_backend(spec), SdpaAttention(spec)
    for window in spec.windows:
        check(paged.run(flashinfer, window), paged.run(sdpa, window))


def test_two_layers_have_scales_of_their_own() -> None:
    """One plan serves all layers; what a run is told of one must not stay for the next."""
    spec = fp8_spec()
    backend = make_backend(spec)
    for scales in (SCALES, ODD_SCALES, CacheScales(), SCALES):
        paged = fp8_paged(spec, STEPS["mixed"], scales)
        check(paged.run(backend), paged.run(SdpaAttention(spec)))


@pytest.mark.parametrize("num_rows", [1, 5, 64])
def test_captured_decode(num_rows: int) -> None:
    spec = fp8_spec()
    backend = make_backend(spec)
    count = backend.graph_words(num_rows, 64)
    assert count is not None
    words = torch.zeros(count, dtype=torch.int32, device=spec.device)
    captured = backend.graph_form(num_rows, words)
    cases = [
        fp8_paged(spec, [(1, 1 + (seed * 37 + 97 * row) % 1000) for row in range(num_rows)])
        for seed in range(4)
    ]
    starts = torch.arange(num_rows + 1, dtype=torch.int32, device=spec.device)
    size = max(len(paged.cache.keys) for paged in cases)
    (layer,) = allocate(CacheSpec(1, 16, 2, 128, FP8, (SCALES,)), size, spec.device)
    q = cases[0].q.clone()

    def bring(paged: Paged, turn: int) -> None:
        host = np.zeros(len(words), dtype=np.int32)
        keys = np.array([keys for _, keys in paged.lengths], dtype=np.int32)
        used = captured.write(host, keys, paged.tables.cpu().numpy())
        words[:used].copy_(torch.from_numpy(host[:used]))
        captured.plan(turn)
        layer.keys[: len(paged.cache.keys)] = paged.cache.keys
        layer.values[: len(paged.cache.values)] = paged.cache.values
        q.copy_(paged.q)

    bring(cases[0], 0)
    backend.forward(q, layer, starts, cases[0].tables, captured.step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.forward(q, layer, starts, cases[0].tables, captured.step)
    for turn, paged in enumerate(cases):
        bring(paged, turn % 2)
        graph.replay()
        check(out, paged.run(SdpaAttention(spec)))

"""FlashInfer against SDPA, on a GPU: one cache, one step, two backends."""

import math
from itertools import accumulate

import numpy as np
import pytest
import torch
from torch import Tensor

from modeling.attention.base import AttentionBackend, AttentionSpec
from modeling.attention.kv_cache import CacheSpec, LayerCache, allocate
from modeling.attention.sdpa import SdpaAttention

pytestmark = pytest.mark.gpu

# (query length, key length) of each row
STEPS: dict[str, list[tuple[int, int]]] = {
    "prefills": [(7, 7), (300, 300), (2, 2)],
    "chunks": [(5, 40), (16, 16), (33, 290)],
    "one decode": [(1, 640)],
    "decode": [(1, 1), (1, 17), (1, 255), (1, 16), (1, 2000)],
    "mixed": [(1, 9), (1, 400), (12, 12), (4, 31), (200, 900)],
    "out of order": [(12, 12), (1, 9), (4, 31), (1, 400)],
}


def make_spec(page_size: int, **fields: object) -> AttentionSpec:
    values: dict[str, object] = {
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 128,
        "scale": 0.07,
        "page_size": page_size,
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 0),
        **fields,
    }
    return AttentionSpec(**values)  # type: ignore[arg-type]


def make_backend(spec: AttentionSpec) -> AttentionBackend:
    pytest.importorskip("flashinfer")
    from modeling.attention.flashinfer import FlashInferAttention

    return FlashInferAttention(spec)


class Paged:
    """Random rows in shuffled pages of one layer; what belongs to no row is NaN."""

    def __init__(self, spec: AttentionSpec, lengths: list[tuple[int, int]]) -> None:
        counts = [-(-keys // spec.page_size) for _, keys in lengths]
        sizes = (1, spec.page_size, spec.num_kv_heads, spec.head_dim)
        cache = CacheSpec(*sizes, spec.dtype, keys_only=spec.value_dim is not None)
        self.spec = spec
        self.lengths = lengths
        self.cache: LayerCache = allocate(cache, sum(counts) + 2, spec.device)[0]
        self.cache.keys.fill_(math.nan)
        self.cache.values.fill_(math.nan)
        pages = iter(torch.randperm(sum(counts) + 2).tolist())
        table = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32)
        for row, count in enumerate(counts):
            table[row, :count] = torch.tensor([next(pages) for _ in range(count)])
        self.tables = table.to(spec.device)
        for row, (_, keys) in enumerate(lengths):
            position = torch.arange(keys)
            slots = table[row, position // spec.page_size].long() * spec.page_size
            slots += position % spec.page_size
            shape = (keys, spec.num_kv_heads, spec.head_dim)
            k, v = (torch.randn(shape, dtype=spec.dtype, device=spec.device) for _ in range(2))
            self.cache.store(k, v, slots.to(spec.device))
        # As in a model: q is a part of a wider product.
        heads = spec.num_heads + 2 * spec.num_kv_heads
        tokens = sum(queries for queries, _ in lengths)
        wide = torch.randn(tokens, heads, spec.head_dim, dtype=spec.dtype, device=spec.device)
        self.q = wide[:, : spec.num_heads]

    def run(
        self, backend: AttentionBackend, window: int | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        queries, keys = zip(*self.lengths, strict=True)
        step = backend.prepare(queries, keys, self.tables)
        starts = torch.tensor([0, *accumulate(queries)], dtype=torch.int32).to(self.spec.device)
        return backend.forward(self.q, self.cache, starts, self.tables, step, window, sinks)


def check(found: Tensor, expected: Tensor) -> None:
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert float(error) < 1e-2, float(error)


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS)
def test_equals_sdpa(lengths: list[tuple[int, int]], page_size: int) -> None:
    spec = make_spec(page_size)
    paged = Paged(spec, lengths)
    check(paged.run(make_backend(spec)), paged.run(SdpaAttention(spec)))


@pytest.mark.parametrize("heads", [(8, 8), (8, 1), (28, 4)])
def test_head_counts(heads: tuple[int, int]) -> None:
    spec = make_spec(16, num_heads=heads[0], num_kv_heads=heads[1])
    paged = Paged(spec, STEPS["mixed"])
    check(paged.run(make_backend(spec)), paged.run(SdpaAttention(spec)))


@pytest.mark.parametrize("head_dim", [64, 256])
def test_other_head_sizes(head_dim: int) -> None:
    spec = make_spec(16, head_dim=head_dim)
    paged = Paged(spec, STEPS["mixed"])
    check(paged.run(make_backend(spec)), paged.run(SdpaAttention(spec)))


def test_each_window_has_its_plan() -> None:
    spec = make_spec(16, windows=(None, 64))
    paged = Paged(spec, STEPS["mixed"])
    flashinfer, sdpa = make_backend(spec), SdpaAttention(spec)
    for window in spec.windows:
        check(paged.run(flashinfer, window), paged.run(sdpa, window))


def test_two_plans_do_not_meet() -> None:
    """Steps are planned while earlier ones are still queued behind a long wait."""
    spec = make_spec(16)
    backend = make_backend(spec)
    cases = [Paged(spec, lengths) for lengths in (*STEPS.values(), *STEPS.values())]
    expected = [paged.run(SdpaAttention(spec)) for paged in cases]
    for paged in cases:
        paged.run(backend)  # compiled and warm
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
    found = [paged.run(backend) for paged in cases]
    for one, other in zip(found, expected, strict=True):
        check(one, other)


@pytest.mark.parametrize("num_rows", [1, 5, 64])
def test_captured_decode(num_rows: int) -> None:
    check_captured(num_rows, (None,))


def test_captured_decode_with_windows() -> None:
    check_captured(5, (None, 64))


def test_captured_decode_of_capped_scores() -> None:
    check_captured(5, (None, 64), softcap=2.0)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_capped_scores(head_dim: int) -> None:
    spec = make_spec(16, windows=(None, 64), softcap=2.0, head_dim=head_dim)
    paged = Paged(spec, STEPS["mixed"])
    flashinfer, sdpa = make_backend(spec), SdpaAttention(spec)
    for window in spec.windows:
        check(paged.run(flashinfer, window), paged.run(sdpa, window))


def check_captured(num_rows: int, windows: tuple[int | None, ...], **fields: object) -> None:
    spec = make_spec(16, windows=windows, **fields)
    backend = make_backend(spec)
    count = backend.graph_words(num_rows, 64)
    assert count is not None
    words = torch.zeros(count, dtype=torch.int32, device=spec.device)
    captured = backend.graph_form(num_rows, words)
    cases = [
        Paged(spec, [(1, 1 + (seed * 37 + 97 * row) % 1000) for row in range(num_rows)])
        for seed in range(4)
    ]
    starts = torch.arange(num_rows + 1, dtype=torch.int32, device=spec.device)
    # One graph reads one cache: the largest case's pages, into which the others are copied.
    size = max(paged.cache.keys.shape[0] for paged in cases)
    layer = allocate(CacheSpec(1, 16, 2, 128, spec.dtype), size, spec.device)[0]
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

    def compute(window: int | None) -> Tensor:
        return backend.forward(q, layer, starts, paged.tables, captured.step, window)

    for window in windows:
        paged = cases[0]
        bring(paged, 0)
        compute(window)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = compute(window)
        for turn, paged in enumerate(cases):
            bring(paged, turn % 2)
            graph.replay()
            check(out, paged.run(SdpaAttention(spec), window))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dtype": torch.float32}, "float32"),
        ({"head_dim": 80}, "head_dim 80"),
        ({"head_dim": 96}, "head_dim 96"),
        ({"cache_dtype": torch.float16}, "a cache of torch.float16"),
        ({"sinks": True}, "has no sinks"),
        ({"alibi": (0.5,) * 8}, "has no ALiBi"),
        ({"device": torch.device("cpu")}, "needs a CUDA device"),
    ],
)
def test_what_it_lacks_is_said(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make_backend(make_spec(16, **fields))

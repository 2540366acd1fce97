"""Paged SDPA against the equation of base.py, written as a loop."""

import math
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from modeling.attention.base import AttentionBackend, AttentionSpec
from modeling.attention.kv_cache import FP8, CacheScales, CacheSpec, LayerCache, allocate
from modeling.attention.sdpa import SdpaAttention

CPU = torch.device("cpu")

# (query length, key length) of each row
STEPS: dict[str, list[tuple[int, int]]] = {
    "one prefill": [(7, 7)],
    "prefills": [(7, 7), (300, 300), (2, 2)],
    "chunks": [(5, 40), (16, 16), (33, 290)],
    "decode, equal": [(1, 20), (1, 20), (1, 20)],
    "decode, mixed": [(1, 1), (1, 17), (1, 255), (1, 16)],
    "decode, far apart": [(1, 3), (1, 700), (1, 257), (1, 600)],
    "all kinds": [(1, 9), (12, 12), (1, 400), (4, 31), (1, 1)],
}


@dataclass
class Paged:
    """Random rows in shuffled pages. Whatever belongs to no row is NaN.

    scales: of an fp8 cache, whose rows are what can be read from it; None for a cache in `dtype`.
    softcap, alibi, sinks, value_dim: as in AttentionSpec and in AttentionBackend.forward.
    """

    lengths: list[tuple[int, int]]
    page_size: int
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 8
    dtype: torch.dtype = torch.float32
    window: int | None = None
    scales: CacheScales | None = None
    softcap: float | None = None
    alibi: tuple[float, ...] | None = None
    sinks: Tensor | None = None
    value_dim: int | None = None

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        counts = [-(-keys // self.page_size) for _, keys in self.lengths]
        num_pages = sum(counts) + 2
        shape = (1, self.page_size, self.heads[1], self.head_dim)
        dtype, scales = (self.dtype, ()) if self.scales is None else (FP8, (self.scales,))
        spec = CacheSpec(*shape, dtype, scales, keys_only=self.value_dim is not None)
        self.cache: LayerCache = allocate(spec, num_pages, CPU)[0]
        self.cache.keys.fill_(math.nan)
        self.cache.values.fill_(math.nan)
        pages = iter(torch.randperm(num_pages, generator=generator).tolist())
        self.tables = torch.full((len(counts), max(counts) + 1), 10**6, dtype=torch.int32)
        self.rows: list[tuple[Tensor, Tensor, Tensor]] = []
        for row, (queries, keys) in enumerate(self.lengths):
            table = [next(pages) for _ in range(counts[row])]
            self.tables[row, : len(table)] = torch.tensor(table)
            slots = torch.tensor(
                [
                    table[j // self.page_size] * self.page_size + j % self.page_size
                    for j in range(keys)
                ]
            )
            sizes = ((queries, self.heads[0]), (keys, self.heads[1]), (keys, self.heads[1]))
            q, k, v = (
                torch.randn(*size, self.head_dim, generator=generator).to(self.dtype)
                for size in sizes
            )
            self.cache.store(k, v, slots)
            self.rows.append((q, *self.cache.read(slots, self.dtype)))

    def spec(self, scale: float = 0.4) -> AttentionSpec:
        return AttentionSpec(
            *self.heads,
            self.head_dim,
            scale,
            self.page_size,
            self.dtype,
            CPU,
            (None, self.window),
            softcap=self.softcap,
            sinks=self.sinks is not None,
            alibi=self.alibi,
            value_dim=self.value_dim,
        )

    def run(self, scale: float = 0.4, kind: type[AttentionBackend] = SdpaAttention) -> Tensor:
        backend = kind(self.spec(scale))
        queries, keys = zip(*self.lengths, strict=True)
        step = backend.prepare(queries, keys, self.tables)
        q = torch.cat([q for q, _, _ in self.rows])
        starts = torch.tensor([0, *accumulate(queries)], dtype=torch.int32)
        return backend.forward(
            q, self.cache, starts, self.tables, step, self.window, sinks=self.sinks
        )


def naive(paged: Paged, row: int, scale: float = 0.4) -> Tensor:
    """One query and one head at a time, in float64."""
    q, k, v = (part.double() for part in paged.rows[row])
    window = paged.window
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for i in range(len(q)):
        stop = len(k) - len(q) + i + 1
        seen = slice(0 if window is None else max(0, stop - window), stop)
        for head in range(q.shape[1]):
            scores = scale * k[seen, head // group] @ q[i, head]
            if paged.softcap is not None:
                scores = paged.softcap * torch.tanh(scores / paged.softcap)
            if paged.alibi is not None:
                scores += paged.alibi[head] * (torch.arange(seen.start, stop) - (stop - 1))
            weights = scores.exp()
            total = weights.sum() + (0 if paged.sinks is None else paged.sinks[head].double().exp())
            out[i, head] = weights / total @ v[seen, head // group]
    return out


def check(
    paged: Paged, tolerance: float = 1e-5, kind: type[AttentionBackend] = SdpaAttention
) -> None:
    expected = torch.cat([naive(paged, row) for row in range(len(paged.rows))])
    own = slice(paged.value_dim)
    found = paged.run(kind=kind).double()[..., own]
    torch.testing.assert_close(found, expected[..., own], atol=tolerance, rtol=0)


@pytest.mark.parametrize("page_size", [16, 128, 256])
@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS)
def test_equals_the_equation(lengths: list[tuple[int, int]], page_size: int) -> None:
    check(Paged(lengths, page_size))


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (8, 2)])
@pytest.mark.parametrize("head_dim", [8, 20])
def test_head_shapes(heads: tuple[int, int], head_dim: int) -> None:
    check(Paged(STEPS["all kinds"], 16, heads, head_dim))


@pytest.mark.parametrize("scales", [None, CacheScales(0.03, 0.03)])
def test_values_that_are_the_keys_first_numbers(scales: CacheScales | None) -> None:
    paged = Paged(STEPS["all kinds"], 16, (6, 1), 20, value_dim=16, scales=scales)
    assert paged.cache.values is paged.cache.keys
    check(paged)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype: torch.dtype) -> None:
    check(Paged(STEPS["all kinds"], 16, dtype=dtype), tolerance=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [STEPS["all kinds"], STEPS["decode, mixed"]])
@pytest.mark.parametrize("window", [None, 6])
def test_an_fp8_cache(
    lengths: list[tuple[int, int]], dtype: torch.dtype, window: int | None
) -> None:
    scales = CacheScales(0.03, 0.25)
    paged = Paged(lengths, 16, dtype=dtype, window=window, scales=scales)
    check(paged, tolerance=1e-5 if dtype == torch.float32 else 0.03)


def test_a_row_never_reads_what_another_left_behind() -> None:
    """Pages are NaN outside the rows' own keys: zero weight times NaN would show."""
    assert not Paged(STEPS["decode, mixed"], 128).run().isnan().any()


def test_decode_rows_share_calls() -> None:
    paged = Paged([(1, n) for n in (1, 5, 200, 256, 257, 512, 513)], 16)
    spec = AttentionSpec(4, 2, 8, 1.0, 16, torch.float32, CPU)
    queries, keys = zip(*paged.lengths, strict=True)
    step = SdpaAttention(spec).prepare(queries, keys, paged.tables)
    plan = step.plans[None]
    assert sorted(len(group.slots) for group in plan.groups) == [513, 2 * 512, 4 * 256]
    assert not plan.long_rows


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("window", [1, 6, 40, 256, 10**6])
@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS)
def test_windows(lengths: list[tuple[int, int]], window: int, page_size: int) -> None:
    check(Paged(lengths, page_size, window=window))


def test_a_windowed_layer_reads_only_the_keys_that_it_sees() -> None:
    paged = Paged([(1, 700), (1, 90), (6, 300), (8, 8)], 16)
    spec = AttentionSpec(4, 2, 8, 1.0, 16, torch.float32, CPU, windows=(None, 50, 800))
    queries, keys = zip(*paged.lengths, strict=True)
    step = SdpaAttention(spec).prepare(queries, keys, paged.tables)
    plan = step.plans[50]
    assert [len(group.slots) for group in plan.groups] == [2 * 50]
    assert [len(row.slots) for row in plan.long_rows] == [50 + 5, 8]
    assert step.plans[800] is step.plans[None]  # wider than every row


def test_a_window_that_the_spec_does_not_name() -> None:
    paged = Paged([(1, 7)], 16)
    spec = AttentionSpec(4, 2, 8, 1.0, 16, torch.float32, CPU)
    backend = SdpaAttention(spec)
    step = backend.prepare([1], [7], paged.tables)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(KeyError):
        backend.forward(paged.rows[0][0], paged.cache, starts, paged.tables, step, 4)


def test_lengths_must_be_possible() -> None:
    spec = AttentionSpec(4, 2, 8, 1.0, 16, torch.float32, CPU)
    with pytest.raises(AssertionError):
        SdpaAttention(spec).prepare([5], [4], torch.zeros(1, 1, dtype=torch.int32))

"""The Triton kernels against SDPA, on a GPU: one cache, one step, two backends."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.engine import AttentionKind
from modeling.attention.base import AttentionBackend, AttentionSpec
from modeling.attention.kv_cache import FP8, CacheSpec, allocate
from modeling.attention.sdpa import SdpaAttention
from modeling.attention.select import select_attention
from tests.modeling.attention.test_flashinfer import STEPS, Paged, make_spec
from tests.modeling.attention.test_flashinfer_fp8 import ODD_SCALES, SCALES, fp8_paged

pytestmark = pytest.mark.gpu

LONG = [(1, 30000), (1, 3), (40, 9000), (1, 8192)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SLOPES = tuple(2.0 ** -(1 + head / 2) for head in range(8))
LATENTS: dict[str, Any] = {
    "num_heads": 20, "num_kv_heads": 1, "head_dim": 576, "value_dim": 512,
}  # fmt: skip
RULES: dict[str, dict[str, object]] = {
    "cap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "slopes": {"alibi": SLOPES},
    "all": {"softcap": 2.0, "sinks": True, "alibi": SLOPES},
}


def make_backend(spec: AttentionSpec) -> AttentionBackend:
    pytest.importorskip("triton")
    from modeling.attention.triton.backend import TritonAttention

    return TritonAttention(spec)


def sinks_of(spec: AttentionSpec) -> Tensor | None:
    """In the model's type, as its parameters are."""
    return torch.randn(spec.num_heads, device=spec.device).to(spec.dtype) if spec.sinks else None


def check(paged: Paged, window: int | None = None) -> None:
    spec = paged.spec
    sinks = sinks_of(spec)
    own = slice(spec.value_dim)
    found = paged.run(make_backend(spec), window, sinks).float()[..., own]
    expected = paged.run(SdpaAttention(spec), window, sinks).float()[..., own]
    error = float((found - expected).norm() / expected.norm())
    assert error < TOLERANCE[spec.dtype], error


@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize("lengths", [*STEPS.values(), LONG], ids=[*STEPS, "long"])
def test_equals_sdpa(lengths: list[tuple[int, int]], page_size: int) -> None:
    spec = make_spec(page_size, windows=(None, 64, 1000))
    paged = Paged(spec, lengths)
    for window in spec.windows:
        check(paged, window)


@pytest.mark.parametrize(
    ("head_dim", "heads"),
    [
        (32, (8, 8)),
        (64, (64, 8)),
        (80, (28, 4)),
        (96, (8, 2)),
        (192, (8, 8)),
        (256, (8, 4)),
        (512, (4, 1)),
        (64, (71, 1)),
    ],
)
def test_head_shapes(head_dim: int, heads: tuple[int, int]) -> None:
    spec = make_spec(
        16,
        windows=(None, 64),
        head_dim=head_dim,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        softcap=2.0,
        sinks=True,
    )
    paged = Paged(spec, STEPS["mixed"])
    for window in spec.windows:
        check(paged, window)


@pytest.mark.parametrize(
    ("heads", "head_dim", "value_dim"),
    [
        (16, 576, 512),
        (20, 576, 512),
        (50, 576, 512),
        (128, 576, 512),
        (40, 288, 256),
        (7, 80, 64),
        (5, 72, 48),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_that_are_the_keys_first_numbers(
    heads: int, head_dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    sizes = {"num_heads": heads, "num_kv_heads": 1, "head_dim": head_dim, "value_dim": value_dim}
    spec = make_spec(16, windows=(None, 64), dtype=dtype, **sizes)
    for lengths in (STEPS["mixed"], STEPS["decode"], STEPS["chunks"], LONG):
        paged = Paged(spec, lengths)
        for window in spec.windows:
            check(paged, window)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_scores(rule: dict[str, object]) -> None:
    spec = make_spec(16, windows=(None, 64), **rule)
    for lengths in (STEPS["mixed"], STEPS["decode"], STEPS["chunks"]):
        paged = Paged(spec, lengths)
        for window in spec.windows:
            check(paged, window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types(dtype: torch.dtype) -> None:
    spec = make_spec(16, windows=(None, 64), dtype=dtype, head_dim=64)
    for lengths in (STEPS["mixed"], STEPS["decode"]):
        paged = Paged(spec, lengths)
        for window in spec.windows:
            check(paged, window)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_fp8_cache(dtype: torch.dtype) -> None:
    spec = make_spec(16, windows=(None, 64), dtype=dtype, cache_dtype=FP8, softcap=2.0)
    for scales in (SCALES, ODD_SCALES):
        for lengths in (STEPS["mixed"], STEPS["decode"]):
            paged = fp8_paged(spec, lengths, scales)
            found, expected = paged.run(make_backend(spec)), paged.run(SdpaAttention(spec))
            error = (found.float() - expected.float()).norm() / expected.float().norm()
            # SDPA rounds what it reads to the model's type.
            assert float(error) < 1e-2, float(error)


@pytest.mark.parametrize("fields", [{}, LATENTS, {**LATENTS, "num_heads": 128}])
def test_a_row_is_the_same_beside_any_others(fields: dict[str, Any]) -> None:
    spec = make_spec(16, windows=(None, 64), **fields)
    backend, meant = make_backend(spec), slice(spec.value_dim)
    paged = Paged(spec, [*STEPS["mixed"], *LONG])
    for window in spec.windows:
        together = paged.run(backend, window)
        first = 0
        for row, (queries, keys) in enumerate(paged.lengths):
            table, q = paged.tables[row : row + 1], paged.q[first : first + queries]
            step = backend.prepare([queries], [keys], table)
            starts = torch.tensor([0, queries], dtype=torch.int32, device=spec.device)
            own = backend.forward(q, paged.cache, starts, table, step, window)
            found = together[first : first + queries, :, meant]
            assert torch.equal(own[..., meant], found), (row, window)
            first += queries


@pytest.mark.parametrize(("num_rows", "captured_rows"), [(1, 1), (5, 8), (50, 64), (200, 256)])
@pytest.mark.parametrize("fields", [{}, {"sinks": True}, LATENTS])
def test_captured_decode_is_launched_decode(
    num_rows: int, captured_rows: int, fields: dict[str, Any]
) -> None:
    """Bit by bit, with padding rows of one key in a page that no row has."""
    spec = make_spec(16, windows=(None, 64), **fields)
    backend, meant, is_latent = make_backend(spec), slice(spec.value_dim), "value_dim" in fields
    max_blocks = 200
    count = backend.graph_words(captured_rows, max_blocks)
    assert count is not None
    words = torch.zeros(count, dtype=torch.int32, device=spec.device)
    captured = backend.graph_form(captured_rows, words)
    lengths = [
        [(1, 1 + (seed * 37 + 97 * row * row) % (3000 >> seed)) for row in range(num_rows)]
        for seed in range(3)
    ]
    cases = [Paged(spec, each) for each in lengths]
    most = max(len(paged.cache.keys) for paged in cases)
    sizes = (1, 16, spec.num_kv_heads, spec.head_dim)
    cache = CacheSpec(*sizes, spec.dtype, keys_only=is_latent)
    (layer,) = allocate(cache, most + 1, spec.device)
    shape = (captured_rows, spec.num_heads + 4, spec.head_dim)
    q = torch.zeros(shape, dtype=spec.dtype, device=spec.device)[:, : spec.num_heads]
    starts = torch.arange(captured_rows + 1, dtype=torch.int32, device=spec.device)
    logits = sinks_of(spec)

    def bring(paged: Paged, turn: int) -> None:
        keys = np.ones(captured_rows, dtype=np.int32)
        keys[:num_rows] = [keys for _, keys in paged.lengths]
        tables = np.full((captured_rows, paged.tables.shape[1]), most, dtype=np.int32)
        tables[:num_rows] = paged.tables.cpu().numpy()
        host = np.zeros(count, dtype=np.int32)
        used = captured.write(host, keys, tables)
        words[:used].copy_(torch.from_numpy(host[:used]))
        captured.plan(turn)
        layer.keys[: len(paged.cache.keys)] = paged.cache.keys
        layer.values[: len(paged.cache.values)] = paged.cache.values
        q[:num_rows].copy_(paged.q)

    for window in spec.windows:
        bring(cases[0], 0)
        backend.forward(q, layer, starts, cases[0].tables, captured.step, window, logits)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = backend.forward(q, layer, starts, words, captured.step, window, logits)
        for turn, paged in enumerate(cases):
            bring(paged, turn % 2)
            graph.replay()
            found, own = out[:num_rows, :, meant], paged.run(backend, window, logits)
            assert torch.equal(found, own[..., meant]), (turn, window)


@pytest.mark.parametrize(
    ("room", "fields"),
    [
        (3, {}),
        (5, {"head_dim": 64, "num_heads": 64}),
        (9, {}),
        (9, {"head_dim": 256, "num_kv_heads": 4, "softcap": 2.0}),
        (9, {"dtype": torch.float32}),
        (5, {"dtype": torch.bfloat16, "cache_dtype": FP8}),
        (3, LATENTS),
        (5, {**LATENTS, "num_heads": 16}),
    ],
)
def test_captured_rows_of_several_tokens(room: int, fields: dict[str, Any]) -> None:
    """As launched ones, up to the order of their sums."""
    spec = make_spec(16, windows=(None, 64), **fields)
    lengths = [(1 + row % room, 9 + (97 * row * row) % 3000) for row in range(20)]
    is_fp8 = spec.cache_dtype == FP8
    paged = fp8_paged(spec, lengths, SCALES) if is_fp8 else Paged(spec, lengths)
    backend, rows, max_blocks, meant = make_backend(spec), 20, 200, slice(spec.value_dim)
    count = backend.graph_words(rows, max_blocks, room)
    assert count is not None
    words = torch.zeros(count, dtype=torch.int32, device=spec.device)
    captured = backend.graph_form(rows, words, room)
    queries, keys = np.array(lengths, dtype=np.int32).T
    host = np.zeros(count, dtype=np.int32)
    captured.write(host, keys, paged.tables.cpu().numpy(), queries)
    words.copy_(torch.from_numpy(host))
    at = torch.tensor([row * room + i for row, n in enumerate(queries) for i in range(n)])
    q = torch.zeros(rows * room, *paged.q.shape[1:], dtype=spec.dtype, device=spec.device)
    q[at] = paged.q
    starts = torch.arange(rows + 1, dtype=torch.int32, device=spec.device) * room
    for window in spec.windows:
        found = backend.forward(q, paged.cache, starts, words, captured.step, window)[at].float()
        expected = paged.run(backend, window).float()
        error = (found - expected)[..., meant].norm() / expected[..., meant].norm()
        assert float(error) < (1e-5 if spec.dtype == torch.float32 else 1e-2), (window, error)


def test_it_is_taken_for_what_others_lack() -> None:
    pytest.importorskip("triton")
    for fields in ({"sinks": True}, {"alibi": SLOPES}, {"dtype": torch.float32}, {"head_dim": 80}):
        choice = select_attention(AttentionKind.AUTO, make_spec(16, **fields))
        assert choice.backend.name == "triton", choice.reason
    with pytest.raises(ValueError, match="head_dim 520 is larger than 512"):
        make_backend(make_spec(16, head_dim=520))

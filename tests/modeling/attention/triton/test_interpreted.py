"""The Triton kernels against the equation of base.py, on a CPU, by Triton's interpreter.

It needs TRITON_INTERPRET=1 in the environment, and numpy below 2.4.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from modeling.attention.base import AttentionBackend, AttentionSpec
from modeling.attention.kv_cache import CacheScales
from tests.modeling.attention.test_dense import RULES
from tests.modeling.attention.test_sdpa import CPU, STEPS, Paged, check

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)

LENGTHS = STEPS["all kinds"]


class Interpreted:
    """In the place of a Launcher: runs the kernel, which has no compiled form."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __call__(
        self,
        key: Any,
        grid: Sequence[int],
        arguments: Sequence[Any],
        constants: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        self._kernel[tuple(grid)](*arguments, **constants)


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> type[AttentionBackend]:
    """The backend, told to take a CPU for a GPU, with small blocks, so that rows have many."""
    pytest.importorskip("triton")
    from modeling.attention.triton import backend

    monkeypatch.setattr(backend, "Launcher", Interpreted)
    monkeypatch.setattr(backend, "device_sizes", lambda device: (2**17, 4))

    class OnCpu(backend.TritonAttention):
        @classmethod
        def lacks(cls, spec: AttentionSpec) -> str | None:
            return None

        def __init__(self, spec: AttentionSpec) -> None:
            super().__init__(spec)
            self.decode_form = replace(self.decode_form, keys=16, min_split=32, max_splits=8)
            self.prefill_form = replace(self.prefill_form, rows=32, keys=16)

    return OnCpu


@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS)
def test_equals_the_equation(lengths: list[tuple[int, int]], kind: type[AttentionBackend]) -> None:
    check(Paged(lengths, 16, head_dim=16), kind=kind)


@pytest.mark.parametrize("window", [1, 6, 40])
@pytest.mark.parametrize("lengths", [LENGTHS, STEPS["decode, far apart"], STEPS["chunks"]])
def test_windows(lengths: list[tuple[int, int]], window: int, kind: type[AttentionBackend]) -> None:
    check(Paged(lengths, 32, head_dim=16, window=window), kind=kind)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_scores(rule: dict[str, Any], window: int | None, kind: type[AttentionBackend]) -> None:
    check(Paged(LENGTHS, 16, head_dim=16, window=window, **rule), kind=kind)


@pytest.mark.parametrize("heads", [(4, 4), (7, 1), (14, 2), (20, 1)])
@pytest.mark.parametrize("head_dim", [8, 20])
def test_head_shapes(heads: tuple[int, int], head_dim: int, kind: type[AttentionBackend]) -> None:
    check(Paged(LENGTHS, 7, heads, head_dim), kind=kind)


@pytest.mark.parametrize(("width", "value_dim"), [(20, 16), (40, 24), (24, 8)])
@pytest.mark.parametrize("lengths", [LENGTHS, STEPS["decode, far apart"], STEPS["chunks"]])
def test_values_that_are_the_keys_first_numbers(
    lengths: list[tuple[int, int]], width: int, value_dim: int, kind: type[AttentionBackend]
) -> None:
    paged = Paged(lengths, 16, (20, 1), width, value_dim=value_dim)
    for window in (None, 40):
        check(replace(paged, window=window), kind=kind)
        # Of half precision keys are on the tall side.
        check(replace(paged, window=window, dtype=torch.float16), 0.01, kind)


def test_half_precision(kind: type[AttentionBackend]) -> None:
    """In float16: the interpreter takes bfloat16's bits for integers."""
    check(Paged(LENGTHS, 16, dtype=torch.float16, **RULES["all"]), 0.01, kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_fp8_cache(dtype: torch.dtype, kind: type[AttentionBackend]) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    scales = CacheScales(0.03, 0.25)
    check(Paged(LENGTHS, 16, dtype=dtype, scales=scales, **RULES["all"]), tolerance, kind)


@pytest.mark.parametrize(("window", "rule"), [(None, {}), (100, RULES["all"])])
def test_which_programs_compute_a_row_changes_no_bit(
    window: int | None, rule: dict[str, Any], kind: type[AttentionBackend]
) -> None:
    """Rows of 1 to 8 splits: a program takes all of a row's, or several, or one."""
    from modeling.attention.triton.backend import TritonAttention, TritonStep

    paged = Paged([(1, 5), (1, 300), (1, 90), (1, 33)], 16, heads=(4, 2), window=window, **rule)
    starts, found = torch.arange(5, dtype=torch.int32), []
    for programs, at_once in ((1, 1), (16, 1), (64, 16), (64, 24), (64, 64)):
        backend = kind(paged.spec())
        assert isinstance(backend, TritonAttention)
        backend.decode_form = replace(backend.decode_form, programs=programs, at_once=at_once)
        step = backend.prepare([1] * 4, [keys for _, keys in paged.lengths], paged.tables)
        q = torch.cat([q for q, _, _ in paged.rows])
        out = backend.forward(q, paged.cache, starts, paged.tables, step, window, paged.sinks)
        assert isinstance(step, TritonStep)
        assert step.decode is not None
        assert not step.decode.arrived.any(), "zeros again for the next layer"
        found.append(out)
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("window", [None, 40])
def test_captured_decode(window: int | None, kind: type[AttentionBackend]) -> None:
    """One step over static words; what other rows are beside a row changes no bit of it."""
    spec = AttentionSpec(4, 2, 16, 0.4, 16, torch.float32, CPU, (None, window))
    backend, num_rows, max_blocks = kind(spec), 5, 50
    count = backend.graph_words(num_rows, max_blocks)
    assert count is not None
    words = torch.full((count,), 10**6, dtype=torch.int32)
    captured = backend.graph_form(num_rows, words)
    starts = torch.arange(num_rows + 1, dtype=torch.int32)
    for lengths in ([(1, 5), (1, 300), (1, 256)], [(1, 700), (1, 1), (1, 90), (1, 33)]):
        paged = Paged(lengths, 16, head_dim=16, window=window)
        keys = np.array([keys for _, keys in lengths] + [1] * (num_rows - len(lengths)))
        tables = np.zeros((num_rows, paged.tables.shape[1]), dtype=np.int32)
        tables[: len(lengths)] = paged.tables.numpy()
        host = np.zeros(count, dtype=np.int32)
        used = captured.write(host, keys.astype(np.int32), tables)
        words[:used].copy_(torch.from_numpy(host[:used]))
        captured.plan(0)
        q = torch.zeros(num_rows, 4, 16)
        q[: len(lengths)] = torch.cat([q for q, _, _ in paged.rows])
        found = backend.forward(q, paged.cache, starts, paged.tables, captured.step, window)
        assert torch.equal(found[: len(lengths)], paged.run(kind=kind))
        for row in range(len(lengths)):
            assert torch.equal(found[row], alone(paged, row, backend))


def alone(paged: Paged, row: int, backend: AttentionBackend) -> Tensor:
    """A row's output in a step of its own."""
    table = paged.tables[row : row + 1]
    step = backend.prepare([1], [paged.lengths[row][1]], table)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    q = paged.rows[row][0]
    return backend.forward(q, paged.cache, starts, table, step, paged.window)[0]


@pytest.mark.parametrize(
    ("window", "heads", "rule"),
    [(None, (4, 2), {}), (40, (4, 1), {}), (7, (4, 2), RULES["all"])],
)
def test_captured_rows_of_several_tokens(
    window: int | None, heads: tuple[int, int], rule: dict[str, Any], kind: type[AttentionBackend]
) -> None:
    """Rows that do not fill their room of tokens, and rows that no request owns, beside them."""
    room, num_rows, max_blocks = 5, 4, 50
    for lengths in ([(3, 300), (5, 256), (1, 33)], [(5, 5), (2, 700)]):
        paged = Paged(lengths, 16, heads, 16, window=window, **rule)
        backend = kind(paged.spec())
        count = backend.graph_words(num_rows, max_blocks, room)
        assert count is not None
        words = torch.full((count,), 10**6, dtype=torch.int32)
        captured = backend.graph_form(num_rows, words, room)
        padding = [1] * (num_rows - len(lengths))
        pairs = zip(*lengths, strict=True)
        queries, keys = (np.array([*each, *padding], dtype=np.int32) for each in pairs)
        tables = np.zeros((num_rows, paged.tables.shape[1]), dtype=np.int32)
        tables[: len(lengths)] = paged.tables.numpy()
        host = np.zeros(count, dtype=np.int32)
        used = captured.write(host, keys, tables, queries)
        words[:used].copy_(torch.from_numpy(host[:used]))
        q = torch.zeros(num_rows, room, heads[0], 16)
        for row, (own, _, _) in enumerate(paged.rows):
            q[row, : len(own)] = own
        starts = torch.arange(num_rows + 1, dtype=torch.int32) * room
        found = backend.forward(
            q.flatten(0, 1), paged.cache, starts, paged.tables, captured.step, window, paged.sinks
        ).view_as(q)
        expected = paged.run(kind=kind)
        ends = np.cumsum([count for count, _ in lengths])
        for row, end in enumerate(ends.tolist()):
            own = expected[end - lengths[row][0] : end]
            assert torch.allclose(found[row, : len(own)], own, atol=1e-5), (lengths, row)
            assert found[row].isfinite().all(), "those behind its queries see its keys alone"

"""Scores that torch's kernels lack (caps, slopes, sinks) against the equation of base.py."""

from typing import Any

import pytest
import torch

from modeling.attention import dense
from modeling.attention.base import AttentionSpec
from modeling.attention.kv_cache import CacheScales
from modeling.attention.sdpa import SdpaAttention
from tests.modeling.attention.test_sdpa import CPU, STEPS, Paged, check, naive

SINKS = torch.tensor([0.5, -2.0, 3.0, 0.0])
SLOPES = (0.25, 0.0625, 0.5, 0.03)
RULES: dict[str, dict[str, Any]] = {
    "cap": {"softcap": 1.5},
    "sinks": {"sinks": SINKS},
    "slopes": {"alibi": SLOPES},
    "all": {"softcap": 2.0, "sinks": SINKS, "alibi": SLOPES},
}


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS)
def test_equals_the_equation(
    lengths: list[tuple[int, int]], rule: dict[str, Any], window: int | None
) -> None:
    check(Paged(lengths, 16, window=window, **rule))


@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_head_counts_in_half_precision(heads: tuple[int, int], dtype: torch.dtype) -> None:
    check(Paged(STEPS["all kinds"], 16, heads, 20, dtype, **RULES["all"]), tolerance=0.02)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_fp8_cache(dtype: torch.dtype, rule: dict[str, Any]) -> None:
    paged = Paged(STEPS["all kinds"], 16, dtype=dtype, scales=CacheScales(0.03, 0.25), **rule)
    check(paged, tolerance=1e-5 if dtype == torch.float32 else 0.03)


def test_queries_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "MAX_SCORES", 4 * 300 * 7)
    check(Paged(STEPS["prefills"], 16, window=40, **RULES["all"]))


def test_a_layer_without_sinks_beside_others() -> None:
    paged = Paged(STEPS["all kinds"], 16)
    spec = AttentionSpec(4, 2, 8, 0.4, 16, torch.float32, CPU, sinks=True)
    backend = SdpaAttention(spec)
    queries, keys = zip(*paged.lengths, strict=True)
    step = backend.prepare(queries, keys, paged.tables)
    q = torch.cat([q for q, _, _ in paged.rows])
    starts = torch.zeros(len(keys) + 1, dtype=torch.int32)
    found = backend.forward(q, paged.cache, starts, paged.tables, step)
    expected = torch.cat([naive(paged, row) for row in range(len(keys))])
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


def test_a_sink_takes_weight_from_the_keys() -> None:
    plain, heavy = Paged([(1, 9)], 16), Paged([(1, 9)], 16, sinks=torch.full((4,), 20.0))
    assert float(heavy.run().norm() / plain.run().norm()) < 1e-3

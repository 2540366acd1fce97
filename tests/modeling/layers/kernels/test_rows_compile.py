"""Sums with norms and factors, and gated products, become code for Hopper, without a GPU."""

import os
from itertools import product
from typing import Any

import pytest
import torch

from tests.modeling.layers.kernels.test_experts_compile import Compiled

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels are not compiled"
)

TOKENS, WIDTH, PER_LAYER, LAYERS = 4, 1536, 256, 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_they_compile(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from modeling.kernels import launch
    from modeling.layers.kernels import rows

    compiled = Compiled()

    def compile_it(self: Any, *launched: Any) -> None:
        compiled(self, *launched)

    monkeypatch.setattr(launch.Launcher, "__call__", compile_it)
    monkeypatch.setattr(rows, "has_dependent_launch", lambda _device: True)
    x, weight = torch.zeros(TOKENS, WIDTH, dtype=dtype), torch.zeros(WIDTH)
    parts = product((None, (weight, 1e-6)), (None, weight), (1.0, 0.5), (1.0, 0.5))
    for inner, outer, factor, total_factor in parts:
        rows.add_rms_norm(x, x, outer, 1e-6, inner, factor=factor, total_factor=total_factor)
    gate = torch.zeros(TOKENS, PER_LAYER, dtype=dtype)
    layers = torch.zeros(TOKENS, LAYERS, PER_LAYER, dtype=dtype)
    for is_gelu in (False, True):
        rows.gated_mul(gate, layers[:, 1], is_gelu)
    assert compiled.names == {"_add_rms_norm", "_silu_mul"}
    assert len(compiled.codes) == 16 + 2

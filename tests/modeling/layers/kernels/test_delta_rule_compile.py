"""The kernel of the gated delta rule becomes code for Hopper; Triton needs no GPU for that."""

import os

import pytest
import torch

from tests.modeling.layers.kernels.test_experts_compile import Compiled

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels are not compiled"
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_compiles(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3.5's heads, and odd ones."""
    pytest.importorskip("triton")
    from modeling.kernels.launch import Launcher
    from modeling.layers.kernels import delta_rule

    compiled = Compiled()
    launch = lambda own, *given: compiled(own, *given)  # noqa: E731
    monkeypatch.setattr(Launcher, "__call__", launch)
    for key_heads, heads, size, width in ((16, 32, 128, 128), (3, 3, 24, 40)):
        q, k = torch.empty(2, 4, 1, key_heads, size, dtype=dtype)
        v = torch.empty(4, 1, heads, width, dtype=dtype)
        g, beta = torch.empty(4, 1, heads), torch.empty(4, 1, heads, dtype=dtype)
        states, slots = torch.empty(9, heads, size, width), torch.zeros(4).long()
        for norm in (True, False):
            delta_rule.delta_rule_step(q, k, v, g, beta, states, slots, norm)
    assert compiled.names == {"_delta_rule"}
    assert len(compiled.codes) == 4

"""The experts' kernels against the equation, on a CPU, by Triton's interpreter.

It needs TRITON_INTERPRET=1 in the environment, and numpy below 2.4.
"""

import os

import pytest
import torch
from torch.nn import functional as F

from tests.modeling.attention.test_triton_interpreted import Interpreted

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)


@pytest.mark.parametrize(("tokens", "active"), [(1, 2), (5, 3), (37, 2)])
def test_experts(monkeypatch: pytest.MonkeyPatch, tokens: int, active: int) -> None:
    kernels = pytest.importorskip("modeling.layers.triton_experts")
    for name in ("_ENTER", "_UP", "_DOWN", "_SUM", "_CHOOSE"):
        monkeypatch.setattr(kernels, name, Interpreted(getattr(kernels, name)._kernel))
    count, hidden, width = 6, 128, 64
    x = torch.randn(tokens, hidden, dtype=torch.float16)
    up = torch.randn(count, 2 * width, hidden).mul(0.1).half()
    down = torch.randn(count, hidden, width).mul(0.1).half()
    assert kernels.fits(up, down)
    logits = torch.randn(tokens, count)
    shares, ids = kernels.choose_experts(logits, active, True)
    best, chosen = logits.softmax(-1).topk(active)
    assert torch.equal(ids, chosen)
    torch.testing.assert_close(shares, best / best.sum(-1, keepdim=True))
    counts = torch.zeros(count, dtype=torch.int32)
    for _ in range(2):
        y = kernels.experts(x, up, down, ids, shares, counts)
        gate, upper = torch.einsum("th,teih->tei", x.float(), up[ids].float()).chunk(2, -1)
        out = torch.einsum("tei,tehi->teh", F.silu(gate) * upper, down[ids].float())
        torch.testing.assert_close(
            y.float(), (out * shares[..., None]).sum(1), rtol=2e-2, atol=2e-2
        )
        assert not counts.any()

"""The experts' kernels against the equation, on a CPU, by Triton's interpreter.

It needs TRITON_INTERPRET=1 in the environment, and numpy below 2.4.
"""

import os

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.modeling.attention.test_triton_interpreted import Interpreted

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)


def computed(x: Tensor, up: Tensor, down: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """The equation in float32."""
    gate, upper = torch.einsum("th,teih->tei", x.float(), up[ids].float()).chunk(2, -1)
    out = torch.einsum("tei,tehi->teh", F.silu(gate) * upper, down[ids].float())
    return (out * shares.float()[..., None]).sum(1)


@pytest.mark.parametrize(("tokens", "active"), [(1, 2), (2, 3), (5, 3), (37, 2)])
def test_experts(monkeypatch: pytest.MonkeyPatch, tokens: int, active: int) -> None:
    kernels = pytest.importorskip("modeling.layers.triton_experts")
    for name in ("_ENTER", "_UP", "_DOWN", "_SUM", "_UP_OF_PAIR", "_DOWN_OF_TOKEN"):
        monkeypatch.setattr(kernels, name, Interpreted(getattr(kernels, name)._kernel))
    count, hidden, width = 6, 128, 96
    x = torch.randn(tokens, hidden, dtype=torch.float16)
    up = torch.randn(count, 2 * width, hidden).mul(0.1).half()
    down = torch.randn(count, hidden, width).mul(0.1).half()
    assert kernels.fits(up, down)
    shares, ids = torch.randn(tokens, count).softmax(-1).topk(active)
    counts = torch.zeros(count, dtype=torch.int32)
    for _ in range(2):
        y = kernels.experts(x, up, down, ids, shares, counts)
        wanted = computed(x, up, down, ids, shares)
        torch.testing.assert_close(y.float(), wanted, rtol=2e-2, atol=2e-2)
        assert not counts.any()


@pytest.mark.parametrize("tokens", [3, 17])
@pytest.mark.parametrize("summed", [True, False])
def test_routing(monkeypatch: pytest.MonkeyPatch, tokens: int, summed: bool) -> None:
    kernels = pytest.importorskip("modeling.layers.triton_routing")
    for name in ("_ROUTE", "_BEST"):
        monkeypatch.setattr(kernels, name, Interpreted(getattr(kernels, name)._kernel))
    x, weight = torch.randn(tokens, 24), torch.randn(11, 24)
    zeros = torch.zeros(kernels.MOST_ROUTED, dtype=torch.int32)
    logits, shares, ids = kernels.route(x, weight, 3, summed, zeros)
    torch.testing.assert_close(logits, F.linear(x, weight))
    best, chosen = logits.softmax(-1).topk(3)
    assert torch.equal(ids, chosen)
    torch.testing.assert_close(shares, best / best.sum(-1, keepdim=True) if summed else best)
    assert not zeros.any()
